"""The cases of the benchmarks, by name: the layers of real models, and further batches."""

from chunkwise.command.models import MODELS, Layer

CASES = MODELS | {
    "qwen3-next-80b-unit": Layer("gated_delta_rule", H=16, HV=32, normalise=True),
    "qwen3-next-80b-ragged": Layer("gated_delta_rule", H=16, HV=32, sequences=16, ragged=True),
    "gdn-16": Layer("gated_delta_rule", H=16, HV=16, T=2048),
    **{
        f"{name}-segments": Layer(operator, H=H, HV=HV, sequences=16, ragged=True, segments=True)
        for name, operator, H, HV in (
            ("qwen3-next-80b", "gated_delta_rule", 16, 32),
            ("kimi-linear-48b", "kda", 32, 32),
            ("minimax-text-01", "simple_gla", 64, 64),
            ("gla", "gla", 16, 16),
        )
    },
    "packed-16x16384": Layer("gated_delta_rule", H=16, HV=16, T=16 * 16384, sequences=16),
}
