"""Docstrings of the operators and of their stages are whole."""

import inspect
import re

import pytest

from chunkwise import chunk_h, chunk_o, cumsum, kkt, pipeline, solve_tril, wy_fast
from chunkwise.pipeline.operators import CHUNKED, RECURRENT
from chunkwise.shared.serving.decode import launch
from tests.documents import check_call, documented_flops


def entries(docstring):
    """Return the arguments that the section Args names."""
    section = re.search(r"^Args:\n(.*?)(^\S|\Z)", inspect.cleandoc(docstring), re.MULTILINE | re.DOTALL)[1]
    found = re.findall(r"^  ([A-Za-z][\w, \n]*):", section, re.MULTILINE)
    return [name for names in found for name in re.split(r",\s+", names)]


MODULES = pipeline, cumsum, kkt, solve_tril, wy_fast, chunk_h, chunk_o
PUBLIC = [x for module in MODULES for x in map(vars(module).get, module.__all__) if inspect.isfunction(x)]


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__name__)
def test_every_argument_is_documented_once(function):
    assert sorted(entries(function.__doc__)) == sorted(inspect.signature(function).parameters)


CALLS = [x for x in PUBLIC if x.__name__.startswith(("chunk_", "recurrent_", "ragged_", "solve_", "recompute_"))]


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_help_opens_with_the_call(function):
    check_call(function, B=1, T=4, H=1, HV=2, K=8, V=8, C=64, NT=1, N=1, n=2, num_householder=2, slots=2)


def test_no_docstring_speaks_of_arguments_that_the_function_lacks():
    """A name of several words is an argument wherever it stands; so parts of texts that are shared must fit."""
    operators = [x for x in PUBLIC if x.__name__.startswith(("chunk_", "recurrent_")) and x in vars(pipeline).values()]
    known = {name for x in operators for name in inspect.signature(x).parameters if "_" in name}
    for function in operators:
        foreign = known - set(inspect.signature(function).parameters)
        assert not foreign & set(re.findall(r"\w+", function.__doc__)), function.__name__


OF_TOKENS = [x for x in PUBLIC if x.__name__.startswith(("recurrent_", "ragged_"))]


@pytest.mark.parametrize(
    "function", [*OF_TOKENS, *(x.function for x in CHUNKED)], ids=lambda function: function.__name__
)
def test_docstrings_have_their_sections(function):
    text, chunked = inspect.getdoc(function), function not in OF_TOKENS
    for section in ("Dims", "Args", "Returns", "Raises", "Accuracy", "Cost", *["Source"] * chunked):
        assert text.count(f"\n{section}:") == 1, section
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_docstrings_are_the_pipelines(operator):
    text = inspect.getdoc(operator.function)
    assert "pallas" not in text
    assert all(f'"{name}"' in text for name in operator.implementations)


@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_the_documented_cost_is_that_of_the_table(operator):
    sizes = dict(B=2, T=640, H=3, HV=6, K=48, V=80, C=32)
    assert documented_flops(operator.function, **sizes) == operator.cost(**sizes).flops


@pytest.mark.parametrize("operator", RECURRENT, ids=lambda operator: operator.name)
def test_the_documented_cost_is_that_of_a_decode(operator):
    sizes = dict(B=2, T=64, H=3, HV=6, K=48, V=80)
    assert documented_flops(operator.function, **sizes) == launch.flops(2 * 64, 6, 48, 80, delta=operator.delta)
