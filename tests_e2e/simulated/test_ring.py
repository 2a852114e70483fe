"""The kernel of decodes over a ring, whose copies it makes itself."""

import pytest

from tests.ring_suite import CASES, assert_steps

THOROUGH = dict(test_steps=True)


@pytest.mark.parametrize("case", CASES)
def test_steps(case):
    assert_steps(case)
