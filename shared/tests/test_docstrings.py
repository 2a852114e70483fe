"""The texts of kinds of functions, which complete their docstrings."""

import inspect

import pytest

from chunkwise.shared.call import docstrings


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
