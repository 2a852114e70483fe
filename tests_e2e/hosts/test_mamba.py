"""The listing of Mamba-2's paper and its authors' tests, with ours in place: `nox -s host-mamba`.

No archive can be read without their kernels, so that MAMBA_SOURCE in the environment names the folder of their
repository.
"""

import re
from pathlib import Path

from tests_e2e.hosts.suite import check_suite, folder_of

NAMES = ("layernorm_gated", "selective_state_update")
WHAT = "the listing of its paper, values and gradients, and the authors' tests of decodes and of the gated norm"


def test_its_tests(record):
    folder = folder_of("MAMBA_SOURCE", "the folder of the repository of Mamba")
    files = tuple(f"{folder}/tests/ops/triton/test_{name}.py" for name in NAMES)
    version = re.search(r'__version__ = "(.*)"', Path(folder, "mamba_ssm/__init__.py").read_text()).group(1)
    files = (str(Path(__file__).with_name("mamba_listing.py")), *files)
    check_suite("mamba", "mamba_in_place", files, WHAT, record, version=version)
