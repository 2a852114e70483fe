"""The tile mathematics by itself, how the kernels are launched, and what they say they cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gla import Config, channels, packs
from chunkwise.fused_gla.config import cost
from chunkwise.shared.kernels.matmul import bf16_parts, kernel_trace
from chunkwise.shared.kernels.spans.operands import ABSENT
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, make_gate, make_inputs
from tests.either_gla import chunk_either_gla

THOROUGH = dict(test_every_number_of_steps_gives_the_same_bits=True)


def pair_sums(g, C):
    """Return sum of g over j < m <= i, [h, C, C, D], in float64."""
    sums = np.zeros((g.shape[0], C, C, g.shape[2]))
    for i in range(C):
        for j in range(i):
            sums[:, i, j] = np.sum(g[:, j + 1 : i + 1], axis=1)
    return sums


@pytest.mark.parametrize("transposed", [False, True])
def test_decays_keep_their_digits_beside_large_ones(transposed):
    # Differences of cumulative sums lose 3e-5 nats here.
    g = make_gate("spikes", np.random.default_rng(0), (1, 128, 1)).astype(np.float32).astype(np.float64)
    with kernel_trace(True):
        g_low = jnp.asarray(g, jnp.float32).reshape(1, 1, 128)
        exponents = packs.pair_exponents_transposed if transposed else packs.pair_exponents
        found = exponents(packs.GateSums(g_low, None, ABSENT, ABSENT), 3)
    found = np.swapaxes(found, 1, 2) if transposed else found
    assert_close("pairs", np.tril(np.exp(found)), np.tril(np.exp(pair_sums(g, 128)[..., 0])), STAGE_TOLERANCE)


@pytest.mark.parametrize("kind", ["logsigmoid", "spikes"])
def test_sums_of_gates_in_parts_lose_nothing(kind):
    g = jnp.asarray(make_gate(kind, np.random.default_rng(0), (2, 64, 5)), jnp.float32)
    whole = channels.decays(g, 0.5)
    with kernel_trace(True):
        parts = channels.decays(g, 0.5, parts=bf16_parts(g))
        states = channels.decays(g, 0.5, pairs=channels.Pairs.NONE, parts=bf16_parts(g))
    for level, (got, want) in enumerate(zip(parts.pairs, whole.pairs, strict=True)):
        assert_close(f"pairs of level {level}", got, want, STAGE_TOLERANCE)
    for name in ("from_start", "to_end", "through"):
        for got in (parts, states):
            assert_close(name, getattr(got, name), getattr(whole, name), STAGE_TOLERANCE)


def gradients(x, **options):
    def loss(x):
        o, state = chunk_either_gla(**x, output_final_state=True, chunk_size=16, implementation="fused", **options)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(state))

    return jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(x))


@pytest.mark.parametrize(("kind", "steps"), [("constant", (1, 2, 4)), ("channel, packed", (1, 4))])
def test_every_number_of_steps_gives_the_same_bits(kind, steps):
    # Four chunks: a loop over the chunks of a step, over the states before them, or over the steps has a single trip.
    packed = "packed" in kind
    x = make_inputs(1, 64, 2, K=8, V=8, num_states=3 if packed else 1, per_channel="channel" in kind)
    del x["beta"]
    # Their sums are exact: a CPU adds up the terms of a product in an order that its shape decides, other than a TPU.
    x["g"] = jnp.round(64 * x["g"]) / 64
    if not packed:
        x |= dict(g=None, g_gamma=jnp.asarray([-0.1, -2.0]))
    options = dict(cu_seqlens=boundaries(3, 40, 10)) if packed else {}
    first, *others = (gradients(x, config=Config(2, 2, n), **options) for n in steps)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


def test_strong_gates_change_no_bit_of_another_sequence():
    """They are left over by the one product of a chunk, and go by levels."""
    x = make_inputs(1, 16, 2, K=8, V=8, dtype=jnp.bfloat16, per_channel=True)
    del x["beta"]

    @jax.jit
    def run(x):
        one = lambda x: chunk_either_gla(**x, cu_seqlens=boundaries(5, 6, 5), chunk_size=16, implementation="fused")[0]
        o, pullback = jax.vjp(one, x)
        return pullback(x["v"])[0] | dict(o=o)

    weak, strong = (run(x | dict(g=g)) for g in (x["g"], x["g"].at[:, :5].set(-1e4).at[:, 11:].set(-1e4)))
    for name, y in weak.items():
        np.testing.assert_array_equal(y[:, 5:11], strong[name][:, 5:11], err_msg=name)


def equations(jaxpr):
    """Yield the equations of a jaxpr and of all those inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for x in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                yield from equations(x)


def test_fixed_gates_have_no_gradient_to_pay_for():
    x = make_inputs(1, 16, 1, K=8, V=8)
    x = {name: x[name] for name in "qkv"}
    run = lambda x, gamma: jnp.sum(chunk_either_gla(**x, g_gamma=gamma, implementation="fused")[0])
    both, tokens = jax.grad(run, argnums=(0, 1)), jax.grad(run)
    jax.tree.map(np.testing.assert_array_equal, tokens(x, jnp.asarray([-0.1])), both(x, jnp.asarray([-0.1]))[0])
    for gradient, results in ((tokens, 3), (both, 4)):
        *_, backward = (
            e
            for e in equations(jax.make_jaxpr(gradient)(x, jnp.asarray([-0.1])).jaxpr)
            if str(e.primitive) == "pallas_call"
        )
        assert len(backward.outvars) == results


