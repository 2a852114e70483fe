"""A public function is a signature, and its calls bring their arguments in records, by name."""

import inspect
import re

import pytest

from chunkwise.shared.call import signature
from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.call.gates import GateActivation


def run(x, options, implementation):
    return x, options, implementation


def chunk(q, k, v, scale=None, *, use_qk_l2norm_in_kernel=False, lower_bound=None, implementation="xla"):
    """Return records."""


def ragged(q, k, v, states, state_indices, *, num_decodes=0):
    """Return records."""


def test_the_function_is_its_signature():
    made = signature.public_function(run)(chunk)
    assert inspect.isfunction(made)
    assert inspect.signature(made) == inspect.signature(chunk)
    assert (made.__name__, made.__doc__) == ("chunk", chunk.__doc__)


def test_records_by_name():
    made = signature.public_function(run)(chunk)
    options = Options(use_qk_l2norm_in_kernel=True, activation=GateActivation(lower_bound=-5.0))
    got = made(1, 2, v=3, scale=4, use_qk_l2norm_in_kernel=True, lower_bound=-5.0)
    assert got == (Arguments(1, 2, 3, scale=4), options, "xla")


def test_a_size_of_chunks_in_the_place_of_the_scale():
    """A scale by name, or of another value, is what it says."""
    made = signature.public_function(run)(chunk)
    with pytest.warns(UserWarning, match=r"^`scale` is 64 by position, where transformers has `chunk_size`") as caught:
        made(1, 2, 3, 64)
    assert caught[0].filename == __file__
    made(1, 2, 3, 64.0)
    made(1, 2, 3, 2)
    made(1, 2, 3, scale=64)


def test_a_pool_is_the_initial_state():
    x = Arguments(1, 2, 3, initial_state=4, slots=Slots(5, num_decodes=0))
    assert signature.public_function(run)(ragged)(1, 2, 3, 4, 5) == (x, Options(output_final_state=True), None)


@pytest.mark.parametrize(
    ("args", "more", "message"),
    [
        ((1, 2), {}, "chunk() missing a required argument: 'v'"),
        ((1, 2, 3), dict(q=4), "chunk() multiple values for argument 'q'"),
        ((1, 2, 3), dict(other=4), "chunk() got an unexpected keyword argument 'other'"),
        ((1, 2, 3), dict(scal=4), "chunk() got an unexpected keyword argument 'scal'. Did you mean 'scale'?"),
        (
            (1, 2, 3), dict(safe_gate=False, cu_seqlens_cpu=None),
            "chunk() got an unexpected keyword argument 'safe_gate': leave it out; gates of any strength are safe "
            "here, and `lower_bound`, where a function has it, alone selects the bounded law.\n"
            "chunk() got an unexpected keyword argument 'cu_seqlens_cpu': leave it out; `cu_seqlens` is an array of "
            "the device here, and nothing is found from it on the host.",
        ),
        ((1, 2, 3), dict(gv=4), "'gv': leave it out; there are no gates of value channels here."),
        ((1, 2, 3, 4, 5), {}, "chunk() too many positional arguments"),
    ],
)  # fmt: skip
def test_wrong_calls(args, more, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        signature.public_function(run)(chunk)(*args, **more)
