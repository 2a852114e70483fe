"""Every operator under the modes of JAX that forbid or change what others do by habit.

Interpreted kernels take seconds to compile, so this is a sample, and the packages test their own kernels in all modes:
every implementation of every operator runs forward and backward in 64-bit mode or under the strict modes. The thorough
tests run most in the other mode too. The strict modes are one program: no promotion of types or ranks, and no NaN
anywhere. A pack with states goes through the most code, so it stands for all batches, but for rows of segments under a
few. "staged" runs with gates per channel, since its stages do not know whose they are, and in the thorough tests with
gates per head. Without jit, where every operation is a program of its own, the thorough tests run one of every kind.
"""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import pipeline
from chunkwise.pipeline.operators import CHUNKED, COMPOSED, OPERATORS
from chunkwise.shared.testing.compare import assert_close, by_part, tolerance
from chunkwise.shared.testing.inputs import boundaries, make_inputs

EVERY = OPERATORS | COMPOSED
MODES = {
    "x64": {"jax_enable_x64": True},
    "strict": {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise", "jax_debug_nans": True},
    "no jit": {"jax_disable_jit": True},
}
PACKED = boundaries(1, 0, 12, 5)
SEGMENTS = jnp.asarray([[-1, *[3] * 8, *[1] * 9, -1, -1]], jnp.int32)


@contextlib.contextmanager
def under(mode):
    """Set the options of a mode, for all threads."""
    before = {name: getattr(jax.config, name) for name in MODES[mode]}
    try:
        for name, value in MODES[mode].items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


# Compiling these takes the longest; they run in one of the two modes.
ONCE = {
    ("chunk_gated_delta_rule", "staged"): "x64",
    ("chunk_gla", "staged"): "strict",
    ("chunk_gated_delta_rule", "fused"): "x64",
    ("chunk_kda", "fused"): "strict",
    ("chunk_kda", "xla"): "x64",
}


# The delta rule and the recipes are other operators but for a few lines, of which those with scans run in one mode.
OF_OTHERS = {name for name, x in COMPOSED.items() if "recipes" in x.function.__module__} | {
    "chunk_delta_rule", "recurrent_delta_rule",
}  # fmt: skip
SCANS = [("x64", name, "xla") for name in ("chunk_mamba3", "chunk_precond_gated_delta_rule")]


def sample():
    """Return (mode, operator, implementation, what the sequences are)."""
    cases = [
        (mode, operator.name, implementation, "pack")
        for operator in EVERY.values()
        for implementation in operator.implementations
        for mode in ("x64", "strict")
        if ONCE.get((operator.name, implementation), "none" if implementation == "staged" else mode) == mode
    ]
    segments = ("gated_delta_rule", "xla"), ("simple_gla", "fused"), ("gla", "xla")
    cases += [
        (mode, f"chunk_{name}", implementation, "segments")
        for mode, (name, implementation) in zip(("x64", "x64", "strict"), segments, strict=True)
    ]
    kinds = ("recurrent_kda", "xla"), ("recurrent_kda", "fused"), ("chunk_gla", "xla"), ("chunk_simple_gla", "fused")
    return cases + [("no jit", *kind, "pack") for kind in kinds]


def repeats(mode, name, implementation, sequences):
    """Return whether a case of the sample repeats another in a second mode, or has no jit, which takes long."""
    # Gates per head in 64-bit mode and gates per channel under the strict modes.
    strict = EVERY[name].per_channel or "mlstm" in name
    first = ONCE.get((name, implementation), "strict" if strict else "x64")
    slowest = ("chunk_gla", "staged"), ("chunk_kda", "fused"), ("chunk_kda", "xla")
    # Their gates are a part of others.
    slowest += ("chunk_gla", "fused"), ("chunk_gla", "xla"), ("chunk_simple_gla", "xla"), ("chunk_simple_gla", "fused")
    slowest += ("recurrent_gla", "xla"), ("recurrent_simple_gla", "xla")
    # Plain JAX has the rules of types that the recurrent functions show.
    slowest += (("chunk_gated_delta_rule", "xla"),)
    # Their kernels are those of others.
    slowest += tuple((name, "fused") for name in COMPOSED if name != "chunk_mlstm")
    if name in OF_OTHERS:
        return (mode, name, implementation) not in SCANS
    return mode != first or sequences == "segments" or (name, implementation) in slowest


THOROUGH = dict(
    test_results_and_gradients=repeats,
    # The chunked delta rules take the longest to compile.
    test_a_float64_scale_is_a_float32_scale=lambda operator: (
        (operator.chunked and operator.delta) or operator.name in OF_OTHERS
    ),
    # A pool comes with boundaries too.
    test_wide_integers_of_numpy_are_those_of_32_bits=lambda name: name != "state_indices",
)


@pytest.mark.parametrize(("mode", "name", "implementation", "sequences"), sample())
def test_results_and_gradients(mode, name, implementation, sequences):
    operator = EVERY[name]
    told = {"cu_seqlens": PACKED} if sequences == "pack" else {"segment_ids": SEGMENTS}
    x = operator.source.inputs(1, 20, 1, 1, 8, 16, num_states=len(PACKED) - 1 if sequences == "pack" else 1)
    rng = np.random.default_rng(1)
    draw = lambda y: jnp.asarray(rng.standard_normal(y.shape), jnp.float32)
    do, dht = draw(x[operator.source.values][:, :20]), jax.tree.map(draw, x["initial_state"])
    flags = {"use_qk_l2norm_in_kernel": True}
    flags = flags if flags.keys() <= inspect.signature(operator.function).parameters.keys() else {}
    options = flags | operator.static | ({"chunk_size": 16} if operator.chunked else {})
    options |= told | dict(output_final_state=True, implementation=implementation)

    @jax.jit
    def run(x, do, dht):
        outputs, pullback = jax.vjp(lambda x: operator.function(**x, **options), x)
        return outputs, pullback((do, dht))[0]

    with under(mode):
        (o, state), gradients = jax.block_until_ready(run(x, do, dht))
    o_ref, state_ref, expected = operator.source.reference(x, **flags, **told, do=do, dht=dht)
    found = by_part({"o": o, "final_state": state} | {f"d{name}": y for name, y in gradients.items()})
    expected = {"o": o_ref, "final_state": state_ref} | {f"d{name}": y for name, y in expected.items()}
    for name, want in by_part(expected).items():
        assert found[name].dtype == jnp.float32, name
        assert_close(name, found[name], want, tolerance(name, "float32"))


@pytest.mark.parametrize("operator", EVERY.values(), ids=EVERY)
def test_float64_inputs_are_refused(operator):
    x = operator.source.inputs(1, 4, 1, 1, 8, 8, num_states=1)
    leaves, kind = jax.tree.flatten(x)
    with under("x64"):
        for n, name in enumerate(by_part({name: x[name] for name in sorted(x)})):
            wide = jax.tree.unflatten(kind, [np.asarray(y, np.float64) if i == n else y for i, y in enumerate(leaves)])
            with pytest.raises(ValueError, match=f"`{name}` must be float32, bfloat16 or float16; got float64"):
                operator.function(**wide, **operator.static)


SCALED = [x for x in EVERY.values() if "scale" in inspect.signature(x.function).parameters]


@pytest.mark.parametrize("operator", SCALED, ids=lambda operator: operator.name)
def test_a_float64_scale_is_a_float32_scale(operator):
    """A number that is traced is float64 in 64-bit mode."""
    x = operator.source.inputs(1, 4, 1, 1, 8, 8) | operator.static
    expected = operator.function(**x, scale=0.3)[0]
    with under("x64"):
        o = jax.jit(lambda scale: operator.function(**x, scale=scale)[0])(np.float64(0.3))
    assert o.dtype == jnp.float32
    assert_close("o", o, expected, tolerance("o", "float32"))


def test_the_sample_holds_all_implementations():
    names = {(name, implementation) for _, name, implementation, _ in sample()}
    missing = {(x.name, i) for x in EVERY.values() for i in x.implementations} - names
    # The stages of others are those of the two.
    staged = {x.name for x in EVERY.values() if "staged" in x.implementations}
    assert missing == {(name, "staged") for name in staged - {"chunk_gated_delta_rule", "chunk_gla"}}


@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_bfloat16_tensors_are_not_promoted(operator):
    """Tracing shows it: products of bfloat16 tensors with what is computed in float32 name their types."""
    x = operator.source.inputs(1, 40, 1, 2, 128, 128, dtype=jnp.bfloat16)
    with under("strict"):
        total = lambda x: jnp.sum(operator.function(**x, implementation="fused")[0].astype(jnp.float32))
        gradients = jax.eval_shape(jax.grad(total), x)
    assert jax.tree.map(lambda y: y.dtype, gradients) == jax.tree.map(lambda y: y.dtype, x)


@pytest.mark.parametrize("name", ["cu_seqlens", "segment_ids", "state_indices", "step"])
def test_wide_integers_of_numpy_are_those_of_32_bits(name):
    """numpy counts in 64 bits."""
    x, pool = make_inputs(1, 8, 1, 2, 16, 16), jnp.ones((4, 2, 16, 16))
    boundaries, indices = np.array([0, 3, 8]), np.array([2, 0])

    def call(of):
        if name == "segment_ids":
            return pipeline.chunk_gated_delta_rule(**x, segment_ids=of(np.array([[0] * 3 + [1] * 5])))
        if name == "cu_seqlens":
            return pipeline.chunk_gated_delta_rule(**x, cu_seqlens=of(boundaries))
        slots = dict(cu_seqlens=of(boundaries), state_indices=of(indices))
        if name == "state_indices":
            return pipeline.recurrent_gated_delta_rule(**x, **slots, initial_state=pool, output_final_state=True)
        slots |= dict(read_indices=of(np.array([1, 3])), num_decodes=of(np.array(0)), num_sequences=of(np.array(2)))
        return pipeline.ragged_gated_delta_rule(**x, **slots, states=pool)

    for have, want in zip(call(lambda y: y), call(lambda y: jnp.asarray(y, jnp.int32)), strict=True):
        if want is not None:
            np.testing.assert_array_equal(have, want)
