"""Operators that divide themselves, under the transforms of JAX and inside of a shard_map of the caller."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from chunkwise.shared.testing.compare import assert_close, with_gradients
from tests.compiled import traffic
from tests_e2e.mesh.meshes import MODES, P, cotangents_of, inputs_of, make_mesh, place, run_of, spec_of

THOROUGH = dict(
    test_inside_a_shard_map_over_some_axes=lambda check_vma: not check_vma,
    test_vmap_and_gradient=True,
    # Tokens that are split have the map of the states, too.
    test_second_derivatives=lambda spec: spec == DIVISIONS["rows-and-heads"],
)

NAME = "chunk_gated_delta_rule"
DIVISIONS = {"rows-and-heads": P("a", None, "b"), "tokens": P(None, ("a", "b"))}


@functools.cache
def example():
    """Return inputs, cotangents, and the results and gradients on one device."""
    x = inputs_of(NAME, T=16)
    cotangents = cotangents_of(run_of(NAME, "xla"), x, {})
    return x, cotangents, jax.jit(with_gradients(run_of(NAME, "xla")))(x, {}, cotangents)


def divided(spec, mode="automatic", shape=(2, 2)):
    """Return a function of inputs to results, divided like this, and the mesh."""
    mesh = make_mesh(shape, mode)
    options = dict(sharding=NamedSharding(mesh, spec)) if mode == "automatic" else {}
    return (lambda x: run_of(NAME, "xla", **options)(x, {})), mesh


def assert_same(got: dict, want: dict) -> None:
    for name, ref in want.items():
        assert_close(name, got[name], ref, 1e-5)


def stacked(tree):
    return jax.tree.map(lambda y: jnp.stack([y, 0.5 * y]), tree)


def test_vmap_and_gradient():
    x, cotangents, _ = example()
    run, _ = divided(DIVISIONS["tokens"])
    several = lambda run: jax.vmap(with_gradients(lambda x, _: run(x)), in_axes=(0, None, 0))
    one_device = lambda x: run_of(NAME, "xla")(x, {})
    arguments = stacked(x), {}, stacked(cotangents)
    assert_same(jax.jit(several(run))(*arguments), jax.jit(several(one_device))(*arguments))


def test_vmap_over_a_split_axis():
    """On an automatic mesh vmap is told which axis splits what it maps, and nothing of it is gathered."""
    x, _, _ = example()
    x = stacked({name: y for name, y in x.items() if name != "initial_state"})
    run, mesh = divided(P(None, "a"))
    places = NamedSharding(mesh, P("b", None, "a"))
    mapped = jax.jit(jax.vmap(lambda x: run(x)["o"], spmd_axis_name="b"), out_shardings=places)
    program = mapped.lower(jax.device_put(x, places)).compile()
    want = jax.jit(jax.vmap(lambda x: run_of(NAME, "xla")(x, {})["o"]))(x)
    assert_close("o", program(jax.device_put(x, places)), want, 1e-5)
    # The state after the first device, for its part of what is mapped: B = 2, HV = 4, K = V = 8.
    assert traffic(program.as_text(), mesh.size) == [("collective-permute", 4 * 2 * 4 * 8 * 8)]


@pytest.mark.parametrize("spec", DIVISIONS.values(), ids=DIVISIONS)
def test_second_derivatives(spec):
    """The change of a gradient along a direction, in forward mode over the gradient and as a gradient of it."""
    x, _, _ = example()
    dx = {name: jnp.flip(y) for name, y in x.items()}

    def changes(run):
        loss = lambda x: sum(jnp.sum(jnp.sin(y)) for y in run(x).values())
        along = lambda x: sum(jnp.vdot(d, dx[name]) for name, d in jax.grad(loss)(x).items())
        return jax.jit(lambda x: (jax.jvp(jax.grad(loss), (x,), (dx,))[1], jax.grad(along)(x)))(x)

    run, _ = divided(spec)
    want, _ = changes(lambda x: run_of(NAME, "xla")(x, {}))
    for got in changes(run):
        assert_same(got, want)


def test_no_forward_mode():
    x, _, _ = example()
    run, _ = divided(DIVISIONS["rows-and-heads"])
    with pytest.raises(NotImplementedError, match=f"{NAME} has no forward-mode derivative where it divides itself"):
        jax.jvp(run, (x,), (x,))


def test_saved_maps_are_not_made_again():
    """With the names of the map and of the state before a device a recomputed forward needs no collective."""
    x, cotangents, _ = example()
    run, _ = divided(DIVISIONS["tokens"])
    save = jax.checkpoint_policies.save_only_these_names("chunkwise_context_map", "chunkwise_context_state")

    def exchanges(policy):
        remat = jax.checkpoint(run, policy=policy)
        text = jax.jit(with_gradients(lambda x, _: remat(x))).lower(x, {}, cotangents).as_text()
        return len(re.findall(r"stablehlo\.(?:all_gather|all_to_all|collective_permute)", text))

    # The recomputed forward would exchange the two parts of all maps, and the states before all devices.
    assert exchanges(None) - exchanges(save) == 3


@pytest.mark.parametrize("spec", DIVISIONS.values(), ids=DIVISIONS)
def test_export(spec):
    x, _, want = example()
    run, mesh = divided(spec)
    everywhere = NamedSharding(mesh, P())
    x = jax.device_put(x, everywhere)
    exported = jax.export.export(jax.jit(run, in_shardings=(everywhere,), out_shardings=everywhere))(x)
    assert_same(exported.call(x), {name: want[name] for name in ("o", "final_state")})


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("held", ["rows", "tokens"])
def test_inside_a_shard_map_over_some_axes(held, mode, check_vma):
    """The caller holds rows or tokens, the operator divides the heads."""
    x, cotangents, want = example()
    axis, options = (P("a"), {}) if held == "rows" else (P(None, "a"), dict(context_axis="a"))
    mesh, spec = make_mesh((2, 2), mode), P(*axis, *[None] * (2 - len(axis)), "b")
    options |= dict(sharding=spec) if mode == "automatic" else {}
    of = lambda arrays: {n: spec_of(n, y.ndim, axis) for n, y in arrays.items()}
    run = jax.shard_map(
        lambda x: run_of(NAME, "xla", **options)(x, {}), mesh=mesh, axis_names={"a"}, in_specs=(of(x),),
        out_specs=of(cotangents), check_vma=check_vma,
    )  # fmt: skip
    if mode == "explicit":
        x, cotangents = (place(y, mesh, spec) for y in (x, cotangents))
    with jax.set_mesh(mesh):
        assert_same(jax.jit(with_gradients(lambda x, _: run(x)))(x, {}, cotangents), want)
