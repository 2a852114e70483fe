"""The kernel of decodes over a ring, interpreted."""

import pytest

from tests.ring_suite import CASES, assert_steps

# A simulated TPU takes the same steps of KDA.
THOROUGH = dict(test_steps=True)


@pytest.mark.parametrize("case", CASES)
def test_steps(case):
    assert_steps(case)
