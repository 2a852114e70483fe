"""jax-linear-attention's own tests, out of its source archive, ours in place: `nox -s host-jax-linear-attention`."""

from tests_e2e.hosts.suite import check_suite

# Those of its operators and layers that come to its chunked operators.
NAMES = ("chunked_ops", "gdn2_mamba3_ops", "layers_linear_attention")
FILES = tuple(f"test_{name}.py" for name in NAMES)
WHAT = "its tests that come to its chunked operators, of operators and layers, of its source archive"


def test_its_tests(record):
    check_suite("jax-linear-attention", "jla_in_place", FILES, WHAT, record)
