"""deltanet-tpu's own tests, out of its source archive, with ours in place: `nox -s host-deltanet-tpu`."""

from tests_e2e.hosts.suite import check_suite

# The files whose tests call its operators; the others test its checks and the parts of its kernels.
NAMES = (
    "arbitrary_lengths", "causality", "doc_reset_and_streaming", "document_boundaries", "inference", "matrix",
    "nan_adversarial", "parity", "precision_flags", "recompute_states", "state_passing", "streaming_and_stability",
    "strong_decay", "variants",
)  # fmt: skip
FILES = tuple(f"test_{name}.py" for name in NAMES)
WHAT = "its tests of chunked operators and decodes, of its source archive; its code checks the arguments"


def test_its_tests(record):
    check_suite("deltanet-tpu", "deltanet_in_place", FILES, WHAT, record)
