"""Docstrings of the operators are whole."""

import inspect
import re

import pytest

from chunkwise.pipeline.operators import CHUNKED, OPERATORS
from chunkwise.shared.testing.documents import documented_flops


def entries(docstring):
    """Return the arguments that the section Args names."""
    section = re.search(r"^Args:\n(.*?)^\S", inspect.cleandoc(docstring), re.MULTILINE | re.DOTALL)[1]
    return [
        name
        for names in re.findall(r"^  ([A-Za-z][\w, \n]*):", section, re.MULTILINE)
        for name in re.split(r",\s+", names)
    ]


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_every_argument_is_documented_once(operator):
    taken = list(inspect.signature(operator.function).parameters)
    assert sorted(entries(operator.function.__doc__)) == sorted(taken)


@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_docstrings_are_the_pipelines(operator):
    text = inspect.getdoc(operator.function)
    assert "pallas" not in text
    assert all(f'"{name}"' in text for name in operator.implementations)
    for section in ("Dims", "Args", "Returns", "Raises", "Accuracy", "Cost", "Source"):
        assert text.count(f"\n{section}:") == 1, section
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "::\n\n" in text.split("Dims:")[0], "the equation"


@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_the_documented_cost_is_that_of_the_table(operator):
    sizes = dict(B=2, T=640, H=3, HV=6, K=48, V=80, C=32)
    assert documented_flops(operator.function, **sizes) == operator.cost(**sizes).flops
