"""The texts that docstrings of functions of one kind share, each the docstring of a module."""
