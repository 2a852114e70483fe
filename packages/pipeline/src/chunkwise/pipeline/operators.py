"""The one table of the operators. A new operator is a package, and a line here."""

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
from chunkwise.fused_gdn import chunk_gated_delta_rule, recurrent_gated_delta_rule
from chunkwise.fused_gdn.config import cost as gdn_cost
from chunkwise.fused_gla import chunk_gla, chunk_simple_gla, recurrent_gla, recurrent_simple_gla
from chunkwise.fused_gla.config import cost as gla_cost
from chunkwise.kda import chunk_kda, recurrent_kda
from chunkwise.kda.config import cost as kda_cost
from chunkwise.mamba2 import chunk_mamba2, recurrent_mamba2
from chunkwise.mlstm import MlstmState, chunk_mlstm, recurrent_mlstm
from chunkwise.shared.testing import compare, definitions, inputs, oracle
from chunkwise.two_keys import chunk_comba, chunk_gdn2, recurrent_comba, recurrent_gdn2
from chunkwise.two_keys import cost as two_keys_cost


class Source(NamedTuple):
    """Where the inputs and the exact results of an operator come from, the same for operators that share them.

    Attributes:
      inputs: from B, T, H, HV, K, V to seeded inputs by name.
      reference: from inputs by name to o, the final states, and with cotangents the gradients, in float64.
      static: static arguments that the inputs go with.
      gradients: the least tolerance of gradients by type, for an operator that amplifies their rounding.
      smooth: from the inputs and the options of the reference to the outputs that have a derivative, a bool array; None
        where all have one.
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
      composition: its source, if it runs another operator over other tokens; None otherwise.
    """

    function: Callable
    delta: bool
    gates: str
    implementations: tuple[str, ...]
    cost: Callable[..., pl.CostEstimate] | None = None
    erase: str | None = None
    composition: Source | None = None

    @property
    def source(self) -> Source:
        """Its inputs and its exact results."""
        return self.composition or _recurrence(self.delta, self.gates, self.erase)

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


def _of_tokens(cost: Callable[..., pl.CostEstimate], n: int) -> Callable[..., pl.CostEstimate]:
    """Return the cost of an operator that runs an operator of this cost over n tokens for each."""
    return lambda *, T, **sizes: cost(T=T * n, **sizes)


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

_PRODUCT = Source(
    inputs.make_product_inputs,
    functools.partial(definitions.reference, definitions.GATED_DELTA_PRODUCT),
    (("num_householder", 2),),
)
_DPLR = Source(inputs.make_dplr_inputs, functools.partial(definitions.reference, definitions.DPLR_DELTA_RULE))
_MAMBA2 = Source(
    inputs.make_mamba2_inputs,
    functools.partial(definitions.reference, definitions.MAMBA2),
    (("dt_softplus", True),),
    values="x",
)
_MLSTM = Source(
    _mlstm_inputs,
    functools.partial(definitions.reference, definitions.MLSTM),
    gradients=tuple(compare.AMPLIFIED.items()),
    smooth=definitions.has_mlstm_gradient,
)

COMPOSED = {
    operator.name: operator
    for operator in (
        Entry(recurrent_gated_delta_product, True, "head", _RECURRENT, composition=_PRODUCT),
        Entry(recurrent_dplr_delta_rule, True, "channel", _RECURRENT, composition=_DPLR),
        Entry(recurrent_mamba2, False, "head", _RECURRENT, composition=_MAMBA2),
        Entry(recurrent_mlstm, False, "head", _RECURRENT, composition=_MLSTM),
        Entry(chunk_gated_delta_product, True, "head", _CHUNK, _of_tokens(gdn_cost, 2), composition=_PRODUCT),
        Entry(chunk_dplr_delta_rule, True, "channel", _CHUNK, _of_tokens(kda_cost, 2), composition=_DPLR),
        Entry(chunk_mamba2, False, "head", _RECURRENT, gla_cost, composition=_MAMBA2),
        Entry(chunk_mlstm, False, "head", _RECURRENT, gla_cost, composition=_MLSTM),
    )
}
"""The operators that run one of `OPERATORS` over other tokens or values, for `chunkwise check` and the benchmarks."""

CHUNKED = tuple(operator for operator in OPERATORS.values() if operator.chunked)
RECURRENT = tuple(operator for operator in OPERATORS.values() if not operator.chunked)
