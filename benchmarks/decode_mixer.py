"""The TPU compiler's estimate of a decode's whole mixer, which is a layer between its projections.

It is counted as an operator in `step`: the bundles of the kernel, but at least the time of its bytes, and the
operations around it.
"""

import tempfile
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks import step, tpu
from benchmarks.regions import kernel_bundles, kernel_text, read_loop
from chunkwise.command.models import Layer, Mixture, moved_bytes
from chunkwise.layers import Cache, Step, delta_net, kimi, lightning, mamba2, rwkv7
from chunkwise.layers.mixer import running
from chunkwise.pipeline.operators import COMPOSED
from chunkwise.shared.testing import tpu as compiler
from chunkwise.shared.testing.tpu import launches

_LAYERS = {
    "gated_delta_rule": delta_net.LAYER, "kda": kimi.LAYER, "simple_gla": mamba2.LAYER, "lightning": lightning.LAYER,
    "dplr_delta_rule": rwkv7.LAYER,
}  # fmt: skip


@dataclass(frozen=True)
class Decoder(Layer):
    """The work of a layer between its projections, where an operator has several layers.

    Attributes:
      layer: the name of the layer in `_LAYERS`.
    """

    layer: str = "simple_gla"


# Models, and what one of eight devices has of them. A norm over heads of several devices comes after the launch.
MIXERS = {
    "qwen3-next-80b-tp8": Layer("gated_delta_rule", H=2, HV=4),
    "qwen3.5-397b-tp8": Layer("gated_delta_rule", H=2, HV=8),
    "kimi-linear-48b-tp8": Layer("kda", H=4, HV=4),
    "qwen3-next-80b": Layer("gated_delta_rule", H=16, HV=32),
    "nemotron-h": Decoder("simple_gla", H=8, HV=128, V=64),
    "nemotron-h-tp8": Decoder("simple_gla", H=1, HV=16, V=64),
    "granite-4": Decoder("simple_gla", H=1, HV=128, V=64),
    "minimax-text-01": Decoder("simple_gla", H=64, HV=64, layer="lightning"),
    "rwkv7-7b": Layer("dplr_delta_rule", H=64, HV=64, K=64, V=64),
    "rwkv7-7b-tp8": Layer("dplr_delta_rule", H=8, HV=8, K=64, V=64),
}
MIXTURES = ["decode-64", "decode-64-bfloat16"]
# Over rings the launch takes a few heads.
SMALLER = ["decode-64-bfloat16-ring", "decode-64-int8-ring"]
DRAFTS = "speculate-64x3-bfloat16-ring"
# Every token has a slot.
IN_SLOTS = "speculate-64x3-bfloat16"
# Of a step with prefills only what is around the kernels is counted: `benchmarks step` counts the operator.
MIXED = "decode-32-prefill-2x512-bfloat16"
_MORE = {
    "qwen3-next-80b-tp8": ["decode-64-int8", *SMALLER, DRAFTS, IN_SLOTS],
    "qwen3.5-397b-tp8": SMALLER[:1],
    "kimi-linear-48b-tp8": [*SMALLER, DRAFTS, IN_SLOTS],
}
# For these chips, for int8 without a ring, and for layers without a delta rule or with two tokens for one, the compiler
# cannot profile a program that also has the branch of prefills. So the counts of the step are static there, and the
# program has one branch.
_ONE_WAY = ("v5e", "v5p")


def _steps_alone(case: Layer) -> bool:
    """Return whether it is a delta rule whose token is one token of its kernels."""
    return case.table.delta and f"chunk_{case.operator}" not in COMPOSED


def mixtures(name: str) -> list[str]:
    """Return the mixtures of a case."""
    return [*MIXTURES, *_MORE.get(name, []), *([MIXED] if _steps_alone(MIXERS[name]) else [])]


def _layer(case: Layer):
    """Return the definition of a layer, and its config."""
    layer = _LAYERS[getattr(case, "layer", case.operator)]
    return layer, layer.config(D=1, H=case.H, HV=case.HV, K=case.K, V=case.V)


