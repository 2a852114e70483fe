"""What docstrings promise, read by tests."""

import pytest

from tests.documents import documented_flops, evaluate


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("2 B T HV (C K + 3 K V)", 2 * 3 * 5 * 4 * (16 * 8 + 3 * 8 * 7)),
        ("2.5 K log2(C)", 2.5 * 8 * 4),
        ("(B + 1) (T - 2)", 4 * 3),
        ("K**2 // 3 / 2", 10.5),
    ],
)
def test_evaluate(formula, value):
    assert evaluate(formula, B=3, T=5, HV=4, C=16, K=8, V=7) == value


def test_formulas_hold_nothing_else():
    with pytest.raises(ValueError, match="`formula` must hold numbers, sizes, log2 and operators; got 'x'"):
        evaluate("2 x B", B=1)


def test_documented_flops():
    def operator():
        """Do it.

        Accuracy: 1e-6.
        Cost: about 1.5 B T
          (K + V) flops, and bytes. More flops elsewhere.
        """

    assert documented_flops(operator, B=2, T=3, K=4, V=5) == 81
    with pytest.raises(ValueError, match="The docstring of <lambda> must say"):
        documented_flops(lambda: None)
