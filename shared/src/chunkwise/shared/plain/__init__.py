"""Plain JAX: the recurrences of all operators, token by token and chunk by chunk."""
