"""The form of plain JAX for GPUs, on a CPU, against the float64 recurrence.

`nox -s gpu` runs the other tests on it too.
"""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gdn import chunk_gated_delta_rule
from chunkwise.fused_gla import chunk_gla, chunk_simple_gla
from chunkwise.kda import chunk_kda
from chunkwise.shared.implementation import platforms
from chunkwise.shared.kernels import matmul
from chunkwise.shared.plain import chunks, state_scan
from chunkwise.shared.testing import compare, inputs, oracle

# An operator, and whether its gates are per channel and it has step sizes.
OPERATORS = {
    "gated_delta_rule": (chunk_gated_delta_rule, False, True),
    "kda": (chunk_kda, True, True),
    "simple_gla": (chunk_simple_gla, False, False),
    "gla": (chunk_gla, True, False),
}
# Without a delta rule nothing goes by maps.
FORMS = [
    (name, by_maps, passes)
    for name, (*_, delta) in OPERATORS.items()
    for by_maps, passes in ([(x, y) for x in (False, True) for y in (None, 3)] if delta else [(False, None)])
]
# Boundaries: an empty sequence, several in a chunk, one over a span of chunks, and padding. None for rows of a batch.
BATCHES = {"rows": None, "documents": inputs.boundaries(3, 0, 20, 5, 75, 17), "states": inputs.boundaries(3, 0, 90, 27)}
# Their chunks do not fill the last span of four, or the loop of two chunks of a CPU: zeros do.
UNFILLED = {"five chunks": (80, None), "one chunk": (10, None), "packed": (50, inputs.boundaries(3, 0, 40))}
T, C, H, HV, K, V = 130, 16, 1, 2, 16, 24
# In float32 a decay of e^-30 has the error of its exponent, 30 roundings of 6e-8. With products of three bfloat16
# passes the error is at most a tenth of a rounding to bfloat16, 1.1e-3.
TOLERANCE = {None: 3e-6, 3: 1e-4}
THOROUGH = dict(
    test_gpu_form=lambda batch, name, by_maps, passes: (
        (batch, name, by_maps, passes) != ("rows", "gated_delta_rule", True, None)
    ),
    # The form of a delta rule has a quick test above. Without one, a CPU takes all chunks at once, and nothing fills
    # them.
    test_final_states=lambda batch, name, on_gpu: name != "gla" or not on_gpu or batch == "one chunk",
)


@contextlib.contextmanager
def small_spans(by_maps: bool) -> Iterator[None]:
    """Take the forms for GPUs, in spans of four chunks, of which two segments go side by side if by maps."""
    jax.clear_caches()
    few = mock.patch.object(state_scan, "FEW_HEADS", HV if by_maps else 0)
    segments, span = (mock.patch.object(*x) for x in ((state_scan, "SEGMENTS", 2), (chunks, "_SPAN", 4 * HV * C)))
    with platforms.gpu_forms(), few, segments, span:
        yield
    jax.clear_caches()


def arrays(name, T, **kinds):
    """Return an operator, and its seeded arrays."""
    operator, per_channel, delta = OPERATORS[name]
    x = inputs.make_inputs(1, T, H, HV, K, V, per_channel=per_channel, **kinds)
    return functools.partial(operator, chunk_size=C, implementation="xla"), {k: x[k] for k in x if delta or k != "beta"}


def poisoned(x, cu_seqlens):
    return x if cu_seqlens is None else inputs.poison_padding(x, cu_seqlens)


@pytest.mark.parametrize(("name", "by_maps", "passes"), FORMS)
@pytest.mark.parametrize("batch", BATCHES)
def test_gpu_form(batch, name, by_maps, passes):
    """Values and gradients, with products of float32 or of three bfloat16 passes."""
    cu_seqlens = BATCHES[batch]
    N = {"rows": 1, "documents": 0, "states": 4}[batch]
    kinds = dict(gate="spikes") if passes is None else dict(repeat_key=True, beta=1.9, gate="logsigmoid/10")
    operator, x = arrays(name, T, num_states=N, **kinds)
    # Three passes are for tensors of bfloat16. In float32 their results are not rounded.
    x |= {} if passes is None else {n: x[n].astype(jnp.bfloat16).astype(jnp.float32) for n in ("q", "k", "v")}

    def run(x, cu_seqlens):
        o, state = operator(**x, output_final_state=N > 0, cu_seqlens=cu_seqlens)
        return dict(o=o, final_state=state) if N else dict(o=o)

    rng, read = np.random.default_rng(1), poisoned(x, cu_seqlens)
    shapes = jax.eval_shape(run, read, cu_seqlens)
    cotangents = {name: jnp.asarray(rng.standard_normal(y.shape), y.dtype) for name, y in shapes.items()}
    with small_spans(by_maps), contextlib.nullcontext() if passes is None else matmul.emulate_mxu(passes):
        got = jax.jit(compare.with_gradients(run))(read, cu_seqlens, cotangents)
    do, dht = cotangents["o"], cotangents.get("final_state")
    o, state, gradients = oracle.reference(**x, cu_seqlens=cu_seqlens, do=do, dht=dht)
    want = dict(o=o, final_state=state) | {f"d{name}": y for name, y in gradients.items()}
    for name, y in got.items():
        # The gates of tokens that forget all that their key held have no effect, and their gradient is rounding.
        if passes is None or name != "dg":
            compare.assert_close(name, y, want[name], TOLERANCE[passes])


@pytest.mark.parametrize("on_gpu", [False, True], ids=["on a CPU", "on a GPU"])
@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "gla"])
@pytest.mark.parametrize("batch", UNFILLED)
def test_final_states(batch, name, on_gpu):
    """They are those of the recurrence where chunks of zeros fill a span."""
    T, cu_seqlens = UNFILLED[batch]
    operator, x = arrays(name, T, num_states=1 if cu_seqlens is None else 3)
    with small_spans(False) if on_gpu else contextlib.nullcontext():
        _, got = operator(**poisoned(x, cu_seqlens), output_final_state=True, cu_seqlens=cu_seqlens)
    compare.assert_close("final_state", got, oracle.reference(**x, cu_seqlens=cu_seqlens)[1], TOLERANCE[None])
