"""The delta rule with diagonal plus low-rank transitions, as the delta rule with two keys over two tokens for each.

Token by token it is one token, whose erase key a reads the state before the decay, and whose `echo` is b.
"""

import functools
from typing import Any

import jax

from chunkwise.kda.operator import check_options
from chunkwise.shared import composition
from chunkwise.shared.call import arguments, checks, signature
from chunkwise.shared.serving import state_pool
from chunkwise.two_keys.operator import define_rule

# Its step sizes are -1 and 1, whose gradients nobody requests; its tensors are checked before they become two tokens.
OPERATOR = define_rule(
    "dplr_delta_rule", lambda x, options: check_options(options), optional=("beta",), erase_before_decay=True
)
# The tensors of a call, and what RWKV-7 calls them.
TENSORS = {"q": "r", "k": "k", "v": "v", "a": "a", "b": "b", "gk": "w"}


def _run(form: str, named: dict[str, Any]) -> tuple[jax.Array, Any]:
    names = {name: name if "gk" in named else theirs for name, theirs in TENSORS.items()}
    q, k, v, a, b, gk = tensors = [named[name] for name in names.values()]
    others = {name: y for name, y in named.items() if name not in names.values()}
    x, options, implementation = signature.to_records(others | dict(q=q, k=k, v=v, g=gk))
    check(names, tensors, x.cu_seqlens)
    check_options(options)
    x = x._replace(p=a, echo=b)
    if form == "recurrent" or (form == "ragged" and not state_pool.as_pool(x.initial_state).replay):
        return getattr(OPERATOR, form)(x, options, implementation)
    x, options = composition.check_counts(x.with_int32(), options, form)
    return composition.over_tokens(OPERATOR, form, arguments.as_two_tokens(x), options, implementation, 2)


# Functions of the arguments of a call by name.
chunk = functools.partial(_run, "chunk")
recurrent = functools.partial(_run, "recurrent")
ragged = functools.partial(_run, "ragged")


def check(names: dict[str, str], tensors: list[Any], cu_seqlens: object) -> None:
    """Check the tensors, in the order of `TENSORS`, by the names that the user knows."""
    x = dict(zip(TENSORS, tensors, strict=True))
    B, T, H, K = checks.check_array(names["q"], x["q"], "B T H K")
    for name in ("k", "a", "b"):
        checks.check_array(names[name], x[name], "B T H K", (B, T, H, K))
    HV, _ = checks.check_value_heads(x["v"], (B, T, H, K))
    checks.check_array(names["gk"], x["gk"], "B T HV K", (B, T, HV, K))
    checks.check_packed(cu_seqlens, B)
