"""The implementations of an operator, and how one runs."""
