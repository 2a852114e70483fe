"""How many of our functions stand between a call of the user and the launch of a kernel."""

import traceback
from collections.abc import Callable
from unittest import mock

import jax
from jax.experimental import pallas as pl


def frames_of_launches(call: Callable[[], object]) -> list[list[str]]:
    """Return the names of our functions on the stack of every launch that a call traces, the outermost first."""
    seen, launch = [], pl.pallas_call

    def spy(*args, **kwargs):
        stack = [frame for frame in traceback.extract_stack() if "/chunkwise/" in frame.filename]
        seen.append([frame.name for frame in stack if frame.filename != __file__])
        return launch(*args, **kwargs)

    jax.clear_caches()
    with mock.patch.object(pl, "pallas_call", spy):
        jax.eval_shape(call)
    return seen


def assert_frames(call: Callable[[], object], most: int) -> None:
    """Fail unless a call launches kernels, each of them behind at most so many of our functions."""
    deepest = max(frames_of_launches(call), key=len)
    assert len(deepest) <= most, deepest
