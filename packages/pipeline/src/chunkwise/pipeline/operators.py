"""The one table of the operators. A new operator is a package, and a line here."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.fused_gdn import chunk_gated_delta_rule, recurrent_gated_delta_rule
from chunkwise.fused_gdn.cost import cost as gdn_cost
from chunkwise.fused_gla import chunk_gla, chunk_simple_gla, recurrent_gla, recurrent_simple_gla
from chunkwise.fused_gla.cost import cost as gla_cost
from chunkwise.kda import chunk_kda, recurrent_kda
from chunkwise.kda.cost import cost as kda_cost
from chunkwise.shared.testing import inputs
from chunkwise.two_keys import chunk_comba, chunk_gdn2, recurrent_comba, recurrent_gdn2
from chunkwise.two_keys import cost as two_keys_cost


@dataclass(frozen=True)
class Entry:
    """An operator, for code that treats all operators alike: checks, benchmarks, tests.

    Attributes:
      function: the function for users.
      delta: whether it is a delta rule, which takes beta unless it has erase gates.
      gates: "head" for g [B, T, HV]; "channel" for g [B, T, HV, K]; "constant" for a gate per head and g_gamma [HV].
      implementations: its implementations; the last one is chosen on a TPU for sizes that fit.
      cost: its package's `cost`, a function of the sizes; None for the recurrent forms.
      erase: "gate" for a delta rule with erase and write gates b and w, "key" for a delta rule with erase keys p, and
        None otherwise.
    """

    function: Callable
    delta: bool
    gates: str
    implementations: tuple[str, ...]
    cost: Callable[..., pl.CostEstimate] | None = None
    erase: str | None = None

    @property
    def name(self) -> str:
        """The name of the function in `chunkwise.pipeline`."""
        return self.function.__name__

    @property
    def chunked(self) -> bool:
        """Whether it goes chunk by chunk, and not token by token."""
        return self.name.startswith("chunk_")

    @property
    def per_channel(self) -> bool:
        """Whether it has a gate for every channel of the key."""
        return self.gates == "channel"


_RECURRENT = ("xla", "fused")
_CHUNK = ("xla", "staged", "fused")

OPERATORS = {
    operator.name: operator
    for operator in (
        Entry(recurrent_simple_gla, False, "constant", _RECURRENT),
        Entry(recurrent_gla, False, "channel", _RECURRENT),
        Entry(recurrent_gated_delta_rule, True, "head", _RECURRENT),
        Entry(recurrent_kda, True, "channel", _RECURRENT),
        Entry(recurrent_gdn2, True, "channel", _RECURRENT, erase="gate"),
        Entry(recurrent_comba, True, "head", _RECURRENT, erase="key"),
        Entry(chunk_simple_gla, False, "constant", _CHUNK, gla_cost),
        Entry(chunk_gla, False, "channel", _CHUNK, functools.partial(gla_cost, per_channel=True)),
        Entry(chunk_gated_delta_rule, True, "head", _CHUNK, gdn_cost),
        Entry(chunk_kda, True, "channel", _CHUNK, kda_cost),
        Entry(chunk_gdn2, True, "channel", _CHUNK, two_keys_cost.cost, "gate"),
        Entry(chunk_comba, True, "head", _CHUNK, two_keys_cost.comba_cost, "key"),
    )
}

CHUNKED = tuple(operator for operator in OPERATORS.values() if operator.chunked)
RECURRENT = tuple(operator for operator in OPERATORS.values() if not operator.chunked)


def operator_inputs(operator: Entry, *sizes: int, **options) -> dict[str, jax.Array]:
    """Return seeded inputs of an operator by name: the result of `make_inputs` without arrays that it does not take.

    An operator with constant gates gets constant gates beside the gates of the tokens.
    """
    return inputs_of(operator.delta, operator.gates, operator.erase, *sizes, **options)


def inputs_of(delta: bool, gates: str, erase: str | None, *sizes: int, **options) -> dict[str, jax.Array]:
    """Return the inputs that all operators with these attributes take."""
    x = inputs.make_inputs(*sizes, per_channel=gates == "channel", erase=erase, **options)
    if not delta:
        del x["beta"]
    if gates == "constant":
        x["g_gamma"] = -jnp.geomspace(0.01, 1.0, x["v"].shape[2], dtype=jnp.float32)
    return x
