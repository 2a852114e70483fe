"""The layout of fused kernels: flat tokens, masks, blocks of a launch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from chunkwise.shared.kernels import chunk_spans, layout
from chunkwise.shared.kernels.launcher import pallas_call
from chunkwise.shared.testing.inputs import boundaries

THOROUGH = dict(test_blocks_of_a_launch=lambda lengths, backwards: (lengths is None) != backwards)


def tokens(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("D", [5, 128, 130])
def test_lanes(D):
    x = tokens(2, 7, 3, D)
    flat = layout.to_lanes(x, 8)
    width = 128 if D <= 128 else 256
    assert flat.shape == (2, 8, 3 * width)
    np.testing.assert_array_equal(flat[1, 4, width : width + D], x[1, 4, 1])
    assert not flat[:, 7].any()
    assert not flat[0, 0, D:width].any()
    np.testing.assert_array_equal(layout.from_lanes(flat, 3, D, 7), x)


def test_lanes_are_transposed_by_jax():
    """The gradient through the flat view is the plain one: what is padded has none."""
    x = tokens(1, 3, 2, 5)
    weights = tokens(1, 4, 256)
    gradient = jax.grad(lambda x: jnp.sum(layout.to_lanes(x, 4) * weights))(x)
    np.testing.assert_array_equal(gradient, layout.from_lanes(weights, 2, 5, 3))


def test_values_per_token():
    x = tokens(2, 7, 6)
    rows = layout.to_rows(x, 4)
    assert rows.shape == (2, 2, 6, 4)
    np.testing.assert_array_equal(rows[1, 1, 5, :3], x[1, 4:, 5])
    assert not rows[:, 1, :, 3].any()


def test_states():
    x = tokens(2, 3, 5, 130).astype(jnp.bfloat16)
    padded = layout.pad_states(x)
    assert (padded.shape, padded.dtype) == ((2, 3, 128, 256), jnp.float32)
    np.testing.assert_array_equal(padded[:, :, :5, :130], x.astype(jnp.float32))
    assert padded.astype(bool).sum() == x.astype(bool).sum()
    assert layout.pad_states(None) is None


def test_states_of_empty_sequences():
    states, start, cu_seqlens = tokens(3, 2), 2.0 + tokens(3, 2), boundaries(4, 0, 1)
    assert layout.unless_empty(states, start, None) is states
    np.testing.assert_array_equal(layout.unless_empty(states, start, cu_seqlens)[1], start[1])
    np.testing.assert_array_equal(layout.unless_empty(states, start, cu_seqlens)[::2], states[::2])
    assert not layout.unless_empty(states, None, cu_seqlens)[1].any()


@pytest.mark.parametrize("width", [8, 16])
def test_sequence_masks(width):
    codes = np.array([3, 3, 4, ~4, 4, 7, 7, ~7])
    owner = np.array([3, 3, 4, 4, 4, 7, 7, 7])
    tiled = jnp.asarray(np.tile(codes, width // 8)[None], jnp.int32)
    masks = layout.sequence_masks(tiled, 8, jnp.int32(3), jnp.int32(7))
    np.testing.assert_array_equal(masks.same[0], owner[:, None] == np.tile(owner, width // 8))
    np.testing.assert_array_equal(masks.carried[0, :, 0], owner == 3)
    np.testing.assert_array_equal(masks.ending[0, :, 0], owner == 7)
    np.testing.assert_array_equal(masks.code[0, :, 0], codes)
    assert not masks.through
    assert layout.sequence_masks(tiled, 8, jnp.int32(7), jnp.int32(7)).through


class Memory:
    """A numpy array that is read and written as a Ref is."""

    def __init__(self, x):
        self.x, self.shape, self.dtype = np.array(x), x.shape, x.dtype

    def __getitem__(self, at):
        return jnp.asarray(self.x[at])

    def __setitem__(self, at, value):
        self.x[at] = value


def test_loads_and_stores_of_heads():
    x = tokens(6, 3 * 4)
    inside = jnp.arange(6)[:, None] < 4
    ref = Memory(x)
    np.testing.assert_array_equal(layout.load_heads(ref, 4), x.reshape(6, 3, 4).swapaxes(0, 1))
    np.testing.assert_array_equal(layout.load_heads(ref, 4, slice(1, 2), at=slice(2, 5))[0], x[2:5, 4:8])
    owned = layout.load_heads(ref, 4, valid=inside)
    assert not owned[:, 4:].any()
    np.testing.assert_array_equal(owned[2, :4], x[:4, 8:])
    layout.store_heads(ref, jnp.ones((2, 6, 4)), inside, first=1)
    want = np.array(x)
    want[:4, 4:] = 1.0
    np.testing.assert_array_equal(ref.x, want)
    layout.store_rows(ref, slice(0, 4), jnp.full((6, 4), 2.0))
    assert (ref.x[:, :4] == 2.0).all()
    layout.clear(ref, None)
    assert not ref.x.any()


def test_value_heads_are_summed():
    np.testing.assert_array_equal(
        layout.sum_value_heads(tokens(4, 3, 2), 2), tokens(4, 3, 2).reshape(2, 2, 3, 2).sum(1)
    )


@pytest.mark.parametrize("lengths", [None, (20, 0, 5)], ids=["batch", "pieces"])
@pytest.mark.parametrize("backwards", [False, True])
def test_blocks_of_a_launch(lengths, backwards):
    """A kernel that copies its blocks, step by step, copies the arrays."""
    B, T, C, blocks = (2, 32, 16, 2) if lengths is None else (1, 32, 16, 2)
    cu_seqlens = None if lengths is None else boundaries(*lengths)
    table = chunk_spans.make_spans(T, C, cu_seqlens, with_states=True).table
    S = T // C if table is None else table.shape[1]
    cut = layout.Blocks(C, S, (lambda turn: S - 1 - turn) if backwards else (lambda turn: turn), lengths is not None)
    states = B if lengths is None else len(lengths)
    arrays = dict(
        tokens=(tokens(B, T, 2 * blocks * 128), cut.tokens(256)),
        shared=(tokens(B, T, 128), cut.tokens(128, share=blocks)),
        values=(tokens(B, blocks, T, 3), cut.values(3)),
        rows=(tokens(B, T // C, blocks, 3, C), cut.rows(None, None, 3, C)),
        state=(tokens(states, 2 * blocks, 8, 128), cut.state(2, 8, 128)),
        per_span=(tokens(B, S, 2 * blocks, 8), cut.per_span(2, 8)),
    )
    if lengths is None:
        arrays["owner"] = (jnp.arange(S * C, dtype=jnp.int32).reshape(S, 1, C), cut.owner(C))

    def kernel(*refs):
        refs = refs[-2 * len(arrays) :]
        for source, target in zip(refs[: len(arrays)], refs[len(arrays) :], strict=True):
            target[...] = source[...]

    values, specs = zip(*arrays.values(), strict=True)
    results = pallas_call(
        kernel,
        *(() if table is None else (table,)),
        *values,
        name="copy_blocks",
        num_scalar_prefetch=int(table is not None),
        grid=(B, blocks, S),
        dimension_semantics=("arbitrary", "arbitrary", "arbitrary"),
        in_specs=specs,
        out_specs=list(specs),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values],
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0),
    )
    for name, x, got in zip(arrays, values, results, strict=True):
        visited = np.ones(len(x), bool)
        if name == "state" and lengths is not None:
            visited = np.array(lengths) > 0
        np.testing.assert_array_equal(got[visited], x[visited], err_msg=name)
