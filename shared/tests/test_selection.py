"""The choice of thorough cases: by tables of modules and classes, which must not go stale."""

import re
import types

import pytest

from tests.selection import is_thorough


def module(**rules):
    tests = dict.fromkeys(("test_always", "test_sometimes", "test_never"))
    return types.SimpleNamespace(__name__="tests", THOROUGH=rules, **tests)


class Base:
    THOROUGH = dict(test_kept=True, test_replaced=True)  # noqa: RUF012
    test_kept = test_replaced = None


class Derived(Base):
    THOROUGH = dict(test_replaced=False)  # noqa: RUF012


@pytest.mark.parametrize(
    ("test", "parameters", "thorough"),
    [
        ("test_always", {}, True),
        ("test_sometimes", dict(size=1, other=None), False),
        ("test_sometimes", dict(size=2, other=None), True),
        ("test_never", dict(size=2), False),
    ],
)
def test_rules_of_a_module(test, parameters, thorough):
    rules = dict(test_always=True, test_sometimes=lambda size: size > 1)
    assert is_thorough(module(**rules), test, parameters) is thorough


def test_a_class_inherits_rules_and_may_replace_them():
    assert [is_thorough(Derived, test, {}) for test in ("test_kept", "test_replaced")] == [True, False]


def test_a_module_without_a_table_is_quick():
    assert not is_thorough(types.SimpleNamespace(__name__="tests"), "test_any", {})


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (dict(test_gone=True), "`THOROUGH` of tests must name its tests; got ['test_gone']."),
        (dict(test_always=lambda size, gone: True),
         "`THOROUGH` of tests must ask for parameters of test_always; got ['gone']."),
    ],
)  # fmt: skip
def test_a_stale_rule(rules, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        is_thorough(module(**rules), "test_always", dict(size=1))
