"""Every recipe against its definition in float64: values, gradients, packs, states, decodes; and what it refuses."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.recipes import (
    chunk_hgrn2,
    chunk_mamba3,
    chunk_precond_gated_delta_rule,
    hgrn2,
    mamba3,
    preconditioned,
    rwkv6,
    sequences,
)
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import boundaries
from tests.composition_suite import Kind, assert_values_and_gradients
from tests.documents import check_call

RECIPES = [hgrn2.RECIPE, rwkv6.RECIPE, mamba3.RECIPE, preconditioned.BY_HEAD, preconditioned.BY_CHANNEL]
KINDS = {
    x.chunk.__name__: Kind(x.chunk, x.recurrent, None, x.definition, x.inputs, ("g_atk", "beta_atk"), scale=x.scale)
    for x in RECIPES
}
# A pack with states goes through the most code; erase keys that read after decays by head are a branch of the kernels.
QUICK = {(name, "chunk", "sequences", "xla") for name in KINDS if name != "chunk_precond_kda"}
QUICK |= {("chunk_precond_gated_delta_rule", "chunk", "rows", "fused")}
THOROUGH = dict(
    test_values_and_gradients=lambda name, call, form, implementation: (name, call, form, implementation) not in QUICK,
    test_bfloat16=True,
    test_groups_of_value_heads=True,
)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize(
    ("call", "form"),
    [*(("chunk", form) for form in ("rows", "stream", "sequences", "segments")), ("recurrent", "sequences")],
)
@pytest.mark.parametrize("name", KINDS)
def test_values_and_gradients(name, call, form, implementation):
    assert_values_and_gradients(KINDS[name], call, form, implementation, gate="resets")


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16(name):
    assert_values_and_gradients(KINDS[name], "chunk", "rows", "xla", jnp.bfloat16)


def test_groups_of_value_heads():
    """Value heads of a preconditioned rule share the sum of squared keys of their key head."""
    x = preconditioned.BY_HEAD.inputs(1, 20, 2, 2, 8, 8)
    wide = {name: jnp.repeat(x[name], 2, axis=2) for name in ("v", "g", "beta")}
    keys = {name: jnp.repeat(x[name], 2, axis=2) for name in ("q", "k", "g_atk", "beta_atk")}
    keys["log_atk_scale"] = jnp.repeat(x["log_atk_scale"], 2)
    run = jax.jit(lambda x: chunk_precond_gated_delta_rule(**x)[0])
    assert_close("o", run(x | wide), run(x | wide | keys), 1e-6)


def test_mamba3_whose_trap_is_1_is_mamba2():
    x = mamba3.RECIPE.inputs(1, 20, 2, 2, 8, 8)
    plain = x | dict(trap=jnp.ones_like(x["trap"]), angles=jnp.zeros_like(x["angles"]))
    o = jax.jit(lambda x: chunk_mamba3(**x)[0])(plain)
    q, k, v, g, dt = (np.asarray(x[name][0], np.float64) for name in ("q", "k", "v", "g", "dt"))
    S, want = np.zeros((2, 8, 8)), []
    for t in range(20):
        S = np.exp(g[t])[:, None, None] * S + (dt[t][:, None] * k[t])[..., None] * v[t][:, None]
        want.append(np.einsum("hkv,hk->hv", S, q[t]))
    assert_close("o", o[0], np.stack(want), 1e-5)


def test_an_angle_keeps_its_digits():
    """Whole turns are taken away as they come: after 1,000 tokens of about a turn each the sum is right."""
    angles = jnp.asarray(np.random.default_rng(0).uniform(5, 7, (1, 1000, 1, 1)), jnp.float32)
    tokens = sequences.find(dict(B=1, T=1000), dict(cu_seqlens=None))
    found = jax.jit(lambda y: mamba3.rotate(tokens, y, None)[0])(angles)
    want = np.cumsum(np.asarray(angles, np.float64), axis=1)
    assert np.max(abs(np.exp(1j * np.asarray(found, np.float64)) - np.exp(1j * want))) < 1e-5


def test_other_sequences_stay_clean():
    """A NaN in a sequence reaches no sum of another one, and no gradient of it."""
    tokens = sequences.find(dict(B=1, T=9), dict(cu_seqlens=boundaries(4, 5)))
    y = jnp.ones((1, 9, 1)).at[:, 2].set(jnp.nan)
    sums, pull = jax.vjp(lambda decay, step: tokens.accumulate(decay, step, None), y, y)
    np.testing.assert_array_equal(sums[0, 4:, 0], np.arange(1.0, 6.0))
    for gradient in pull(jnp.ones_like(sums)):
        assert np.isfinite(np.asarray(gradient)[0, 4:]).all()


@pytest.mark.parametrize("function", [y for x in RECIPES for y in (x.chunk, x.recurrent)])
def test_help_opens_with_the_call(function):
    check_call(function, B=1, T=4, H=1, HV=1, K=8, V=8, C=64, NT=1, N=1, R=4)
    documented = re.findall(r"^  (\w+(?:, \w+)*):", inspect.getdoc(function).partition("\nArgs:")[2], re.MULTILINE)
    names = [name for entry in documented for name in entry.split(", ")]
    assert set(inspect.signature(function).parameters) <= {*names, "NotImplementedError"}


def test_hgrn2_forgets_what_it_writes():
    """A gate of 0 writes nothing, one of -inf writes a whole token, and a weak one what it forgets, with all digits."""
    v = jnp.ones((1, 2, 1, 4))
    o = chunk_hgrn2(jnp.ones_like(v), v, jnp.zeros_like(v).at[:, 0].set(-jnp.inf), scale=1.0)[0]
    assert_close("o", o, 4 * v, 1e-6)
    o = chunk_hgrn2(jnp.ones_like(v), v, jnp.full_like(v, -1e-6), scale=1.0)[0]
    assert_close("o", o, 4e-6 * v * jnp.arange(1, 3)[None, :, None, None], 1e-5)
