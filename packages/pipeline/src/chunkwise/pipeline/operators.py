"""The one table of the operators. A new operator is a package or a recipe, and a line here."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from chunkwise.delta_product import chunk_gated_delta_product, recurrent_gated_delta_product
from chunkwise.dplr import chunk_dplr_delta_rule, recurrent_dplr_delta_rule
from chunkwise.fused_gdn import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    recurrent_delta_rule,
    recurrent_gated_delta_rule,
)
from chunkwise.fused_gdn.config import cost as gdn_cost
from chunkwise.fused_gla import chunk_gla, chunk_simple_gla, recurrent_gla, recurrent_simple_gla
from chunkwise.fused_gla.config import cost as gla_cost
from chunkwise.kda import chunk_kda, recurrent_kda
from chunkwise.kda.config import cost as kda_cost
from chunkwise.mamba2 import chunk_mamba2, recurrent_mamba2
from chunkwise.mlstm import MlstmState, chunk_mlstm, recurrent_mlstm
from chunkwise.recipes import hgrn2, mamba3, preconditioned, rwkv6
from chunkwise.shared.testing import compare, definitions, inputs, oracle
from chunkwise.shared.testing.definitions import Composition
from chunkwise.two_keys import chunk_comba, chunk_gdn2, recurrent_comba, recurrent_gdn2
from chunkwise.two_keys import cost as two_keys_cost


class Source(NamedTuple):
    """Where the inputs and the exact results of an operator come from, the same for operators that share them.

    Attributes:
      inputs: from B, T, H, HV, K, V to seeded inputs by name.
      reference: from inputs by name to o, the final states, and with cotangents the gradients, in float64.
      static, gradients, smooth: as in `Composition`.
      values: the name of the input that is as large as the output.
    """

    inputs: Callable[..., dict[str, Any]]
    reference: Callable[..., tuple]
    static: tuple[tuple[str, Any], ...] = ()
    gradients: tuple[tuple[str, float], ...] = ()
    smooth: Callable[..., np.ndarray] | None = None
    values: str = "v"

    def tolerance(self, name: str, dtype: str) -> float:
        """Return the tolerance of a result or, named with a leading d, a gradient."""
        return max(compare.tolerance(name, dtype), dict(self.gradients).get(dtype, 0.0) * name.startswith("d"))


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
      composition: its record, if it runs another operator; None otherwise.
    """

    function: Callable
    delta: bool
    gates: str
    implementations: tuple[str, ...]
    cost: Callable[..., pl.CostEstimate] | None = None
    erase: str | None = None
    composition: Composition | None = None

    @property
    def source(self) -> Source:
        """Its inputs and its exact results."""
        return (
            _recurrence(self.delta, self.gates, self.erase) if self.composition is None else _source(self.composition)
        )

    @property
    def static(self) -> Mapping[str, Any]:
        """The static arguments that its inputs go with."""
        return dict(self.source.static)

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


@functools.cache
def _recurrence(delta: bool, gates: str, erase: str | None) -> Source:
    """Return the source of an operator that is a recurrence of its own, one object for all with these attributes.

    The inputs are those of `make_inputs` without arrays that it does not take. An operator with constant gates gets
    constant gates beside the gates of the tokens.
    """

    def make(*sizes: int, **options) -> dict[str, jax.Array]:
        x = inputs.make_inputs(*sizes, per_channel=gates == "channel", erase=erase, **options)
        if not delta:
            del x["beta"]
        if gates == "constant":
            x["g_gamma"] = -jnp.geomspace(0.01, 1.0, x["v"].shape[2], dtype=jnp.float32)
        return x

    def define(x: dict[str, jax.Array], **options) -> tuple:
        return oracle.reference(**x, **options)

    return Source(make, define)


@functools.cache
def _source(x: Composition) -> Source:
    """Return the source of an operator that runs another one, one object for both of its forms."""
    return Source(x.inputs, x.reference, x.static, x.gradients, x.smooth, x.definition.values)


def _mlstm_inputs(*sizes: int, **options) -> dict[str, Any]:
    x = inputs.make_mlstm_inputs(*sizes, **options)
    return x | ({"initial_state": MlstmState(*x["initial_state"])} if "initial_state" in x else {})


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

# The best implementation of some is not a chain of stages.
_FUSED = ("xla", "fused")
COMPOSITIONS = (
    Composition(
        chunk_delta_rule, recurrent_delta_rule, "gated_delta_rule", definitions.DELTA_RULE, inputs.make_delta_inputs
    ),
    Composition(
        chunk_gated_delta_product, recurrent_gated_delta_product, "gated_delta_rule", definitions.GATED_DELTA_PRODUCT,
        inputs.make_product_inputs, tokens=2, static=(("num_householder", 2),),
    ),
    Composition(
        chunk_dplr_delta_rule, recurrent_dplr_delta_rule, "kda", definitions.DPLR_DELTA_RULE, inputs.make_dplr_inputs,
        tokens=2,
    ),
    Composition(
        chunk_mamba2, recurrent_mamba2, "simple_gla", definitions.MAMBA2, inputs.make_mamba2_inputs,
        static=(("dt_softplus", True),), implementations=_FUSED, values=(("dt", (0, np.inf)), ("A", (-np.inf, 0))),
    ),
    Composition(
        chunk_mlstm, recurrent_mlstm, "simple_gla", definitions.MLSTM, _mlstm_inputs, implementations=_FUSED,
        gradients=tuple(compare.AMPLIFIED.items()), smooth=definitions.has_mlstm_gradient,
    ),
    hgrn2.RECIPE,
    rwkv6.RECIPE,
    mamba3.RECIPE,
    preconditioned.BY_HEAD,
    preconditioned.BY_CHANNEL,
)  # fmt: skip
"""The operators that run one of `OPERATORS` over other tokens or values; a new one is a line here."""


def _entries(x: Composition) -> tuple[Entry, Entry]:
    """Return the recurrent and the chunked operator of a composition, with what they have of the one that runs."""
    base = OPERATORS[f"chunk_{x.runs}"]
    cost = base.cost
    assert cost is not None
    of_tokens = lambda *, T, **sizes: cost(T=T * x.tokens, **sizes)
    kind = base.delta, base.gates
    recurrent = Entry(x.recurrent, *kind, _RECURRENT, composition=x)
    return recurrent, Entry(x.chunk, *kind, x.implementations, of_tokens, composition=x)


COMPOSED = {entry.name: entry for x in COMPOSITIONS for entry in _entries(x)}
"""Their functions by name, for `chunkwise check`, the benchmarks and the pages."""

CHUNKED = tuple(operator for operator in OPERATORS.values() if operator.chunked)
RECURRENT = tuple(operator for operator in OPERATORS.values() if not operator.chunked)
