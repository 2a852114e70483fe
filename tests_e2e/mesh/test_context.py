"""Tokens split over devices: the result is that of one device, in float64-checked values and all gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from chunkwise.pipeline import chunk_gla
from chunkwise.pipeline.operators import CHUNKED, OPERATORS
from chunkwise.shared.plain import affine_scan
from chunkwise.shared.testing.compare import assert_close, with_gradients
from chunkwise.shared.testing.tpu import text_for_tpu
from tests.transforms import KEEPING
from tests_e2e.mesh.meshes import (
    P,
    assert_divided,
    assert_expected,
    cotangents_of,
    expected,
    inputs_of,
    make_mesh,
    on_mesh,
    place,
    run_of,
    spec_of,
)

NAMES = [operator.name for operator in CHUNKED]
IN_KERNELS = pytest.mark.parametrize("implementation", ["fused", "staged"])
# The operators with launches of their own where tokens are split.
SPLIT = "chunk_gated_delta_rule", "chunk_kda", "chunk_gdn2", "chunk_comba", "chunk_gla", "chunk_simple_gla"


def is_other(name):
    """Return whether other operators stand for an operator: a delta rule, and a gate per channel."""
    return name not in ("chunk_gated_delta_rule", "chunk_gla")


THOROUGH = dict(
    test_operators=lambda name: name not in ("recurrent_gated_delta_rule", "chunk_gated_delta_rule", "chunk_gla"),
    # Eight devices fill every step of a doubling.
    test_scans=lambda devices, start: devices != 8 or start == "zeros",
    test_launches=lambda name, remat: remat != (name == "chunk_kda"),
    test_gates=lambda name, gate: gate != "strong" or is_other(name),
    test_kernels=lambda name, implementation: implementation == "staged" or name != "chunk_gated_delta_rule",
    test_documents_in_kernels=lambda name, states, implementation: (
        (name, states, implementation) != ("chunk_gla", True, "fused")
    ),
    # Documents have states and none, and devices exchange them in the same way for every operator.
    test_final_states_without_initial_ones=True,
    test_segments_in_kernels=True,
    test_documents_cross_devices=lambda name, states: not states or name not in ("chunk_kda", "chunk_gla"),
    test_segments_cross_devices=lambda name: name != "chunk_gated_delta_rule",
    test_inside_a_shard_map=lambda axis, check_vma: axis == "b" or not check_vma,
    test_nan_stays_in_its_document=lambda states: states,
)
# Documents of 48 tokens on 8 devices of 6: empty ones, some inside of a device, some over many, which end inside of one
# and at the end of one, a start at the first token of a device, and padding.
BOUNDARIES = jnp.array([0, 1, 1, 16, 20, 42, 42, 45], jnp.int32)
# Of two rows: padding before, between and after segments, over a whole device, and at its borders; one id twice.
ROWS = (
    [5, 5, -1, *[5] * 4, *[2] * 11, *[-1] * 9, *[2] * 3, *[1] * 12, *[-2] * 6],
    [*[-1] * 14, *[3] * 10, *[0] * 6, 3, *[4] * 17],
)
SEGMENTS = np.array(ROWS, np.int32)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    assert_divided(name, "xla", make_mesh((8,), "explicit"), P(None, "a"), "explicit", inputs_of(name))


@pytest.mark.parametrize("gate", ["zero", "strong", "resets"])
@pytest.mark.parametrize("name", NAMES)
def test_gates(name, gate):
    x = inputs_of(name, gate=gate, B=1)
    assert_divided(name, "xla", make_mesh((4,), "automatic"), P(None, "a"), "automatic", x)


@pytest.mark.parametrize("name", NAMES)
@IN_KERNELS
def test_kernels(name, implementation):
    x = inputs_of(name, B=1, H=1, HV=2)
    assert_divided(name, implementation, make_mesh((2,), "automatic"), P(None, "a"), "automatic", x)


@IN_KERNELS
@pytest.mark.parametrize("states", [True, False], ids=["states", "no-states"])
@pytest.mark.parametrize("name", SPLIT)
def test_documents_in_kernels(name, states, implementation):
    """Three launches where tokens are split: the states alone, the operator, the gradient of the state alone."""
    x = inputs_of(name, B=1, states=len(BOUNDARIES) - 1 if states else 0)
    mesh, fixed = make_mesh((2,), "automatic"), {"cu_seqlens": BOUNDARIES}
    assert_divided(name, implementation, mesh, P(None, "a"), "automatic", x, fixed, states)


@IN_KERNELS
@pytest.mark.parametrize("name", SPLIT)
def test_segments_in_kernels(name, implementation):
    """Padding may hold anything."""
    x, fixed = inputs_of(name), {"segment_ids": jnp.asarray(SEGMENTS)}
    padding = {n: jnp.asarray(SEGMENTS < 0).reshape(*SEGMENTS.shape, *(1,) * (y.ndim - 2)) for n, y in x.items()}
    spoilt = {n: y if n == "initial_state" else jnp.where(padding[n], jnp.nan, y) for n, y in x.items()}
    mesh, spec = make_mesh((2,), "explicit"), P(None, "a")
    cotangents = cotangents_of(run_of(name, implementation), x, fixed)
    placed = (place(y, mesh, spec) for y in (spoilt, fixed, cotangents))
    got = on_mesh(name, implementation, mesh, spec, "explicit")(*placed)
    assert_expected(got, expected(x, fixed, cotangents))


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
@pytest.mark.parametrize("name", ["chunk_gla", "chunk_simple_gla", "chunk_kda", "chunk_gdn2", "chunk_comba"])
def test_launches(name, remat):
    """A device does what it does alone, and two launches more: the states alone, and the gradient of the one before."""
    x = inputs_of(name, B=1)
    run = run_of(name, "fused", sharding=NamedSharding(make_mesh((2,), "automatic"), P(None, "a")))
    # With what a policy keeps, a recomputed forward makes no map again and runs no kernel.
    layer = lambda x, _=None: run(x, {})
    if remat:
        layer = jax.checkpoint(layer, policy=KEEPING)
    launches = lambda text: sorted(re.findall(r"chunk_(?:gla|kda|gdn2|comba)_(\w+)_c\d+", text))
    assert launches(text_for_tpu(layer, x)) == ["fwd", "summary"]
    cotangents = cotangents_of(run, x, {})
    assert launches(text_for_tpu(with_gradients(layer), x, {}, cotangents)) == ["bwd", "bwd_state", "fwd", "summary"]


@pytest.mark.parametrize("states", [True, False], ids=["states", "no-states"])
@pytest.mark.parametrize("name", NAMES)
def test_documents_cross_devices(name, states):
    x = inputs_of(name, B=1, states=len(BOUNDARIES) - 1 if states else 0)
    mesh = make_mesh((8,), "automatic")
    assert_divided(name, "xla", mesh, P(None, "a"), "automatic", x, {"cu_seqlens": BOUNDARIES}, states)


@pytest.mark.parametrize("name", NAMES)
def test_segments_cross_devices(name):
    x, fixed = inputs_of(name), {"segment_ids": jnp.asarray(SEGMENTS)}
    assert_divided(name, "xla", make_mesh((8,), "explicit"), P(None, "a"), "explicit", x, fixed)


def test_final_states_without_initial_ones():
    x = inputs_of("chunk_gated_delta_rule", states=0)
    mesh = make_mesh((8,), "explicit")
    assert_divided("chunk_gated_delta_rule", "xla", mesh, P(None, "a"), "explicit", x)
    x, fixed = inputs_of("chunk_gated_delta_rule", B=1, states=0), {"cu_seqlens": BOUNDARIES}
    assert_divided("chunk_gated_delta_rule", "xla", mesh, P(None, "a"), "explicit", x, fixed)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", ["b", ("a", "b")], ids=str)
def test_inside_a_shard_map(axis, check_vma):
    """Replicated states go in and come out; JAX sums their gradients."""
    name, mesh = "chunk_gated_delta_rule", make_mesh((2, 4), "explicit")
    x, spec = inputs_of(name), P(None, axis)
    run = run_of(name, "xla", context_axis=axis)
    cotangents = cotangents_of(run_of(name, "xla"), x, {})
    specs = {n: spec_of(n, y.ndim, spec) for n, y in (x | cotangents).items()}
    of = lambda arrays: {n: specs[n] for n in arrays}
    split = lambda x: run(x, {})
    split = jax.shard_map(split, mesh=mesh, in_specs=(of(x),), out_specs=of(cotangents), check_vma=check_vma)
    put = lambda arrays: {n: jax.device_put(y, NamedSharding(mesh, specs[n])) for n, y in arrays.items()}
    got = jax.jit(with_gradients(lambda x, _: split(x)))(put(x), {}, put(cotangents))
    assert_expected(got, expected(x, {}, cotangents))


@pytest.mark.parametrize("states", [True, False], ids=["states", "no-states"])
def test_nan_stays_in_its_document(states):
    """It crosses devices with its document, and no further."""
    name, mesh = "chunk_gated_delta_rule", make_mesh((8,), "automatic")
    x, fixed = inputs_of(name, B=1, states=7 if states else 0), {"cu_seqlens": BOUNDARIES}
    spoilt = slice(1, 16)  # the third document, over three devices
    run = jax.jit(with_gradients(run_of(name, "xla", states, sharding=NamedSharding(mesh, P(None, "a")))))
    cotangents = cotangents_of(run_of(name, "xla", states), x, fixed)
    want = run(x, fixed, cotangents)
    got = run(x | {"v": x["v"].at[:, 3].set(jnp.nan)}, fixed, cotangents)
    for result in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        others = np.ones(48, bool)
        others[spoilt] = False
        assert_close(result, np.asarray(got[result])[:, others], np.asarray(want[result])[:, others], 1e-6)
    assert np.isnan(got["o"][:, spoilt]).any()
    for result in ("final_state", "dinitial_state") if states else ():
        others = np.arange(7) != 2
        assert_close(result, np.asarray(got[result])[others], np.asarray(want[result])[others], 1e-6)


def test_boundaries_inside_a_shard_map_are_those_of_all_tokens():
    """Constants from outside too, which are checked."""
    x, mesh = inputs_of("chunk_gla", B=1, states=0), make_mesh((8,), "automatic")

    def split(boundaries):
        run = lambda x: chunk_gla(**x, context_axis="a", cu_seqlens=boundaries)[0]
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(None, "a"), out_specs=P(None, "a")))(x)

    assert_close("o", split(BOUNDARIES), chunk_gla(**x, cu_seqlens=BOUNDARIES)[0], 1e-6)
    with pytest.raises(ValueError, match="`cu_seqlens` must rise from 0 to at most T = 48; got"):
        split(BOUNDARIES + BOUNDARIES)


@pytest.mark.parametrize("start", ["zeros", "given", "stopped"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("scan", [affine_scan.all_to_all, affine_scan.doubling])
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_scans(scan, reverse, devices, start):
    """All ways give the state before every device, in float64 one map after the other.

    Where the state does not pass a device, nothing that comes before it is seen behind it, not even a NaN.
    """
    rng, heads, K = np.random.default_rng(0), 5, 4
    M, N = rng.standard_normal((devices, heads, K, K)) / 2, rng.standard_normal((devices, heads, K, 3))
    S, want = None if start == "zeros" else rng.standard_normal((heads, K, 3)), [None] * devices
    passes = np.ones((devices, 1, 1, 1), bool)
    if start == "stopped":
        S[:, 0], passes[devices // 2] = np.nan, False
    state = np.zeros((heads, K, 3)) if S is None else S
    for d in reversed(range(devices)) if reverse else range(devices):
        want[d], state = state, (M[d] @ state if passes[d] else 0) + N[d]
    mesh = make_mesh((devices,), "automatic")

    def run(M, N, passes, S):
        own = affine_scan.AffineMap(M[0], N[0], passes[0] if start == "stopped" else None)
        return scan(own, S, "a", reverse)[None]

    x = jax.tree.map(lambda y: jnp.asarray(y, bool if y is passes else jnp.float32), (M, N, passes, S))
    got = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P("a"), P("a"), P("a"), P()), out_specs=P("a")))(*x)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert_close("S", np.nan_to_num(got), np.nan_to_num(want), 1e-6)
