"""A docstring is completed by the text of a kind of functions, and by a function with the same arguments."""

from chunkwise.shared.call import docstrings

KIND = """
See `other_{name}`::

    x = other_{name}(x)

Args:
  x, y: two of
    three arrays.
  z: a number.

Raises:
  ValueError: an argument is wrong.
  NotImplementedError: a case is missing.

Cost: nothing.
"""


def chunk_thing(w, x, y, z, *, name=None):
    """Do it.

    Dims: T tokens.

    Args:
      y: an array:
        it is wide.
      name: of it.

    Raises:
      NotImplementedError: never.

    Accuracy: exact.
    Source: a book.
    """


def recurrent_thing(x, *, name, w):
    """Do less.

    Accuracy: exact.
    """


CHUNK = """Do it.

See `other_thing`::

    x = other_thing(x)

Dims: T tokens.

Args:
  x: two of
    three arrays.
  y: an array:
    it is wide.
  z: a number.
  name: of it.

Raises:
  ValueError: an argument is wrong.
  NotImplementedError: never.

Accuracy: exact.
Cost: nothing.
Source: a book."""


def test_completed():
    assert docstrings.completed(KIND)(chunk_thing) is chunk_thing
    assert chunk_thing.__doc__ == CHUNK
    docstrings.completed(KIND.replace("z:", "w:"), chunk_thing)(recurrent_thing)
    assert recurrent_thing.__doc__.split("\n\n")[3] == (
        "Args:\n  x: two of\n    three arrays.\n  name: of it.\n  w: a number."
    )
