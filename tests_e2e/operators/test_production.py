"""The cases of docs/evidence.md: inputs on which other people's implementations broke.

The command `python -m benchmarks production` runs them under every implementation and type; here is the fastest way.
"""

import numpy as np
import pytest

from benchmarks.production import REPORTS, Report

# The operators that the cases call, in both types.
THOROUGH = dict(test_case=lambda dtype: dtype == "bfloat16")
# A key that is repeated 256 times with a step size of 2 keeps every rounding.
LIMITS = {"float32": 2e-5, "bfloat16": 5e-3}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", REPORTS)
def test_case(name, dtype):
    assert REPORTS[name].error("xla", dtype) < LIMITS[dtype]


def test_the_largest_error_of_a_case_counts():
    ones = np.ones(2)
    report = Report("", "", "", 0, lambda *_: iter([(1.1 * ones, ones), (ones, ones)]))
    assert report.error("xla", "float32") == pytest.approx(0.1)
