"""What tests and benchmarks use: float64 oracles, seeded inputs, comparisons, and the TPU compiler (`testing.tpu`)."""

from chunkwise.shared.testing.cases import CASES, ISOLATION_CASES, Case
from chunkwise.shared.testing.compare import (
    GATE_GRADIENT_TOLERANCE,
    GRADIENT_TOLERANCE,
    STAGE_TOLERANCE,
    TOLERANCE,
    assert_close,
    assert_gradients,
    error,
    numeric_gradients,
    with_gradients,
)
from chunkwise.shared.testing.documents import documented_flops
from chunkwise.shared.testing.flops import product_flops
from chunkwise.shared.testing.inputs import GATES, boundaries, make_gate, make_inputs, spec, spoil_padding
from chunkwise.shared.testing.laws import law_reference, raw_inputs
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.testing.poison import assert_isolated
from chunkwise.shared.testing.segmented import (
    SEGMENT_IDS,
    assert_random_segments,
    assert_segments,
    compile_segments,
    over_segments,
    segment_launches,
)
from chunkwise.shared.testing.split import assert_split
from chunkwise.shared.testing.transforms import KEEPING, TRANSFORMS, assert_traced_once, assert_transform, text_for_tpu

__all__ = [
    "CASES",
    "Case",
    "GATES",
    "GATE_GRADIENT_TOLERANCE",
    "GRADIENT_TOLERANCE",
    "ISOLATION_CASES",
    "KEEPING",
    "SEGMENT_IDS",
    "STAGE_TOLERANCE",
    "TOLERANCE",
    "TRANSFORMS",
    "assert_close",
    "assert_gradients",
    "assert_isolated",
    "assert_random_segments",
    "assert_segments",
    "assert_split",
    "assert_traced_once",
    "assert_transform",
    "boundaries",
    "compile_segments",
    "documented_flops",
    "error",
    "law_reference",
    "make_gate",
    "make_inputs",
    "numeric_gradients",
    "over_segments",
    "product_flops",
    "raw_inputs",
    "reference",
    "segment_launches",
    "spec",
    "spoil_padding",
    "text_for_tpu",
    "with_gradients",
]
