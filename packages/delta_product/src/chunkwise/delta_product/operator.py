"""Gated DeltaProduct as the gated delta rule over n tokens for each of its own.

The first of n tokens has the gate, and the last one has the query.
"""

import dataclasses
import functools
from typing import Any

import jax

from chunkwise.fused_gdn import config
from chunkwise.fused_gdn import operator as gdn
from chunkwise.shared import composition
from chunkwise.shared.call import checks, configs, signature
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.kernels import interleaved

# It has the implementations of the gated delta rule. Its tensors are checked before they become those of n tokens.
OPERATOR = dataclasses.replace(gdn.OPERATOR, name="gated_delta_product", check=lambda x, options: None)


def _run(form: str, named: dict[str, Any]) -> tuple[jax.Array, Any]:
    x, options, implementation = signature.to_records(named)
    x, n = x.with_int32(), named["num_householder"]
    by_token = check(x, options, n)
    checked, options = composition.check_counts(by_token, options, form)
    x, options = composition.decays(checked._replace(k=x.k, v=x.v), options)
    g = None if x.g is None else interleaved.place(x.g, n, 0)
    g, beta = interleaved.whole((g, x.beta))
    x = x._replace(q=interleaved.place(x.q, n, n - 1), g=g, beta=beta)
    return composition.over_tokens(OPERATOR, form, x, options, implementation, n)


# Functions of the arguments of a call by name.
chunk = functools.partial(_run, "chunk")
recurrent = functools.partial(_run, "recurrent")
ragged = functools.partial(_run, "ragged")


def check(x: Arguments, options: Options, n: int) -> Arguments:
    """Check the tensors; return them with the shapes of keys and values of one step."""
    checks.check_size("num_householder", n)
    configs.check_config(options.config, config)
    B, T, H, K = checks.check_array("q", x.q, "B T H K")
    checks.check_array("k", x.k, "B T*n H K", (B, T * n, H, K))
    HV, V = checks.check_array("v", x.v, "B T*n HV V", (B, T * n, None, None))[2:]
    checks.check_heads(H, HV)
    checks.check_array("beta", x.beta, "B T*n HV", (B, T * n, HV))
    checks.check_packed(x.cu_seqlens, B)
    if x.g is not None:
        checks.check_array("g", x.g, "B T HV", (B, T, HV))
    values: Any = jax.ShapeDtypeStruct((B, T, HV, V), x.v.dtype)
    return x._replace(k=x.q, v=values)
