"""What cannot be divided raises before anything is computed, and the error names the argument."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from chunkwise.pipeline import chunk_gated_delta_rule, ragged_gated_delta_rule, recurrent_gated_delta_rule
from tests_e2e.mesh.meshes import P, inputs_of, make_mesh


def refused(match: str, x: dict, operator=chunk_gated_delta_rule, **options):
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda x: operator(**x, **options), x)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (P("a"), r"`v` must have rows that 8 devices along \('a',\) can share; got 2 in \(2, 20, 4, 8\)"),
        (P(None, "a"), r"`v` must have tokens that 8 devices"),
        (P(None, None, "a"), r"`v` must have value heads that 8 devices"),
        (P(P.UNCONSTRAINED), r"`sharding` must say for every dimension of `v` how it is split; got P"),
        (P(None, None, None, None, "a"), r"`sharding` must have at most 4 entries"),
    ],
)
def test_sharding_does_not_fit(spec, match):
    mesh = make_mesh((8,), "automatic")
    refused(match, inputs_of("chunk_gated_delta_rule", T=20), sharding=NamedSharding(mesh, spec))


def test_sharding_of_another_kind():
    x = inputs_of("chunk_gated_delta_rule", T=20)
    with jax.set_mesh(make_mesh((8,), "automatic")):
        refused(r"`sharding` must name axes of the mesh \('a',\); got P\w*\('z'", x, sharding=P("z"))
    refused("`sharding` must be None, a NamedSharding or a PartitionSpec; got str", x, sharding="a")
    refused("`sharding` must be a NamedSharding where no mesh is set", x, sharding=P("a"))


def placed(spec: dict, shape=(2, 2), **sizes) -> tuple[dict, jax.sharding.Mesh]:
    """Return inputs on a mesh with explicit axes, some of them split."""
    mesh, x = make_mesh(shape, "explicit"), inputs_of("chunk_gated_delta_rule", T=20, **sizes)
    return {n: jax.device_put(y, NamedSharding(mesh, spec.get(n, P()))) for n, y in x.items()}, mesh


DISAGREEING = {
    "q": P(None, None, None, "a"), "k": P("b"), "g": P(None, None, "a"), "beta": P(None, "a"),
    "initial_state": P(None, None, "b"),
}  # fmt: skip


@pytest.mark.parametrize("name", DISAGREEING)
def test_arguments_disagree(name):
    x, _ = placed({"v": P("a", None, "b"), name: DISAGREEING[name]})
    with pytest.raises(ValueError, match=rf"`{name}` must be split as P\w*\('a'.*, which `v` asks for, or not"):
        chunk_gated_delta_rule(**x)


def test_key_heads_that_do_not_begin_like_value_heads():
    x, _ = placed({"v": P(None, None, ("a", "b")), "q": P(None, None, "b")}, H=4, HV=4)
    with pytest.raises(ValueError, match="`q` must be split as"):
        chunk_gated_delta_rule(**x)


def test_sharding_against_explicit_axes():
    x, mesh = placed({"v": P("a")})
    with pytest.raises(ValueError, match="`sharding` must be that of `v` along explicit axes"):
        chunk_gated_delta_rule(**x, sharding=NamedSharding(mesh, P("b")))


def test_context_axis():
    x = inputs_of("chunk_gated_delta_rule", T=20)
    refused(r"`context_axis` must name axes of the `shard_map` around the call, which has \(\)", x, context_axis="a")
    refused("`context_axis` must be None, the name of a mesh axis or a tuple of names; got 1", x, context_axis=1)


def test_context_axis_and_sharded_tokens():
    mesh, x = make_mesh((2, 2), "automatic"), inputs_of("chunk_gated_delta_rule", T=20)
    run = lambda x: chunk_gated_delta_rule(**x, context_axis="a", sharding=P(None, "b"))[0]
    split = jax.shard_map(run, mesh=mesh, axis_names={"a"}, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="`context_axis` must be None where `sharding` splits tok"):
        jax.eval_shape(split, x)


def test_pools():
    mesh, x = make_mesh((2,), "automatic"), inputs_of("recurrent_gated_delta_rule", T=2, states=3)
    x["state_indices"] = jnp.arange(2, dtype=jnp.int32)
    rows, tokens = (NamedSharding(mesh, spec) for spec in (P("a"), P(None, "a")))
    refused("`initial_state` must have slots that 2 devices along", x, recurrent_gated_delta_rule, sharding=rows)
    refused("`state_indices` must come with tokens that are not split", x, recurrent_gated_delta_rule, sharding=tokens)


def test_pool_of_a_serving_step():
    """It is the argument `states` there."""
    x, _ = placed({"v": P(None, None, "b"), "initial_state": P("a", "b")}, B=1, states=2)
    x["states"] = x.pop("initial_state")
    step = dict(cu_seqlens=jnp.array([0, 20], jnp.int32), state_indices=jnp.array([1], jnp.int32))
    with pytest.raises(ValueError, match=r"`states` must be split as P\w*\(None, 'b'.*, which `v` asks for, or not"):
        ragged_gated_delta_rule(**x, **step)
