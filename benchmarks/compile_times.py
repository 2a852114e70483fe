"""The processor time of compilations for a TPU that is not here, without a profile.

Every program is compiled in a process of its own. Its time runs from the first trace to the compiled program, and is
the sum over all threads.
"""

import time

from benchmarks import decode_mixer, step, tpu, tpu_peers
from benchmarks.cases import CASES
from benchmarks.mixer import MIXERS
from chunkwise.shared.testing import tpu as compiler

# Layers that engines and trainers compile, serving steps of an operator, and whole mixers of a step. tokamax's operator
# is compiled too where it has the same.
LAYERS = ("kimi-linear-48b", "qwen3-next-80b", "minimax-text-01", "gla", "mixer-kimi-linear", "mixer-qwen3-next")
STEPS = ("decode-64", "decode-32-prefill-4096")
DECODES = ("qwen3-next-80b-tp8", "kimi-linear-48b-tp8")
PASSES = ("forward", "forward+backward")


def programs() -> list[dict[str, str]]:
    """Return the labels of all programs: a case, whose it is, and the pass or the mixture of a serving step."""
    implementations = ["fused", *(name for name in ("tokamax",) if tpu_peers.PEERS[name].installed)]
    layers = [
        dict(case=case, implementation=name, way=way)
        for case in LAYERS
        for name in implementations
        for way in PASSES
        if name == "fused" or (case in CASES and tpu.can_run(CASES[case], name, way != "forward"))
    ]
    steps = [dict(case="qwen3-next-80b", implementation="fused", way=mixture) for mixture in STEPS]
    return layers + steps + [dict(case=case, implementation="fused", way="decodes") for case in DECODES]


def seconds(case: str, implementation: str, way: str, T: int, chip: str) -> float:
    """Compile a program with these labels for a chip, and return the processor time; in a fresh process only."""
    compiler.setup()
    start = time.process_time()
    if way in STEPS:
        step.compile_step(CASES[case], step.MIXTURES[way], chip)
    elif way == "decodes":
        decode_mixer.compile_mixer(decode_mixer.MIXERS[case], step.MIXTURES["decode-64-bfloat16"], chip)
    else:
        with tpu.building((CASES | MIXERS)[case], implementation, T, way != "forward") as build:
            fn, specs = build()
            compiler.compile_for(fn, *specs, chip=chip, auto_layout=True)
    return time.process_time() - start


def measure(label: dict[str, str], T: int, chip: str, timeout: float) -> dict:
    """Run `seconds` in a process of its own; a row with `failed` set where nothing was compiled."""
    arguments = f"**{label!r}, T={T}, chip={chip!r}"
    code = f"from benchmarks.compile_times import seconds; {{'compile_cpu_s': seconds({arguments})}}"
    return tpu.first_result([code], timeout)
