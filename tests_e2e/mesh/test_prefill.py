"""A long prompt is read over devices while serving: from a kept prefix, into a slot of a pool divided by heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import layers, pipeline
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference
from tests_e2e.mesh.meshes import P, make_mesh

# One program reads the prefix and decodes, token by token.
PREFIX, PROMPT, PADDED, SLOTS = 2, 45, 48, 4
TOKENS = PREFIX + PROMPT + 2
ALONE = dict(cu_seqlens=jnp.array([0, 1], jnp.int32), num_decodes=1)
KEPT, OWN = jnp.array([1], jnp.int32), jnp.array([3], jnp.int32)
IDS = jnp.where(jnp.arange(PADDED) < PROMPT, 0, -1)[None]
# The page on several devices shows it with one axis, and the layers run the operators.
THOROUGH = dict(test_operators=True, test_layers=lambda axes: "heads" not in axes)


def padded(x):
    """Return the tokens of the prompt, as many for every device; padding may hold anything."""
    prompt = x[:, PREFIX : PREFIX + PROMPT]
    return jnp.pad(prompt, [(0, 0), (0, PADDED - PROMPT)] + [(0, 0)] * (x.ndim - 2), constant_values=jnp.nan)


def run(serve, read, token, pool):
    """Return the outputs of all tokens, and the pool: a prefix into a slot, the prompt from there, and two decodes."""
    outputs = []
    for t in (*range(PREFIX), *range(PREFIX + PROMPT, TOKENS)):
        which = dict(state_indices=KEPT if t < PREFIX else OWN, has_initial_state=jnp.array([t > 0]))
        o, pool = serve(token(t), pool, which)
        outputs.append(np.asarray(o))
        if t == PREFIX - 1:
            o, pool = read(pool)
            outputs.append(np.asarray(o)[:, :PROMPT])
    return np.concatenate(outputs, axis=1), pool


@pytest.mark.parametrize("replay", [0, 2])
@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
def test_operators(name, replay):
    """Inside of a `shard_map`, where a device holds the states of its heads, with rings or without."""
    H, per_channel, mesh = 8, name == "kda", make_mesh((8,), "automatic")
    x = make_inputs(1, TOKENS, H, H, 8, 8, per_channel=per_channel)
    chunk, ragged = (getattr(pipeline, f"{form}_{name}") for form in ("chunk", "ragged"))
    empty = lambda heads: pipeline.make_pool(SLOTS, heads, 8, 8, replay=replay, H=heads, per_channel=per_channel)
    # The pool of a device is known by where it differs from the pool of all heads.
    of_heads = lambda whole, part: P(*("a" if n != m else None for n, m in zip(whole.shape, part.shape, strict=True)))
    pool, heads, tokens = empty(H), P(None, None, "a"), P(None, "a")
    specs = jax.tree.map(of_heads, pool, empty(1))
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    @jax.jit
    @functools.partial(mapped, in_specs=(heads, specs, P()), out_specs=(heads, specs))
    def serve(x, pool, which):
        return ragged(**x, states=pool, **ALONE, **which, implementation="xla")

    @jax.jit
    @functools.partial(mapped, in_specs=(tokens, tokens, specs), out_specs=(tokens, specs))
    def prefill(x, ids, pool):
        start = jax.lax.all_gather(pipeline.read_states(pool, KEPT), "a", axis=1, tiled=True)
        o, state = chunk(
            **x, initial_state=start, output_final_state=True, segment_ids=ids, context_axis="a", implementation="xla"
        )
        mine = jax.lax.dynamic_slice_in_dim(state, jax.lax.axis_index("a"), 1, axis=1)
        return o, pipeline.write_states(pool, OWN, mine)

    token = lambda t: {name: y[:, t : t + 1] for name, y in x.items()}
    read = lambda pool: prefill({name: padded(y) for name, y in x.items()}, IDS, pool)
    got, pool = run(serve, read, token, pool)
    want, state = reference(**x)
    assert_close("o", got, want, TOLERANCE["float32"])
    assert_close("state", pipeline.read_states(pool, OWN), state, TOLERANCE["float32"])
    kept = reference(**{name: y[:, :PREFIX] for name, y in x.items()})[1]
    assert_close("prefix", pipeline.read_states(pool, KEPT), kept, TOLERANCE["float32"])


@pytest.mark.parametrize("axes", [dict(tokens="a", heads="b"), dict(tokens=("a", "b"))], ids=str)
def test_layers(axes):
    """Tokens over an axis beside that of heads, and over the axes of heads: the likeliest tokens are the same."""
    config = layers.GatedDeltaNetConfig(D=16, H=2, HV=4, K=8, V=8)
    weights = layers.init_gated_delta_net(jax.random.key(0), config)
    text = jax.random.normal(jax.random.key(1), (1, TOKENS, config.D))
    want, _ = layers.gated_delta_net(text, weights, config, implementation="xla")

    mesh = make_mesh((4, 2), "explicit")
    on, over = layers.shardings(config, {"heads": "b"}), layers.shardings(config, axes)
    parts, pool = (
        layers.place(tree, mesh, specs)
        for tree, specs in ((weights, on.weights), (layers.empty_cache(config, SLOTS), on.cache))
    )

    @jax.jit
    def serve(x, pool, which):
        step = layers.Step(**ALONE, **which)
        return layers.ragged_gated_delta_net(x, parts, config, pool, step, implementation="xla")

    @jax.jit
    def prefill(x, ids, pool):
        cache = layers.place(layers.read_cache(pool, KEPT), mesh, over.cache)
        y, cache = layers.gated_delta_net(
            x, layers.place(parts, mesh, over.weights), config, cache, output_cache=True, segment_ids=ids,
            implementation="xla",
        )  # fmt: skip
        return y, layers.write_cache(pool, OWN, layers.place(cache, mesh, on.cache))

    put = lambda x, spec=None: layers.place(x, mesh, spec)
    read = lambda pool: prefill(put(padded(text), over.x), put(IDS, P(*over.x[:2])), pool)
    got, _ = run(serve, read, lambda t: put(text[:, t : t + 1]), pool)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    np.testing.assert_array_equal(got.argmax(-1), np.argmax(want, -1))
