"""The call of a user: its arguments, their checks, and the signatures that bind them."""
