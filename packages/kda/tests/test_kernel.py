"""The tile mathematics by itself, and how the kernels are launched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from chunkwise.kda import chunk_kda, tile
from chunkwise.kda.config import cost
from chunkwise.shared.kernels.tiles import LOG2_E
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import make_inputs

THOROUGH = dict(test_interaction=lambda C, base, strength: C != 64 or (base == 8) != (strength == 1.0))


def blocks_of(g, base):
    """Return the decays in blocks of gates g [h, C, K] to base 2."""
    by_row = [jnp.asarray(g[:, r :: tile.SUBLANES], jnp.float32) for r in range(tile.SUBLANES)]
    return [jnp.stack(x, axis=2).reshape(g.shape) for x in tile.block_decays(by_row, base)]


@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize("base", [1, 8])
@pytest.mark.parametrize("strength", [1e-3, 1.0, 30.0])
def test_decays(C, base, strength):
    g = -strength * np.random.default_rng(0).random((1, C, 8))
    decays = tile.chunk_decays(blocks_of(g, base), base)
    G = np.cumsum(g, axis=1)
    assert_close("start", decays.start, np.exp2(G), STAGE_TOLERANCE)
    assert_close("end", decays.end, np.exp2(G[:, -1:] - G), STAGE_TOLERANCE)
    for level, decay in enumerate(decays.levels, start=base.bit_length() - 1):
        b = 1 << level
        last_left = (np.arange(C) | (2 * b - 1)) - b
        assert_close(f"level {b}", decay, np.exp2(-np.abs(G - G[:, last_left])), STAGE_TOLERANCE)
    if base > 1:
        from_first = G - G[:, np.arange(C) // base * base]
        rows, columns = (np.asarray(x, np.float64) for x in decays.base)
        held = rows >= tile.LEAST_FACTOR
        np.testing.assert_array_equal(held, np.exp2(from_first) * tile.ANCHOR >= tile.LEAST_FACTOR)
        for factor, sign in ((rows, 1), (columns, -1)):
            exact = np.exp2(sign * from_first[held]) * tile.ANCHOR**sign
            assert_close("factor", factor[held] / exact, np.ones_like(exact), TOLERANCE["float32"])


def test_factors_do_not_know_the_gates_of_another_sequence_and_of_later_rows():
    """Rows 2 and 6 of a block begin sequences: pairs inside of one keep their decay, and every bit of their factors."""
    owner = np.repeat([0, 1, 2], [2, 4, 2])
    continuing = [jnp.asarray(x, jnp.float32) for x in np.append(0, np.diff(owner) == 0)]
    g = -np.random.default_rng(0).random(8)

    def factors(g):
        return np.asarray(tile.base_factors([jnp.asarray(x, jnp.float32) for x in g], continuing))

    expected = factors(g)
    for i in range(8):
        for j in range(i):
            if owner[i] == owner[j]:
                decay = expected[0, i] * expected[1, j]
                np.testing.assert_allclose(decay, np.exp2(g[j + 1 : i + 1].sum()), rtol=1e-6)
    for n in range(3):
        changed = factors(np.where(owner == n, 3.0 * g, g))
        np.testing.assert_array_equal(changed[:, owner != n], expected[:, owner != n])
    for i in range(8):
        changed = factors(np.where(np.arange(8) < i, g, 3.0 * g))
        np.testing.assert_array_equal(changed[:, :i], expected[:, :i])


@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize(("base", "strength"), [(1, 1.0), (1, 100.0), (8, 1.0), (8, 16.0)])
@pytest.mark.parametrize("pairs", [False, True])
def test_interaction(C, base, strength, pairs):
    """Every pair and every own product stands in exactly one of the products, and none of them overflows."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 2, C, 8))
    g = -strength * rng.random((2, C, 8))
    args = (jnp.asarray(x, jnp.float32) for x in (q, k))
    table = jnp.asarray(tile.level_table(C, base))[None]

    def kernel(q, k, table, *refs):
        *blocks, turned = refs
        decays = tile.chunk_decays([x[...] for x in blocks], base)
        turned[...] = tile.interaction_tile(q[...], k[...], k[...], decays, table[...], jnp.float32, pairs)

    shape = jax.ShapeDtypeStruct((2, C, 2 * C), jnp.float32)
    turned = pl.pallas_call(kernel, out_shape=shape, interpret=True)(*args, table, *blocks_of(g * LOG2_E, base))
    G = np.cumsum(g, axis=1)
    decay = np.exp(np.tril(np.ones((C, C)))[None, :, :, None] * (G[:, :, None] - G[:, None]))
    expected = [np.tril(np.einsum("hik,hijk,hjk->hij", x, decay, k), last) for x, last in ((q, 0), (k, -1))]
    assert_close("scores", jnp.swapaxes(turned, 1, 2), np.concatenate(expected, axis=1), STAGE_TOLERANCE)


@pytest.mark.parametrize(("bound", "base"), [(None, 1), (-16.7, 1), (-16.6, 8), (0.0, 8)])
def test_base_block(bound, base):
    """24 to base 2 are 16.64 nats. Any gate may come without a bound: bfloat16 tensors take 8 rows at once too."""
    assert tile.base_block(bound, jnp.float32) == base
    assert tile.base_block(bound, jnp.bfloat16) == 8


@pytest.mark.parametrize(("K", "V"), [(80, 48), (128, 128)])
def test_what_the_backward_keeps_has_no_padding(K, V):
    """What is kept are the arguments as they are, and four results, whose heads are as wide as the user's."""
    B, T, H, HV, C = 2, 32, 1, 2, 16
    x = make_inputs(B, T, H, HV, K, V, per_channel=True)
    run = lambda x: chunk_kda(**x, chunk_size=C, implementation="fused")[0]
    kept = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(run, x)[1], x))
    per_row = T * (2 * H * K + HV * K + 2 * HV * V + HV) + T // C * HV * K * V + T * HV * 3 * C
    # JAX adds a few scalars for padding of its own.
    assert sum(y.size * y.dtype.itemsize for y in kept if y.ndim) == 4 * B * per_row


@pytest.mark.parametrize("sizes", [dict(B=1, T=64, H=2, HV=4, K=8, V=16), dict(B=2, T=100, H=1, HV=3, K=128, V=64)])
def test_the_backward_costs_twice_the_forward(sizes):
    assert cost(**sizes, C=64, backward=True).flops == 2 * cost(**sizes, C=64).flops
