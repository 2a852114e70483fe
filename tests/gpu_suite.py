"""The way of plain JAX for GPUs, run on a CPU, against the float64 recurrence."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.implementation import platforms
from chunkwise.shared.kernels import matmul
from chunkwise.shared.plain import chunks, state_scan
from chunkwise.shared.testing import compare, inputs, oracle

# Boundaries: an empty sequence, several in a chunk, one over a group of chunks, and padding. None for rows of a batch.
BATCHES = {"rows": None, "documents": inputs.boundaries(3, 0, 20, 5, 75, 17), "states": inputs.boundaries(3, 0, 90, 27)}
# Their chunks do not fill the last group of four, or the loop of two chunks of a CPU: zeros do.
UNFILLED = {"five chunks": (80, None), "one chunk": (10, None), "packed": (50, inputs.boundaries(3, 0, 40))}
T, C, H, HV, K, V = 130, 16, 1, 2, 16, 24
# In float32 a decay of e^-30 has the error of its exponent, 30 roundings of 6e-8. With products of three bfloat16
# passes the error is at most a tenth of a rounding to bfloat16, 1.1e-3.
TOLERANCE = {None: 3e-6, 3: 1e-4}


@contextlib.contextmanager
def small_groups(by_maps: bool) -> Iterator[None]:
    """Take the forms for GPUs, in groups of four chunks, of which two segments go side by side if by maps."""
    jax.clear_caches()
    few = mock.patch.object(state_scan, "FEW_HEADS", HV if by_maps else 0)
    segments, group = (mock.patch.object(*x) for x in ((state_scan, "SEGMENTS", 2), (chunks, "_GROUP", 4 * HV * C)))
    with platforms.gpu_forms(), few, segments, group:
        yield
    jax.clear_caches()


def assert_final_states(operator: Callable, batch: str, on_gpu: bool, per_channel: bool, delta: bool = True) -> None:
    """Fail unless final states are those of the recurrence where chunks of zeros fill a group.

    Args:
      operator: chunk_gated_delta_rule, chunk_kda or one of GLA.
      batch: one of UNFILLED.
      on_gpu: whether to go the way of GPUs.
      per_channel, delta: whether gates are per channel, and whether there are step sizes.
    """
    T, cu_seqlens = UNFILLED[batch]
    x = inputs.make_inputs(1, T, H, HV, K, V, num_states=1 if cu_seqlens is None else 3, per_channel=per_channel)
    x = x if delta else {name: y for name, y in x.items() if name != "beta"}
    poisoned = x if cu_seqlens is None else inputs.poison_padding(x, cu_seqlens)
    run = functools.partial(operator, output_final_state=True, cu_seqlens=cu_seqlens, chunk_size=C)
    with small_groups(False) if on_gpu else contextlib.nullcontext():
        _, got = run(**poisoned, implementation="xla")
    compare.assert_close("final_state", got, oracle.reference(**x, cu_seqlens=cu_seqlens)[1], TOLERANCE[None])


def assert_gpu_form(
    operator: Callable, batch: str, by_maps: bool, passes: int | None, per_channel: bool, delta: bool = True
) -> None:
    """Fail unless results and gradients are those of the recurrence.

    Args:
      operator: chunk_gated_delta_rule, chunk_kda or one of GLA.
      batch: one of BATCHES.
      by_maps: whether the states go by maps.
      passes: of products: None for float32, 3 for bfloat16 passes.
      per_channel, delta: whether gates are per channel, and whether there are step sizes.
    """
    cu_seqlens = BATCHES[batch]
    N = {"rows": 1, "documents": 0, "states": 4}[batch]
    kinds = dict(gate="spikes") if passes is None else dict(repeat_key=True, beta=1.9, gate="logsigmoid/10")
    x = inputs.make_inputs(1, T, H, HV, K, V, num_states=N, per_channel=per_channel, **kinds)
    x = x if delta else {name: y for name, y in x.items() if name != "beta"}
    # Three passes are for tensors of bfloat16. In float32 their results are not rounded.
    x |= {} if passes is None else {n: x[n].astype(jnp.bfloat16).astype(jnp.float32) for n in ("q", "k", "v")}
    poisoned = x if cu_seqlens is None else inputs.poison_padding(x, cu_seqlens)

    def run(x, cu_seqlens):
        o, state = operator(**x, output_final_state=N > 0, cu_seqlens=cu_seqlens, chunk_size=C, implementation="xla")
        return dict(o=o, final_state=state) if N else dict(o=o)

    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(run, poisoned, cu_seqlens)
    cotangents = {name: jnp.asarray(rng.standard_normal(y.shape), y.dtype) for name, y in shapes.items()}
    with small_groups(by_maps), contextlib.nullcontext() if passes is None else matmul.emulate_mxu(passes):
        got = jax.jit(compare.with_gradients(run))(poisoned, cu_seqlens, cotangents)
    o, state, gradients = oracle.reference(
        **x, cu_seqlens=cu_seqlens, do=cotangents["o"], dht=cotangents.get("final_state")
    )
    want = dict(o=o, final_state=state) | {f"d{name}": y for name, y in gradients.items()}
    for name, y in got.items():
        # The gates of tokens that forget all that their key held have no effect, and their gradient is rounding.
        if passes is None or name != "dg":
            compare.assert_close(name, y, want[name], TOLERANCE[passes])
