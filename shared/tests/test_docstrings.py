"""A docstring is completed by the text of a kind of functions, and by a function with the same arguments."""

import inspect

import pytest

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


@pytest.mark.parametrize("kind", [*docstrings.KINDS.values(), docstrings.STAGE])
def test_texts_are_in_the_form_that_is_read(kind):
    """Every entry of a text is found again, its continuation lines are indented, and a line fits with a long name."""
    sections = docstrings._split(kind)[1]
    for label in ("Args", "Raises"):
        lines = sections[label].splitlines()[1:]
        assert len(docstrings._entries(sections[label])) == sum(
            line.split(":")[0].count(",") + 1 for line in lines if not line.startswith("    ")
        )
    assert max(map(len, inspect.cleandoc(kind).replace("{name}", "gated_delta_rule").splitlines())) <= 120
