"""flash-linear-attention's own tests of its operators, with ours in place: `nox -s host-flash-linear-attention`.

No archive of a release has them, so that FLA_TESTS in the environment names the folder `tests` of its repository.
"""

from tests_e2e.hosts.suite import check_suite, folder_of

NAMES = (
    "gdn", "kda", "gdn2", "comba", "delta", "gla", "simple_gla", "retention", "lightning_attn", "linear_attn",
)  # fmt: skip
WHAT = "the tests of its operators in its repository, forward and backward, packed and token by token"


def test_its_tests(record):
    folder = folder_of("FLA_TESTS", "the folder `tests` of flash-linear-attention's repository")
    files = tuple(f"{folder}/ops/test_{name}.py" for name in NAMES)
    check_suite("fla-core", "fla_in_place", files, WHAT, record)
