"""Raw gates of decay, erasing and writing: values and gradients against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.testing.compare import GATE_GRADIENT_TOLERANCE, GRADIENT_TOLERANCE, TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, poison_padding
from chunkwise.shared.testing.oracle import reference
from tests.either_two_keys import KINDS
from tests.laws import law_reference, raw_inputs

PACKED = boundaries(1, 17, 0, 3)
# The laws are those of kda, whose tests have them.
THOROUGH = dict(test_values_and_gradients=True)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, implementation, dtype, form):
    """Erase gates and step sizes are doubled."""
    x = raw_inputs(KINDS[kind].inputs(1, 24, 1, 2, 8, 8, dtype=dtype, num_states=4), dtype=dtype)
    rng = np.random.default_rng(4)
    raw = dict(use_erase_sigmoid_in_kernel=True, use_write_sigmoid_in_kernel=True)
    raw = raw if kind == "gdn2" else dict(use_beta_sigmoid_in_kernel=True)
    options = dict(chunk_size=16) if form == "chunk" else {}
    function = functools.partial(
        getattr(KINDS[kind], form), **raw, **options, use_gate_in_kernel=True, allow_neg_eigval=True,
        cu_seqlens=PACKED, output_final_state=True, implementation=implementation,
    )  # fmt: skip
    do = jnp.asarray(rng.standard_normal(x["v"].shape), dtype)
    dht = jnp.asarray(rng.standard_normal(x["initial_state"].shape), jnp.float32)

    @jax.jit
    def run(x, do, dht):
        outputs, pull = jax.vjp(lambda x: function(**x), x)
        return outputs, pull((do, dht))[0]

    (o, state), grads = run(poison_padding(x, PACKED), do, dht)
    first = "b" if kind == "gdn2" else "beta"
    law = dict(allow_neg_eigval=True)
    made, pull = law_reference(x["g"], x[first], x["A_log"], x["dt_bias"], **law)
    final = {name: y for name, y in x.items() if name not in ("A_log", "dt_bias")} | {
        "g": made["g"],
        first: made["beta"],
    }
    if kind == "gdn2":
        final["w"] = 1 / (1 + np.exp(-np.asarray(x["w"], np.float64)))
    o_ref, state_ref, expected = reference(**final, cu_seqlens=PACKED, do=do, dht=dht)
    laws = pull(expected["g"], expected[first])
    expected |= {name: y for name, y in laws.items() if name != "beta"} | {first: laws["beta"]}
    if kind == "gdn2":
        expected["w"] = expected["w"] * final["w"] * (1 - final["w"])
    name_of = jnp.dtype(dtype).name
    assert_close("o", o, o_ref, TOLERANCE[name_of])
    assert_close("final_state", state, state_ref, TOLERANCE[name_of])
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert grad.dtype == x[name].dtype, name
        gate = name in ("g", "beta", "b", "w", "A_log", "dt_bias")
        assert_close(
            f"d{name}", grad, expected[name], (GATE_GRADIENT_TOLERANCE if gate else GRADIENT_TOLERANCE)[name_of]
        )
