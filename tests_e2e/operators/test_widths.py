"""Heads of every usual width are read and written where projections leave them: XLA pads and copies no tokens.

An operator is a row of OPERATORS, and has q, k and v besides.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from chunkwise import pipeline
from chunkwise.causal_conv1d import causal_conv1d
from chunkwise.norm_gated import rms_norm_gated
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing import tpu
from chunkwise.shared.testing.inputs import spec

pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not tpu.has_libtpu(), reason="needs libtpu")]
B, T, H = 1, 512, 8
WIDTHS = (
    *((n, n) for n in (16, 32, 48, 64, 80, 96, 112, 160, 192, 256)), (128, 64), (128, 80), (96, 192), (64, 128),
    (80, 112),
)  # fmt: skip


# From the channels of keys and values to those of the other arrays of tokens.
OPERATORS = {
    "simple_gla": lambda K, V: dict(g=1),
    "gla": lambda K, V: dict(g=K),
    "mlstm": lambda K, V: dict(i=1, f=1),
    "mamba2": lambda K, V: dict(dt=1),
    "gated_delta_rule": lambda K, V: dict(g=1, beta=1),
    "kda": lambda K, V: dict(g=K, beta=1),
    "dplr_delta_rule": lambda K, V: dict(a=K, b=K, gk=K),
    "gdn2": lambda K, V: dict(g=K, b=K, w=V),
    "comba": lambda K, V: dict(p=K, g=1, beta=1),
}
SERVED = [name for name in OPERATORS if hasattr(pipeline, f"ragged_{name}")]
# OLMo-hybrid, whose tokens do not fill whole registers.
HEADS = {("gated_delta_rule", (96, 192)): 30}
MAMBA2 = dict(q="C", k="B", v="x")
# XLA weighs the values of their decodes, and casts their tensors.
CAST = ("mamba2", "dplr_delta_rule")
GATES = ("g", "gk", "i", "f", "dt", "beta")
QUICK = (("simple_gla", (64, 64)), ("simple_gla", (128, 80)), ("mamba2", (128, 64)))
THOROUGH = dict(
    test_nothing_stands_around_a_launch=lambda operator, widths, chip: (operator, widths) not in QUICK or chip != "v6e",
    test_steps_of_a_token=True,
    test_states=lambda operator, widths: (operator, widths) != ("mamba2", (48, 48)),
    test_serving_steps=lambda operator, decodes, widths: (operator, widths, decodes) != ("mamba2", (48, 48), 0),
    test_devices=lambda operator, widths: (operator, widths) != ("mamba2", (48, 48)),
    test_convolution_and_norm=lambda widths: widths != (80, 112),
)
of_widths = functools.partial(pytest.mark.parametrize, "widths", ids=lambda widths: "x".join(map(str, widths)))
of_operators = functools.partial(pytest.mark.parametrize, "operator")
FEW = of_widths([(48, 48), (80, 112), (96, 192)])


def arrays(operator: str, widths: tuple[int, int], T: int) -> tuple[int, dict, int]:
    """Return the heads of an operator, its arrays of T tokens, flat, and the numbers of the smallest of q, k and v."""
    (K, V), heads = widths, HEADS.get((operator, widths), H)
    channels = dict(q=K, k=K, v=V) | OPERATORS[operator](K, V)
    wide = lambda name: jnp.float32 if name in GATES else jnp.bfloat16
    flat = {name: spec(B, T, heads * D, dtype=wide(name)) for name, D in channels.items()}
    return heads, flat, B * T * heads * min(K, V)


def call(form: str, operator: str, heads: int, x: dict, **options):
    """Return the output of an operator, flat, and the states after the tokens."""
    by_head = {name: y.reshape(*y.shape[:2], heads, -1) if y.shape[2] > heads else y for name, y in x.items()}
    if operator == "mamba2":
        by_head = {MAMBA2.get(name, name): y for name, y in by_head.items()}
        options |= dict(A=-jnp.ones(heads), D=jnp.ones(heads), dt_softplus=True)
    o, states = getattr(pipeline, f"{form}_{operator}")(**by_head, **options, implementation="fused")
    return o.reshape(*o.shape[:2], -1), states


def compiled(run, *specs, chip: str = "v6e", **options) -> str:
    # In the layout that the compiler takes: of few lanes it would store the tokens of an argument side by side.
    return tpu.compile_for(run, *specs, chip=chip, auto_layout=True, **options).as_text()


def both(run):
    """Return the function from arguments and cotangents to the results of `run` and the gradients."""

    def gradients(x, cotangents):
        y, pullback = jax.vjp(run, *x)
        return y, pullback(cotangents)

    return gradients


@pytest.mark.parametrize("chip", CHIPS)
@of_widths(WIDTHS)
@of_operators(OPERATORS)
def test_nothing_stands_around_a_launch(operator, widths, chip):
    heads, x, size = arrays(operator, widths, T)
    run = both(lambda x: call("chunk", operator, heads, x)[0])
    assert not around_launches(compiled(run, (x,), x["v"], chip=chip), size)


@FEW
@of_operators(OPERATORS)
def test_states(operator, widths):
    heads, x, size = arrays(operator, widths, T)
    S = spec(B, heads, *widths)
    S = pipeline.MlstmState(S, spec(B, heads, widths[0]), spec(B, heads)) if operator == "mlstm" else S
    run = lambda x, S: call("chunk", operator, heads, x, initial_state=S, output_final_state=True)
    assert not around_launches(compiled(both(run), (x, S), (x["v"], S)), size)


@FEW
@pytest.mark.parametrize(
    ("operator", "decodes"), [(x, n) for x in SERVED for n in (False, True) if not n or x not in CAST]
)
def test_serving_steps(operator, decodes, widths):
    """Four prefills, or as many decodes as tokens."""
    heads, x, size = arrays(operator, widths, 256)
    N = 256 if decodes else 4

    def run(x, states, cu_seqlens, state_indices):
        more = dict(states=states, cu_seqlens=cu_seqlens, state_indices=state_indices)
        return call("ragged", operator, heads, x, **more, num_decodes=N * decodes)

    pool, integers = spec(N, heads, *widths), lambda n: spec(n, dtype=jnp.int32)
    text = compiled(run, x, pool, integers(N + 1), integers(N), donate_argnums=(1,))
    assert not around_launches(text, size)


@FEW
@of_operators(OPERATORS)
def test_devices(operator, widths):
    """Four devices have the tokens of a row: maps of states, and the launches behind them, both directions."""
    tokens, mesh = PartitionSpec(None, "tokens"), tpu.topology_mesh(CHIPS["v6e"].topology, "tokens", 4)
    heads, x, size = arrays(operator, widths, 4 * 2048)
    run = both(lambda x: call("chunk", operator, heads, x, sharding=tokens)[0])
    place = Format(Layout.AUTO, NamedSharding(mesh, tokens))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(run, in_shardings=place, out_shardings=place).trace((x,), x["v"]).lower().compile().as_text()
    assert not around_launches(text, size // 4)


@of_widths(WIDTHS)
def test_convolution_and_norm(widths):
    """Channels as a layer has them: a convolution over those of all heads, and a norm of every head."""
    x, y = (spec(B, T, H * D, dtype=jnp.bfloat16) for D in widths)
    heads = lambda y: y.reshape(B, T, H, -1)

    def run(x, weight, y, z, norm):
        y = rms_norm_gated(heads(y), heads(z), norm, implementation="pallas").reshape(B, T, -1)
        return causal_conv1d(x, weight, activation="silu", implementation="pallas")[0], y

    text = compiled(both(run), (x, spec(x.shape[2], 4), y, y, spec(widths[1])), (x, y))
    assert not around_launches(text, B * T * H * min(widths))


@pytest.mark.parametrize("chip", CHIPS)
def test_steps_of_a_token(chip):
    """Gated DeltaProduct cuts the two keys and values of a token, which begin inside of registers, from its row."""
    H, K, V = 3, 80, 112
    rows = [spec(B, T, n * H * D, dtype=jnp.bfloat16) for n, D in ((1, K), (2, K), (2, V))]

    def run(q, k, v, g, beta):
        q, k, v = (x.reshape(B, -1, H, D) for x, D in ((q, K), (k, K), (v, V)))
        beta = beta.reshape(B, -1, H)
        o, _ = pipeline.chunk_gated_delta_product(q, k, v, g, beta, 2, implementation="fused")
        return o.reshape(B, T, -1)

    compiled = tpu.compile_for(run, *rows, spec(B, T, H), spec(B, T, 2 * H), chip=chip, auto_layout=True)
    assert not around_launches(compiled.as_text(), B * T * H * K)


def around_launches(text: str, size: int) -> list[str]:
    """Return the operations of a compiled program that make an array of so many numbers or more, but for kernels.

    Branches that launch kernels count, too. There outputs of decodes and of prefills are put together by a select, and
    gates per channel of decodes are clipped. Values of zeros are the tokens of the map M of a device.
    """
    assert tpu.launches(text)
    # A copy, or a slice, that starts and is done is one to fast memory, ahead of its launch.
    nothing = {"parameter", "bitcast", "get-tuple-element", "tuple", "custom-call", "constant", "conditional"}
    nothing |= {"copy-start", "copy-done", "slice-start", "slice-done"}
    in_branches, found = r"\s*%?(broadcast_select|maximum_bitcast)_fusion", []
    for part in re.findall(r"^(?:ENTRY )?%\S+ \([^\n]*\{\n.*?^}", text, re.MULTILINE | re.DOTALL):
        entry = part.startswith("ENTRY")
        for line in part.splitlines() if entry or tpu.launches(part) else ():
            made = re.match(r"\s*(?:ROOT )?%?\S+ = (.*?) ([\w\-]+)\(", line)
            if not made or made[2] in nothing or "broadcast(%constant" in line:
                continue
            arrays = re.findall(r"\w+\[([\d,]+)\]", made[1])
            large = any(math.prod(map(int, sizes.split(","))) >= size for sizes in arrays)
            if large and (entry or not re.match(in_branches, line)):
                found.append(line.strip()[:200])
    return found
