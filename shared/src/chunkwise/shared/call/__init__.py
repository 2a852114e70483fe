"""What a call of a user is: its arguments, their checks, and the signatures that bind them."""