def trace_mixer(case: Layer, mixture: Mixture, chip: str, flags: str = "", known: bool = False, rows: bool = True):
    """Return the mixer of a step, traced for a chip, to be compiled with these flags; in a fresh process only.

    With `known` the counts of the step are static numbers, otherwise they are traced. With `rows` the pools are laid
    out in rows, otherwise in the default way.
    """
    compiler.setup(flags)
    layer, config = _layer(case)
    weights = jax.eval_shape(lambda: layer.random_weights(jax.random.key(0), config, jnp.bfloat16))
    letters = layer.split(config)
    # Projections to heads, of which the tokens are given.
    projects = jax.tree.map(lambda of, y: of[0] == "." != of[-1] and y.ndim > 1, letters, weights)
    tokens = lambda projects, y: jax.ShapeDtypeStruct((1, mixture.T, y.shape[1]), jnp.bfloat16) if projects else y
    weights = jax.tree.map(tokens, projects, weights)
    slots = step.SLOTS * (mixture.W if mixture.replay else 1)
    conv = tuple(jax.ShapeDtypeStruct((slots, config.W - 1, n), jnp.bfloat16) for n in config.channels)
    pool = Cache(conv, jax.eval_shape(lambda: mixture.make_pool(case, step.SLOTS)))
    step_of = mixture.step()
    counts = {name: step_of.pop(name) for name in ("num_decodes", "num_sequences") if known}
    told = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), step_of)

    def run(weights, pool, told):
        over = running.Serving(pool, Step(**told, **counts), None, mixture.W if mixture.replay else None, "fused", None)
        given = jax.tree.map(lambda projects, y: (lambda x: y) if projects else y, projects, weights)
        given = given._replace(out=lambda y: y)
        return layer.mix(jnp.zeros((1, mixture.T, 1), jnp.bfloat16), given, config, over)[:2]

    with step.leave_out_prefills(not mixture.over_array):
        return compiler.trace_for(run, weights, pool, told, chip=chip, auto_layout=rows, donate_argnums=(1,))


def _launch(text: str, mixed: bool = False) -> list[str]:
    """Return the launch that runs if all sequences are decodes, or if `mixed` those of a step that has prefills too."""
    return [name for name in launches(text) if ("decode_layer" in name) != mixed]


def count_kernel(case: Layer, mixture: Mixture, chip: str) -> tuple[int, int]:
    """Return the bundles of the kernel, and the steps of its grid; in a fresh process only."""
    with tempfile.TemporaryDirectory(prefix="chunkwise_llo_") as folder:
        # With known counts the program has one way, which is compiled in less time, and the same kernel.
        program = trace_mixer(case, mixture, chip, tpu.dump_flags(folder), known=True)
        (launch,) = _launch(program.lower().compile().as_text())
        loop = read_loop(kernel_text(folder, launch))
    return kernel_bundles(loop, *step.decode_runs(loop, mixture)), loop.turns - 2


def count_around(case: Layer, mixture: Mixture, chip: str, rows: bool = True) -> int:
    """Return the estimated cycles of the operations around the kernels; in a fresh process only."""
    both = _steps_alone(case) and (mixture.over_array or mixture.replay)
    one_way = chip in _ONE_WAY or not both
    build = lambda flags: trace_mixer(case, mixture, chip, flags, one_way, rows).lower().compile().as_text()
    return step.cycles_around(build, lambda text: _launch(text, bool(mixture.prefills)))


def estimate(case: Layer, mixture: Mixture, chip: str, timeout: float) -> dict:
    """Return the estimated cost of the mixer of a step on a chip that is not here.

    Of a step that has prefills it returns the operations around the kernels alone. In the default layout of pools these
    are counted for one chip, where the compiler can profile it.
    """
    counted = (
        f"from benchmarks.decode_mixer import Decoder, Layer, Mixture, count_around, count_kernel; "
        f"of = {case!r}, {mixture!r}, {chip!r}; dict(count={{}})"
    )
    count = lambda call: tpu.result(counted.format(call), timeout)
    around = count("count_around(*of)")
    if "count" not in around:
        return around
    traced = tpu.digest(trace_mixer(case, mixture, chip, known=True))
    if mixture.prefills:
        return {"around_cycles": around["count"], "traced": traced}
    kernel = count("count_kernel(*of)")
    if "count" not in kernel:
        return kernel
    around, (bundles, steps) = around["count"], kernel["count"]
    config = _layer(case)[1]
    # The bytes of the convolution's state, of which every token of a decode leaves one, and of the norm's gates.
    more = mixture.N * ((1 + mixture.W) * (config.W - 1) * sum(config.channels) * 2 + mixture.W * 2 * case.HV * case.V)
    floor = tpu.cycles_to_move(moved_bytes(case, mixture)[0] + more, chip)
    row = {"decode_bundles": bundles, "decode_floor": floor, "decode_steps": steps}
    row |= {"around_cycles": around, "traced": traced}
    if chip == "v6e" and "count" in (found := count("count_around(*of, rows=False)")):
        row["around_in_default_layout"] = found["count"]
    return row | {"cycles": max(bundles, floor) + around, "estimate_ms": step.step_ms(row, chip)}
