"""A call with an argument of another library, or with a slip of the pen, says what the caller does instead."""

import inspect
import re

import pytest

from chunkwise.shared.call import unknown_arguments


def flip(x, *, reverse: bool = False):
    """Return x, or x from its end."""
    return x[::-1] if reverse else x


explained = unknown_arguments.explained(flip)


def test_the_function_stays_what_it_is():
    assert inspect.isfunction(explained)
    assert inspect.signature(explained) == inspect.signature(flip)
    assert (explained.__name__, explained.__doc__) == (flip.__name__, flip.__doc__)
    assert explained("ab") == "ab"


def test_every_such_argument_of_a_call():
    message = (
        "flip() got an unexpected keyword argument 'safe_gate': leave it out; gates of any strength are safe here, and "
        "`lower_bound`, where a function has it, alone selects the bounded law.\n"
        "flip() got an unexpected keyword argument 'cu_seqlens_cpu': leave it out; `cu_seqlens` is an array of the "
        "device here, and nothing is found from it on the host."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        explained("ab", safe_gate=False, cu_seqlens_cpu=None)


@pytest.mark.parametrize(
    ("args", "more", "message"),
    [
        (("ab",), {"revers": 1}, "flip() got an unexpected keyword argument 'revers'. Did you mean 'reverse'?"),
        (("ab",), {"other": 1}, "flip() got an unexpected keyword argument 'other'"),
        ((), {}, "flip() missing 1 required positional argument: 'x'"),
    ],
)
def test_other_wrong_calls(args, more, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        explained(*args, **more)
