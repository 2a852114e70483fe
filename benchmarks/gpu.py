"""The number of launches of a program on an H100, and its temporaries, from XLA's compiler, which needs no GPU.

A launch takes at least a few microseconds, so the number of launches is a lower bound of the time. Each program has
limits, which `nox -s gpu` checks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import gpu_compiler
from chunkwise.command.models import Layer, Mixture, serving_step
from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.implementation import platforms
from chunkwise.shared.testing import compare

# The slots of the pool of a decode, and the number of decodes.
SLOTS, DECODES = 128, 64
GDN, KDA, GLA, SIMPLE_GLA = (
    Layer(operator, H=H, HV=32)
    for operator, H in (("gated_delta_rule", 16), ("kda", 32), ("gla", 32), ("simple_gla", 32))
)


class Program(NamedTuple):
    """A program and its limits.

    Attributes:
      layer: its operator and sizes.
      kind: "forward", "forward+backward", "decode" of one token for each of 64 sequences, or "serving step", in which
        all sequences are decodes.
      T: tokens.
      most_launches, most_mib: the limits.
    """

    layer: Layer
    kind: str
    T: int
    most_launches: int
    most_mib: int


PROGRAMS = {
    "gdn": Program(GDN, "forward", 8192, 250, 1229),
    "gdn-backward": Program(GDN, "forward+backward", 8192, 3200, 2560),
    "gdn-64-heads": Program(Layer("gated_delta_rule", H=16, HV=64), "forward", 8192, 1500, 2048),
    "gdn-long": Program(GDN, "forward", 65536, 2000, 2048),
    "gdn-long-backward": Program(GDN, "forward+backward", 65536, 5000, 4096),
    "kda": Program(KDA, "forward", 8192, 800, 1536),
    "kda-backward": Program(KDA, "forward+backward", 8192, 2600, 5120),
    "gla": Program(GLA, "forward", 8192, 300, 1700),
    "gla-backward": Program(GLA, "forward+backward", 8192, 700, 3100),
    "simple-gla": Program(SIMPLE_GLA, "forward", 8192, 120, 641),
    "simple-gla-backward": Program(SIMPLE_GLA, "forward+backward", 8192, 300, 1100),
    **{
        f"{name}-decode": Program(layer, "decode", DECODES, 40, 64)
        for name, layer in (("gdn", GDN), ("kda", KDA), ("gla", GLA), ("simple-gla", SIMPLE_GLA))
    },
    # GLA has no serving step.
    **{
        f"{name}-serving-step": Program(layer, "serving step", DECODES, 40, 2048)
        for name, layer in (("gdn", GDN), ("kda", KDA), ("simple-gla", SIMPLE_GLA))
    },
}


def measure(program: Program) -> dict:
    """Compile a program; return its number of launches, its MiB of temporaries, and whether the limits hold."""
    with platforms.gpu_forms():
        compiled, branches = _compile(program)
    launches = gpu_compiler.count_launches(compiled.as_text(), branches)
    mib = round(compiled.memory_analysis().temp_size_in_bytes / 2**20)
    return {
        "launches": launches, "most_launches": program.most_launches, "temporaries_mib": mib,
        "most_mib": program.most_mib, "within": launches <= program.most_launches and mib <= program.most_mib,
    }  # fmt: skip


def _compile(program: Program) -> tuple:
    """Return the executable, and the branches that its conditions take."""
    layer, T = program.layer, program.T
    x = layer.specs(T, jnp.bfloat16)
    if program.kind == "serving step":
        mixture = Mixture(DECODES)
        step = jax.tree.map(lambda y: jax.ShapeDtypeStruct(jnp.shape(y), y.dtype), mixture.step())
        pool = jax.ShapeDtypeStruct((SLOTS, layer.HV, layer.K, layer.V), jnp.float32)
        compiled = gpu_compiler.compile_for(serving_step(layer, "xla"), x, pool, step, donate_argnums=(1,))
        # There are decodes, and no prefills.
        return compiled, (1, 0)
    if program.kind == "decode":
        one = {name: jax.ShapeDtypeStruct((T, 1, *y.shape[2:]), y.dtype) for name, y in x.items()}
        states = jax.ShapeDtypeStruct((T, layer.HV, layer.K, layer.V), jnp.float32)
        decode = OPERATORS[f"recurrent_{layer.operator}"].function

        def run(x, states):
            return decode(**x, initial_state=states, output_final_state=True, implementation="xla")

        return gpu_compiler.compile_for(run, one, states, donate_argnums=(1,)), ()
    fn, args = layer.function("xla"), (x, None)
    if program.kind == "forward+backward":
        fn, args = compare.with_gradients(fn), (*args, {"o": x["v"]})
    return gpu_compiler.compile_for(fn, *args), ()
