"""tokamax's own tests of Kimi delta attention, out of its wheel, with ours in place: `nox -s host-tokamax`."""

from tests_e2e.hosts.suite import check_suite

NAMES = ("base", "xla_chunked", "pallas_mosaic_tpu", "pallas_mosaic_tpu_kernel")
FILES = tuple(f"tokamax/_src/ops/kda/{name}_test.py" for name in NAMES)
WHAT = "its tests of Kimi delta attention, forward and backward, packed and over devices, beside its recurrence"


def test_its_tests(record):
    check_suite("tokamax", "tokamax_in_place", FILES, WHAT, record, devices=4)
