"""The convolution and the norm over devices: the same values and gradients as on one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from chunkwise.causal_conv1d import causal_conv1d
from chunkwise.norm_gated import rms_norm_gated
from chunkwise.shared.testing.compare import assert_close, with_gradients
from chunkwise.shared.testing.inputs import boundaries, spec
from tests_e2e.mesh.meshes import P, collectives, cotangents_of
from tests_e2e.mesh.meshes import make_mesh as make_mesh_of

T, W, D, N = 32, 4, 8, 7
# Lengths of N documents. On eight devices of four tokens each they begin and end anywhere.
DOCUMENTS = {
    "begin at borders": (4, 8, 0, 4, 12, 1, 3),
    "shorter than the halo": (1, 2, 1, 1, 2, 2, 1),
    "longer than devices": (3, 11, 13, 1, 1, 2, 0),
    "empty": (0, 0, 5, 0, 7, 0, 0),
    "one": (32, 0, 0, 0, 0, 0, 0),
    "no token": (0, 0, 0, 0, 0, 0, 0),
    **{f"begins at {i}": (i, 1, 31 - i, 0, 0, 0, 0) for i in range(3, 7)},
}
# Rows of ids in steps of two tokens: half of a device's.
SEGMENTS = {
    "padding at borders": ([0, 0, 0, -1, -1, 1, 1, -1, 1, 1, 1, 1, 2, 2, -1, 3], [-1] * 5 + [4] * 6 + [-1] * 5),
    "padding on whole devices": ([-1] * 4 + [0] * 3 + [-1] * 4 + [0, 1, 0, -1, -1], [-1] * 16),
    "no padding": ([0] * 16, [0, 1, 1, 2, 2, 2, 3, 0, 0, 0, 0, 0, 0, 0, 1, 2]),
}


def make_mesh(axes: int, mode: str = "automatic"):
    return make_mesh_of({1: (8,), 2: (2, 4)}[axes], mode)


@functools.cache
def arrays(B: int, states: int | None, dtype=jnp.float32) -> dict:
    """Return inputs of the convolution of B rows, with so many states or without."""
    rng, shapes = np.random.default_rng(0), dict(x=(B, T, D), weight=(D, W), bias=(D,))
    shapes |= {} if states is None else dict(initial_state=(states, W - 1, D))
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


@functools.cache
def convolution(states: bool, **options):
    """Return a function of inputs and of arrays without a gradient to results by name."""

    def run(x, fixed):
        y, final_state = causal_conv1d(**x, **fixed, output_final_state=states, activation="silu", **options)
        return dict(y=y, final_state=final_state) if states else dict(y=y)

    return run


@functools.cache
def whole(states: bool):
    """Return the convolution on one device, with gradients."""
    return jax.jit(with_gradients(convolution(states, implementation="xla")))


def assert_same(got: dict, want: dict, label: str = "", tolerance: float = 1e-6) -> None:
    assert got.keys() == want.keys()
    for name, ref in want.items():
        assert_close(f"{label} {name}", got[name], ref, tolerance)


def spoil(x: dict, valid) -> dict:
    """Return inputs with NaN in padding, which may hold anything."""
    return x | {"x": jnp.where(valid[..., None], x["x"], jnp.nan)}


def over_context(axis, check: bool, states: bool, x: dict, fixed: dict):
    """Return the convolution with gradients whose tokens are split over `axis` of a mesh by a `shard_map`."""
    mesh = make_mesh(1 if axis == "a" else 2)
    implementation = "xla" if check else "pallas"
    tokens = P(None, axis)
    specs = dict(x=tokens, weight=P(), bias=P(), initial_state=P(), cu_seqlens=P(), segment_ids=tokens)
    of = lambda given: {name: specs[name] for name in given}
    run = jax.shard_map(
        convolution(states, implementation=implementation, context_axis=axis), mesh=mesh, check_vma=check,
        in_specs=(of(x), of(fixed)), out_specs=dict(y=tokens) | (dict(final_state=P()) if states else {}),
    )  # fmt: skip
    return jax.jit(with_gradients(run))


THOROUGH = dict(
    test_packed_documents=lambda axis, states: axis == "a" or not states,
    test_segments=lambda axis, states: axis == "a" or not states,
    # Others divide rows, and channels, beside something else.
    test_division_of_the_convolution=lambda division: (
        division in [DIVISIONS[name] for name in ("rows", "channels", "rows-and-channels-of-one-weight")]
    ),
    test_division_of_the_norm=lambda name: name == "rows",
)
split = pytest.mark.parametrize(("axis", "check"), [(("a", "b"), True), ("a", False)], ids=["xla", "pallas"])


@split
@pytest.mark.parametrize("states", [False, True], ids=["no-states", "states"])
def test_packed_documents(axis, check, states):
    x = arrays(1, N if states else None)
    run = None
    for label, lengths in DOCUMENTS.items():
        fixed = dict(cu_seqlens=boundaries(*lengths))
        run = run or over_context(axis, check, states, x, fixed)
        cotangents = cotangents_of(convolution(states), x, fixed)
        spoilt = spoil(x, jnp.arange(T)[None] < sum(lengths))
        assert_same(run(spoilt, fixed, cotangents), whole(states)(spoilt, fixed, cotangents), label)


@split
@pytest.mark.parametrize("states", [False, True], ids=["no-states", "states"])
def test_segments(axis, check, states):
    x, run = arrays(2, 2 if states else None), None
    for label, rows in SEGMENTS.items():
        for shift in (0, 1, 3):
            ids = jnp.asarray(np.roll(np.repeat(rows, 2, axis=1), shift, axis=1), jnp.int32)
            fixed = dict(segment_ids=ids)
            run = run or over_context(axis, check, states, x, fixed)
            cotangents = cotangents_of(convolution(states), x, fixed)
            spoilt = spoil(x, ids >= 0)
            assert_same(run(spoilt, fixed, cotangents), whole(states)(spoilt, fixed, cotangents), f"{label} {shift}")


def test_final_states_without_initial_ones():
    x, fixed = arrays(1, None), dict(cu_seqlens=boundaries(5, 0, 6, 4, 9, 1, 2))
    cotangents = cotangents_of(convolution(True), x, fixed)
    got = over_context("a", True, True, x, fixed)(x, fixed, cotangents)
    assert_same(got, whole(True)(x, fixed, cotangents))


@pytest.mark.parametrize("by", ["context_axis", "sharding"])
def test_bfloat16(by):
    """Sums over devices are rounded once. dx is not: a token gets a part from the next device, itself in bfloat16."""
    x = arrays(1, 1, jnp.bfloat16)
    cotangents = cotangents_of(convolution(True), x, {})
    sharding = NamedSharding(make_mesh(1), P(None, "a"))
    divided = jax.jit(with_gradients(convolution(True, implementation="xla", sharding=sharding)))
    run = divided if by == "sharding" else over_context("a", True, True, x, {})
    got, want = run(x, {}, cotangents), whole(True)(x, {}, cotangents)
    assert_same({"dx": got.pop("dx")}, {"dx": want.pop("dx")}, tolerance=3e-3)
    assert_same(got, want, tolerance=3e-4)


def test_nan_stays_in_its_document():
    """It changes no bit of the others, also of those that begin on the same device or the next."""
    x, fixed, other = arrays(1, N), dict(cu_seqlens=boundaries(5, 6, 2, 1, 4, 9, 1)), np.ones(T, bool)
    other[5:11] = other[28:] = False
    run, cotangents = over_context("a", True, True, x, fixed), cotangents_of(convolution(True), x, fixed)
    clean, got = run(x, fixed, cotangents), run(x | {"x": x["x"].at[:, 5:11].set(jnp.nan)}, fixed, cotangents)
    for name in ("y", "dx"):
        np.testing.assert_array_equal(*(y[name][:, other] for y in (got, clean)))
    for name in ("final_state", "dinitial_state"):
        np.testing.assert_array_equal(*(np.delete(y[name], 1, axis=0) for y in (got, clean)))


def test_boundaries_known_outside_of_the_map_are_those_of_all_tokens():
    x, cu = arrays(1, None), jnp.array([0, 9, 30], jnp.int32)
    run = lambda x, **o: causal_conv1d(**x, cu_seqlens=cu, **o)[0]
    specs = dict(x=P(None, "a"), weight=P(), bias=P())
    f = functools.partial(run, context_axis="a")
    got = jax.jit(jax.shard_map(f, mesh=make_mesh(1), in_specs=(specs,), out_specs=P(None, "a")))(x)
    assert_close("y", got, run(x), 1e-6)


def place(x: dict, specs: dict, mesh) -> dict:
    return {name: jax.device_put(y, NamedSharding(mesh, specs[name])) for name, y in x.items()}


def of_x(name: str, spec: PartitionSpec, packed: bool) -> PartitionSpec:
    """Return how an argument or result of the convolution is split if x is split like this."""
    b, t, d = (*spec, *[None] * (3 - len(spec)))
    s = None if packed else b
    return dict(
        x=P(b, t, d), y=P(b, t, d), weight=P(d), bias=P(d), initial_state=P(s, None, d), final_state=P(s, None, d),
        segment_ids=P(b, t), cu_seqlens=P(),
    )[name]  # fmt: skip


# How x is split, whether weight is too, what is packed, the implementation and the kind of axes.
DIVISIONS = {
    "rows": (P("a"), False, None, "xla", "automatic"),
    "channels": (P(None, None, "a"), False, None, "xla", "explicit"),
    "rows-and-channels": (P("a", None, "b"), True, None, "xla", "explicit"),
    "rows-and-channels-of-one-weight": (P("a", None, "b"), False, None, "xla", "automatic"),
    "rows-and-channels-kernel": (P("a", None, "b"), False, None, "pallas", "explicit"),
    "tokens-kernel": (P(None, ("a", "b")), False, None, "pallas", "automatic"),
    "rows-and-tokens": (P("a", "b"), False, None, "xla", "explicit"),
    "tokens-and-channels-packed": (P(None, "b", "a"), True, "cu_seqlens", "xla", "explicit"),
    "channels-over-two-axes-packed": (P(None, None, ("a", "b")), False, "cu_seqlens", "xla", "automatic"),
    "rows-and-tokens-of-segments": (P("a", "b"), False, "segment_ids", "xla", "explicit"),
}


@pytest.mark.parametrize("division", DIVISIONS.values(), ids=DIVISIONS)
def test_division_of_the_convolution(division):
    split, own_weight, packed, implementation, mode = division
    mesh = make_mesh(2 if "b" in str(split) else 1, mode)
    B, states = (1, N) if packed == "cu_seqlens" else (8, 8)
    x = arrays(B, states)
    fixed = {
        None: {},
        "cu_seqlens": dict(cu_seqlens=boundaries(*DOCUMENTS["longer than devices"])),
        "segment_ids": dict(segment_ids=jnp.asarray(np.repeat(SEGMENTS["padding at borders"], 2, 1), jnp.int32)),
    }[packed]
    fixed = {n: jnp.tile(y, (B // 2, 1)) if n == "segment_ids" else y for n, y in fixed.items()}
    cotangents = cotangents_of(convolution(True), x, fixed)
    specs = {name: of_x(name, split, B == 1) for name in (*x, *fixed, *cotangents)}
    if not own_weight:
        specs |= dict(weight=P(), bias=P())
    placed = [place(y, specs, mesh) for y in (x, fixed, cotangents)]
    options = dict(sharding=NamedSharding(mesh, split)) if mode == "automatic" else {}
    run = jax.jit(with_gradients(convolution(True, implementation=implementation, **options)))
    assert_same(run(*placed), whole(True)(x, fixed, cotangents))


NORMS = {
    "rows": (P("a"), "xla", "explicit"),
    "heads-kernel": (P(None, None, "a"), "pallas", "automatic"),
    "rows-and-tokens": (P("a", "b"), "xla", "automatic"),
    "tokens-over-two-axes": (P(None, ("b", "a")), "xla", "explicit"),
    "two-dimensions-kernel": (P(("a", "b")), "pallas", "explicit"),
}


@pytest.mark.parametrize("name", NORMS)
def test_division_of_the_norm(name):
    split, implementation, mode = NORMS[name]
    mesh, rng = make_mesh(2 if "b" in str(split) else 1, mode), np.random.default_rng(0)
    shape = (16, D) if name.startswith("two") else (8, 8, 8, D)
    x = {n: jnp.asarray(rng.standard_normal(shape), jnp.float32) for n in ("x", "z")}
    by_head = name.startswith("heads")
    x["weight"] = jnp.asarray(rng.standard_normal((8, D) if by_head else D), jnp.float32)
    run = lambda **o: jax.jit(with_gradients(lambda x, _: dict(y=rms_norm_gated(**x, **o))))
    cotangents = dict(y=jnp.asarray(rng.standard_normal(shape), jnp.float32))
    specs = dict(x=split, z=split, y=split, weight=P("a") if by_head else P())
    options = dict(sharding=NamedSharding(mesh, split)) if mode == "automatic" else {}
    got = run(implementation=implementation, **options)(place(x, specs, mesh), None, place(cotangents, specs, mesh))
    assert_same(got, run(implementation="xla")(x, None, cotangents))


def crossing(f, x: dict, **options) -> list[str]:
    return collectives(jax.jit(f, **options).lower(x).compile().as_text())


@pytest.mark.parametrize("split", [P("a"), P(None, None, "a"), P("a", None, "b")], ids=str)
def test_collectives_of_the_convolution(split):
    """None in the forward; in the backward only the sums of the gradients of weight and bias over rows."""
    mesh, x = make_mesh(2), arrays(8, 8)
    shardings = {name: NamedSharding(mesh, of_x(name, split, False)) for name in x}
    x, run = jax.device_put(x, shardings), convolution(True, implementation="xla", sharding=shardings["x"])
    assert crossing(lambda x: run(x, {}), x) == []
    gradient = jax.grad(lambda x: jnp.sum(run(x, {})["y"] * jnp.cos(x["x"])))
    assert set(crossing(gradient, x, out_shardings=shardings)) == ({"all-reduce"} if split[0] else set())


def test_collectives_of_the_norm():
    mesh, x = make_mesh(2), arrays(8, None)
    shardings = dict(x=NamedSharding(mesh, P("a", "b")), bias=NamedSharding(mesh, P()))
    x = jax.device_put({name: x[name] for name in shardings}, shardings)
    run = lambda x: rms_norm_gated(x["x"], x["x"], x["bias"], sharding=shardings["x"])
    assert crossing(run, x) == []
    gradient = jax.grad(lambda x: jnp.sum(run(x)))
    assert set(crossing(gradient, x, out_shardings=shardings)) == {"all-reduce"}


def test_channels_divided_inside_of_a_map_over_tokens():
    """The map of the caller holds one axis, the operator the other."""
    mesh, x = make_mesh(2), arrays(2, 2)
    run = convolution(True, implementation="xla", context_axis="b", sharding=P(None, None, "a"))
    specs = dict(x=P(None, "b"), weight=P(), bias=P(), initial_state=P())
    options = dict(out_specs=dict(y=P(None, "b"), final_state=P()), axis_names={"b"}, check_vma=True)
    mapped = jax.shard_map(lambda x: run(x, {}), mesh=mesh, in_specs=(specs,), **options)
    cotangents = cotangents_of(convolution(True), x, {})
    got = jax.jit(with_gradients(lambda x, _: mapped(x)))(x, {}, cotangents)
    assert_same(got, whole(True)(x, {}, cotangents))


AROUND = "`context_axis` must name axes of the `shard_map` around the call, which has (); got 'a'."


@pytest.mark.parametrize(
    ("split", "options", "message"),
    [
        (P(None, ("a", "b")), {}, "`x` must have at least W - 1 = 3 tokens on each of the devices along ('a', 'b')"),
        (P("a"), {}, "`x` must have rows that 2 devices along ('a',) can share; got 1 in (1, 16, 6)."),
        (P(None, None, "b"), {}, "`x` must have channels that 4 devices along ('b',) can share; got 6 in (1, 16, 6)."),
        (None, dict(context_axis="a"), AROUND),
        (None, dict(context_axis=1), "`context_axis` must be None, the name of a mesh axis or a tuple of names; got 1"),
        (None, dict(sharding="a"), "`sharding` must be None, a NamedSharding or a PartitionSpec; got str."),
    ],
)
def test_errors_of_the_convolution(split, options, message):
    options = options if split is None else dict(sharding=NamedSharding(make_mesh(2), split))
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(lambda x, w: causal_conv1d(x, w, **options)[0], spec(1, 16, 6), spec(6, 4))


def test_error_of_few_tokens_inside_of_a_map():
    f = lambda x, w: causal_conv1d(x, w, context_axis="a")[0]
    f = jax.shard_map(f, mesh=make_mesh(1), in_specs=(P(None, "a"), P()), out_specs=P(None, "a"))
    with pytest.raises(ValueError, match=re.escape("`x` must have at least W - 1 = 3 tokens on each of the devices")):
        jax.eval_shape(f, spec(1, 16, 6), spec(6, 4))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (P(None, None, "b"), "`x` must not be split along its dimension 2; got "),
        (P("a"), "`x` must have a dimension 0 that 2 devices along ('a',) can share; got 3 in (3, 16, 8)."),
    ],
)
def test_errors_of_the_norm(split, message):
    sharding = NamedSharding(make_mesh(2), split)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(lambda x, w: rms_norm_gated(x, x, w, sharding=sharding), spec(3, 16, 8), spec(8))


def test_error_of_a_weight_that_is_split_otherwise():
    mesh = make_mesh(2, "explicit")
    x, weight = (jax.device_put(y, NamedSharding(mesh, P("a"))) for y in (arrays(2, None)["x"], jnp.ones((D, W))))
    with pytest.raises(ValueError, match=r"`weight` must be split as .*, which `x` asks for, or not be split; got"):
        jax.jit(causal_conv1d)(x, weight)
