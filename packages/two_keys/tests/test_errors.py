"""Every error, by its text; the arguments are shapes only, so nothing can have been computed."""

import re

import pytest

from chunkwise.shared.testing.inputs import spec
from tests.either_two_keys import KINDS

GOOD = dict(q=spec(2, 64, 2, 8), k=spec(2, 64, 2, 8), v=spec(2, 64, 4, 6))
GDN2 = GOOD | dict(g=spec(2, 64, 4, 8), b=spec(2, 64, 4, 8), w=spec(2, 64, 4, 6))
COMBA = GOOD | dict(p=spec(2, 64, 2, 8), g=spec(2, 64, 4), beta=spec(2, 64, 4))
WRONG = [
    ("gdn2", dict(b=spec(2, 64, 2, 8)), "`b` must have shape [B, T, HV, K] = (2, 64, 4, 8); got (2, 64, 2, 8)."),
    ("gdn2", dict(w=spec(2, 64, 4, 8)), "`w` must have shape [B, T, HV, V] = (2, 64, 4, 6); got (2, 64, 4, 8)."),
    ("gdn2", dict(g=spec(2, 64, 4)), "`g` must have shape [B, T, HV, K]; got (2, 64, 4)."),
    (
        "gdn2",
        dict(allow_neg_eigval=True),
        "`allow_neg_eigval` must be False without `use_erase_sigmoid_in_kernel`; got True.",
    ),
    (
        "gdn2",
        dict(use_write_sigmoid_in_kernel=1),
        "`use_write_sigmoid_in_kernel` must be True or False, known when the program is built; got 1.",
    ),
    ("comba", dict(p=spec(2, 64, 4, 8)), "`p` must have shape [B, T, H, K] = (2, 64, 2, 8); got (2, 64, 4, 8)."),
    ("comba", dict(g=spec(2, 64, 4, 8)), "`g` must have shape [B, T, HV]; got (2, 64, 4, 8)."),
    (
        "comba",
        dict(allow_neg_eigval=True),
        "`allow_neg_eigval` must be False without `use_beta_sigmoid_in_kernel`; got True.",
    ),
]


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize(("kind", "wrong", "message"), WRONG)
def test_value_error(kind, wrong, message, form):
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(KINDS[kind], form)(**(GDN2 if kind == "gdn2" else COMBA) | wrong)
