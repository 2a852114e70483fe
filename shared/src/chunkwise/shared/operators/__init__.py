"""What operators are made of: checks, chunk tables, the token recurrence, decode, the inverse in plain JAX."""