def test_steps_are_sized_by_the_type_of_the_products():
    def grids(*dtypes):
        x = [jax.ShapeDtypeStruct((1, 512, 4, 512), dtype) for dtype in dtypes]
        run = lambda *x: jnp.sum(chunk_either_gla(*x, chunk_size=64, implementation="fused")[0])
        program = jax.make_jaxpr(jax.grad(run, argnums=(0, 1, 2)))(*x)
        return [e.params["grid_mapping"].grid for e in equations(program.jaxpr) if e.primitive.name == "pallas_call"]

    assert grids("bfloat16", "float32", "float32") == grids(*["float16"] * 3) == grids(*["float32"] * 3)
    assert grids(*["float32"] * 3) != grids(*["bfloat16"] * 3)


def test_kernels_cost_what_their_tokens_cost():
    def work(*lengths):
        """Return the grid of every launch, and all its operations with the shapes of their results."""
        x = make_inputs(1, 128, 1, K=128, V=128)
        del x["beta"]
        run = lambda x, cu: jnp.sum(chunk_either_gla(**x, cu_seqlens=cu, implementation="fused")[0])
        program = jax.make_jaxpr(jax.grad(run))(x, boundaries(*lengths))
        return [
            (
                launch.params["grid_mapping"].grid,
                [(e.primitive, [v.aval.str_short() for v in e.outvars]) for e in equations(launch.params["jaxpr"])],
            )
            for launch in equations(program.jaxpr)
            if launch.primitive.name == "pallas_call"
        ]

    one, many = work(128), work(*[4] * 32)
    assert one == many
    # Their only loops are over the chunks of a step, whose number the sequences have no part in.
    loops = [sum(primitive.name == "while" for primitive, _ in body) for _, body in one]
    assert set(loops) == {1, 2}


def test_xla_costs_what_its_tokens_cost():
    def flops(N):
        spec = jax.ShapeDtypeStruct((1, 8192, 1, 64), jnp.float32)
        cu = jax.ShapeDtypeStruct((N + 1,), jnp.int32)
        run = jax.jit(lambda q, k, v, g, cu: chunk_either_gla(q, k, v, g, cu_seqlens=cu, implementation="xla")[0])
        g = jax.ShapeDtypeStruct((1, 8192, 1), jnp.float32)
        cost = run.lower(spec, spec, spec, g, cu).compile().cost_analysis()
        return np.array([cost["flops"], cost["bytes accessed"]])

    assert (flops(512) <= 1.5 * flops(1)).all()


def test_xla_shares_the_products_of_a_key_head():
    """The sizes of a Mamba-2 with one key head for all values: its keys cost once, and are kept once."""

    def cost(H):
        of = lambda *sizes: jax.ShapeDtypeStruct((1, 1024, *sizes), jnp.float32)
        loss = lambda q, k, v, g: jnp.sum(chunk_either_gla(q, k, v, g, implementation="xla")[0])
        run = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(of(H, 64), of(H, 64), of(8, 32), of(8)).compile()
        return np.array([run.cost_analysis()["flops"], run.memory_analysis().temp_size_in_bytes])

    assert (cost(1) <= np.array([0.7, 0.95]) * cost(8)).all()


@pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])
def test_the_backward_keeps_no_padding(per_channel):
    x = make_inputs(1, 64, 2, K=60, V=100, dtype=jnp.bfloat16, num_states=1, per_channel=per_channel)
    del x["beta"]
    run = lambda x: chunk_either_gla(**x, implementation="fused")[0]
    arrays = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(run, x)[1], x))
    states = 2 * 128 * 128 * 4  # before every grid step, of which there is one; padded, because a kernel wrote them
    numbers = 64  # JAX keeps a few scalars
    assert sum(y.size * y.dtype.itemsize for y in arrays) <= states + sum(y.nbytes for y in x.values()) + numbers


SIZES = dict(B=2, T=64, K=8, V=4)


def test_chunked():
    sizes = SIZES | dict(H=3, HV=6, C=16)
    want = cost(**sizes).flops
    # 2 C K for the scores, 2 C V for what they weight, 2 K V each for the update of the state and its reading.
    assert want == 2 * 64 * (3 * 2 * 16 * 8 + 6 * (2 * 16 * 4 + 4 * 8 * 4))
    # With gates per channel every value head has scores of its own.
    assert cost(**sizes, per_channel=True).flops - want == 2 * 64 * 3 * 2 * 16 * 8


def test_backward_and_states_alone():
    sizes = SIZES | dict(H=3, HV=3, C=16)
    assert cost(**sizes, output=False).flops == 2 * 64 * 3 * 2 * 8 * 4
    assert cost(**sizes, backward=True).flops > 2 * cost(**sizes).flops
