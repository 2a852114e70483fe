"""The choice of thorough tests, which take long and repeat quicker tests for more sizes, types or chips."""

import inspect
from collections.abc import Mapping
from typing import Any


def is_thorough(owner: Any, test: str, parameters: Mapping[str, Any]) -> bool:
    """Return whether one case of a test is thorough by the table `THOROUGH` of its file.

    Under the name of a test the table has True, or a function of some parameters of the test. Tests without an entry
    are quick. A class inherits the entries of its bases.

    Args:
      owner: the module or class of the test; the table is its attribute.
      test: name of the test.
      parameters: parameters of the case, by name.

    Raises:
      ValueError: the table names a test that its owner lacks, or a parameter that the test lacks.
    """
    rule = False
    for base in inspect.getmro(owner)[::-1] if inspect.isclass(owner) else (owner,):
        rules = vars(base).get("THOROUGH", {})
        if missing := [name for name in rules if not hasattr(base, name)]:
            raise ValueError(f"`THOROUGH` of {base.__name__} must name its tests; got {missing}.")
        rule = rules.get(test, rule)
    if not callable(rule):
        return rule
    needed = list(inspect.signature(rule).parameters)
    if missing := [name for name in needed if name not in parameters]:
        raise ValueError(f"`THOROUGH` of {owner.__name__} must ask for parameters of {test}; got {missing}.")
    return bool(rule(*(parameters[name] for name in needed)))
