"""The sizes of layers, with the names that operators have for them."""

import dataclasses
import inspect
import math
import re
from typing import Any, ClassVar, TypeGuard

import jax.numpy as jnp
import numpy as np

from chunkwise.pipeline import MlstmState
from chunkwise.shared.call import checks

# The activations that gates of norms have.
_GATES = ("silu", "sigmoid")
# Where the norm of Mamba-2 is: after the gate, before it, or nowhere.
_NORMS = ("after", "before", None)
# The default of a size that must be given.
_LEFT_OUT: Any = None
_MOST = float(np.finfo(np.float32).max)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number, and finite in float32, in which layers compute."""
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return bool(real and abs(value) <= _MOST)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The sizes that all layers have.

    Attributes:
      D: channels of the hidden states.
      H: heads of queries and keys.
      HV: heads of values, a multiple of H: HV / H value heads share a key head.
      K: channels of a head of queries and keys.
      V: channels of a head of values. A state is [K, V].
      W: width of the short convolution: how many tokens it reads, from 2 to 8.
      eps: the number that the norm adds to the mean square.
    """

    # Whether gates are per channel of the key; whether pools have rings; whether there are convolutions, and which type
    # their inputs have in a cache, None for the user's.
    per_channel: ClassVar[bool] = False
    rings: ClassVar[bool] = True
    convolves: ClassVar[bool] = True
    conv_dtype: ClassVar[Any] = None

    D: int
    H: int
    HV: int
    K: int
    V: int
    W: int = 4
    eps: float = 1e-6

    def __init_subclass__(cls):
        """Describe the sizes of all layers in the docstring of each class, unless it describes a size itself."""
        described = lambda doc: re.split(r"^(?=  \w+:)", inspect.cleandoc(doc or ""), flags=re.MULTILINE)
        first, *more = described(cls.__doc__)
        entries = [*described(LayerConfig.__doc__)[1:], *more]
        cls.__doc__ = first + "\n".join({x.split(":")[0]: x.rstrip() for x in entries}.values())

    def __post_init__(self):
        for name in ("D", "H", "HV", "K", "V", "W"):
            checks.check_size(name, getattr(self, name))
        checks.check(self.HV % self.H == 0, f"`HV` must be a multiple of `H`; got {self.HV} and {self.H}.")
        checks.check(2 <= self.W <= 8, f"`W` must be from 2 to 8; got {self.W}.")
        checks.check(is_number(self.eps) and self.eps >= 0, f"`eps` must be at least 0; got {self.eps!r}.")
        checks.check_flags(**{x.name: getattr(self, x.name) for x in dataclasses.fields(self) if x.type is bool})

    @classmethod
    def check(cls, config) -> None:
        """Check that the argument `config` of a function is of this class, and not of another layer."""
        checks.check(isinstance(config, cls), f"`config` must be a {cls.__name__}; got {type(config).__name__}.")

    @property
    def heads(self) -> tuple[int, int, int]:
        """Heads of queries, of keys and of values."""
        return self.H, self.H, self.HV

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the short convolutions: of queries, of keys and of values; none without convolutions."""
        return (self.H * self.K, self.H * self.K, self.HV * self.V) if self.convolves else ()

    @property
    def conv_letters(self) -> tuple[str, ...]:
        """How the inputs of the convolutions in a cache are split, in letters of `division.Letters`."""
        return ("b.h", "b.h", "b.n")[: len(self.channels)]

    @property
    def state_letters(self) -> Any:
        """How the state of an operator is split, in letters of `division.Letters`, in the structure of the state."""
        return "bn.."

    def empty_state(self, N: int, dtype) -> Any:
        """Return the state of an operator before the first token of N sequences."""
        return jnp.zeros((N, self.HV, self.K, self.V), dtype)

    def check_state(self, name: str, state: object) -> int:
        """Check the state of an operator, called by this name, and return of how many sequences it is."""
        return checks.check_array(name, state, "N HV K V", (None, self.HV, self.K, self.V))[0]


def _check_rank(name: str, rank: int | None) -> None:
    """Check the rank of a projection, which may be None."""
    fits = rank is None or (checks.is_whole(rank) and rank > 0)
    checks.check(fits, f"`{name}` must be None or above 0; got {rank!r}.")


def _check_lower_bound(bound: float | None) -> None:
    """Check the bound of a decay, which selects its law."""
    below = bound is None or (is_number(bound) and bound < 0)
    checks.check(below, f"`lower_bound` must be None or below 0; got {bound!r}.")


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig(LayerConfig):
    """The sizes of `gated_delta_net`.

    Attributes:
      allow_neg_eigval: whether step sizes go up to 2, as in OLMo-hybrid.
      activation: the activation of the norm's gate, "silu" or "sigmoid", which Qwen4-Exp may have.
      disable_recompute: whether training without `jax.checkpoint` takes more memory and less time, an argument of
        `chunk_gated_delta_rule`.
    """

    allow_neg_eigval: bool = False
    activation: str = "silu"
    disable_recompute: bool = False

    def __post_init__(self):
        super().__post_init__()
        known = self.activation in _GATES
        checks.check(known, f"`activation` must be one of {_GATES}; got {self.activation!r}.")


@dataclasses.dataclass(frozen=True)
class GatedDeltaNet2Config(LayerConfig):
    """The sizes of `gated_delta_net2`.

    Attributes:
      allow_neg_eigval: whether erase gates go up to 2.
      lower_bound: the least log decay of the law with a sigmoid, below 0; None for the law with a softplus.
    """

    per_channel: ClassVar[bool] = True

    eps: float = 1e-5
    allow_neg_eigval: bool = False
    lower_bound: float | None = None

    def __post_init__(self):
        super().__post_init__()
        _check_lower_bound(self.lower_bound)


@dataclasses.dataclass(frozen=True)
class KimiDeltaAttentionConfig(LayerConfig):
    """The sizes of `kimi_delta_attention`.

    Attributes:
      HV: heads of values, a multiple of H; None, the default, for H, as in all published models.
      R: rank of the projections of the decay and of the norm's gate; None for one matrix each.
      full_rank_gate: whether the projection of the norm's gate is one matrix for any R, as in Kimi-K3.
      lower_bound: the least log decay of the law with a sigmoid, below 0; None for the law with a softplus.
      allow_neg_eigval: whether step sizes go up to 2.
      gate_bias: whether the projection of the norm's gate has a bias, as in flash-linear-attention.
    """

    per_channel: ClassVar[bool] = True

    HV: int = _LEFT_OUT
    # Python demands defaults after a default; a size that keeps this default is refused.
    K: int = _LEFT_OUT
    V: int = _LEFT_OUT
    eps: float = 1e-5
    R: int | None = None
    lower_bound: float | None = None
    full_rank_gate: bool = False
    allow_neg_eigval: bool = False
    gate_bias: bool = False

    def __post_init__(self):
        if self.HV is None:
            object.__setattr__(self, "HV", self.H)
        super().__post_init__()
        _check_rank("R", self.R)
        _check_lower_bound(self.lower_bound)


@dataclasses.dataclass(frozen=True)
class Mamba2Config(LayerConfig):
    """The sizes of `mamba2_mixer`, under the names of attention; its paper has others.

    Attributes:
      D: channels of the hidden states, `hidden_size` of transformers.
      H: groups, `n_groups`: the heads of queries and keys, which the paper calls C and B.
      HV: heads, `num_heads`, a multiple of H: HV / H heads share a group.
      K: channels of a query and of a key, `state_size`.
      V: channels of a head, `head_dim`. A state is [K, V].
      W: width of the short convolution, `conv_kernel`: how many tokens it reads, from 2 to 8.
      conv_bias: whether the convolutions have a bias.
      dt_limit: the least and the largest time step, of prefills and of decodes.
      norm: "after" for a norm after the gate, "before" for a norm before it, None for a gate without a norm.
      in_bias, out_bias: whether the projections at the beginning have a bias, and the projection at the end.
      in_multiplier, multipliers: factors, in Falcon-H1: of the hidden states, and of the results of projections in the
        order z, v, k, q, dt.
    """

    eps: float = 1e-5
    conv_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    norm: str | None = "after"
    in_bias: bool = False
    out_bias: bool = False
    in_multiplier: float = 1.0
    multipliers: tuple[float, ...] = (1.0,) * 5

    def __post_init__(self):
        super().__post_init__()
        known = self.norm in _NORMS
        checks.check(known, f"`norm` must be one of {_NORMS}; got {self.norm!r}.")
        factor, all_five = self.in_multiplier, self.multipliers
        five = isinstance(all_five, tuple) and len(all_five) == 5 and all(map(is_number, all_five))
        checks.check(five, f"`multipliers` must be a tuple of 5 numbers; got {all_five!r}.")
        checks.check(is_number(factor), f"`in_multiplier` must be a finite number; got {factor!r}.")
        pair = isinstance(self.dt_limit, tuple) and len(self.dt_limit) == 2
        rises = pair and all(is_number(x) or x == math.inf for x in self.dt_limit)
        rises = rises and 0 <= self.dt_limit[0] < self.dt_limit[1]
        checks.check(rises, f"`dt_limit` must rise from at least 0; got {self.dt_limit!r}.")


@dataclasses.dataclass(frozen=True)
class LightningAttentionConfig(LayerConfig):
    """The sizes of `lightning_attention`.

    Attributes:
      W: 2 with rotary positions, of which a cache keeps the count of tokens; else not read.
      layer: number of this layer, from 0: in MiniMax decays get weaker from layer to layer.
      layers: how many layers the whole model has.
      slope_factor: multiplies the slopes of the heads; None for the factor of MiniMax, from `layer` and `layers`.
      activation: the activation of queries, keys and values, "silu" or None.
      scale: multiplies the queries.
      qk_norm: whether queries and keys of every head are normed.
      frequencies: of rotary positions, radians a token, for n pairs of channels c and c + n; empty for none.
      rotary_scale: multiplies the channels that rotary positions turn.
      groups: how many norms share the heads of the output, each over HV / groups heads; None for no norm.
      gate: whether the output is multiplied by the sigmoid of a projection.
    """

    conv_dtype: ClassVar[Any] = jnp.float32

    W: int = 2
    layer: int = 0
    layers: int = 1
    slope_factor: float | None = None
    activation: str | None = "silu"
    scale: float = 1.0
    qk_norm: bool = False
    frequencies: tuple[float, ...] = ()
    rotary_scale: float = 1.0
    groups: int | None = 1
    gate: bool = True

    def __post_init__(self):
        super().__post_init__()
        for name, value in dict(layer=self.layer, layers=self.layers).items():
            checks.check(checks.is_whole(value), f"`{name}` must be a whole number; got {value!r}.")
        checks.check(0 <= self.layer < self.layers, f"`layer` must be from 0 to {self.layers - 1}; got {self.layer}.")
        factor, groups, found = self.slope_factor, self.groups, self.frequencies
        known = self.activation in ("silu", None)
        checks.check(known, f"`activation` must be 'silu' or None; got {self.activation!r}.")
        for name, value in dict(scale=self.scale, rotary_scale=self.rotary_scale).items():
            checks.check(is_number(value), f"`{name}` must be a finite number; got {value!r}.")
        sized = is_number(factor or 0) and (factor or 0) >= 0
        checks.check(sized, f"`slope_factor` must be None or at least 0; got {factor!r}.")
        divides = groups is None or (checks.is_whole(groups) and groups > 0 and self.HV % groups == 0)
        checks.check(divides, f"`groups` must be None or a divisor of `HV`; got {groups!r} and {self.HV}.")
        numbers = isinstance(found, tuple) and all(map(is_number, found)) and 2 * len(found) <= self.K
        checks.check(numbers, f"`frequencies` must be a tuple of at most {self.K // 2} numbers; got {found!r}.")
        checks.check(not found or self.W == 2, f"`W` must be 2 for a layer with `frequencies`; got {self.W}.")

    @property
    def channels(self) -> tuple[int, ...]:
        """The one channel of the count of tokens with rotary positions; there is no convolution."""
        return (1,) if self.frequencies else ()

    @property
    def conv_letters(self) -> tuple[str, ...]:
        """How the count of tokens is split."""
        return ("b..",) if self.frequencies else ()


@dataclasses.dataclass(frozen=True)
class GatedLinearAttentionConfig(LayerConfig):
    """The sizes of `gated_linear_attention`.

    Attributes:
      W: not read, because the layer has no convolution.
      R: rank of the projection of the decay.
      normalizer: divides the logarithms of the decays.
    """

    per_channel: ClassVar[bool] = True
    convolves: ClassVar[bool] = False

    R: int = 16
    normalizer: float = 16.0

    def __post_init__(self):
        super().__post_init__()
        checks.check_size("R", self.R)
        n = self.normalizer
        checks.check(is_number(n) and n > 0, f"`normalizer` must be above 0; got {n!r}.")


@dataclasses.dataclass(frozen=True)
class CombaConfig(LayerConfig):
    """The sizes of `comba_layer`.

    Attributes:
      output_gate: whether the norm has a gate.
    """

    output_gate: bool = True


@dataclasses.dataclass(frozen=True)
class MlstmLayerConfig(LayerConfig):
    """The sizes of `mlstm_layer`.

    Attributes:
      W: not read, because the layer has no convolution.
      gate_soft_cap: raw gates are cap * tanh(gate / cap); None for gates as they are.
      divisor_eps: the number that the operator adds to its divisor.
    """

    convolves: ClassVar[bool] = False

    gate_soft_cap: float | None = 15.0
    divisor_eps: float = 1e-6

    def __post_init__(self):
        super().__post_init__()
        cap, eps = self.gate_soft_cap, self.divisor_eps
        capped = cap is None or (is_number(cap) and cap > 0)
        checks.check(capped, f"`gate_soft_cap` must be None or above 0; got {cap!r}.")
        checks.check(is_number(eps) and eps >= 0, f"`divisor_eps` must be at least 0; got {eps!r}.")

    @property
    def state_letters(self) -> Any:
        """How C, n and m are split."""
        return MlstmState._make(("bn..", "bn.", "bn"))

    def empty_state(self, N: int, dtype) -> Any:
        """Return the state before the first token; its stabiliser, a logarithm, is float32 for every type."""
        C, n = jnp.zeros((N, self.HV, self.K, self.V), dtype), jnp.zeros((N, self.HV, self.K), dtype)
        return MlstmState(C, n, jnp.full((N, self.HV), -jnp.inf, jnp.float32))

    def check_state(self, name: str, state: Any) -> int:
        """Check C, n and m, and return of how many sequences they are."""
        checks.check(isinstance(state, MlstmState), f"`{name}` must be an MlstmState; got {checks.shown(state)}.")
        N = checks.check_array(f"{name}.C", state.C, "N HV K V", (None, self.HV, self.K, self.V))[0]
        checks.check_array(f"{name}.n", state.n, "N HV K", (N, self.HV, self.K))
        checks.check_array(f"{name}.m", state.m, "N HV", (N, self.HV))
        return N


@dataclasses.dataclass(frozen=True)
class GatedDeltaProductConfig(LayerConfig):
    """The sizes of `gated_delta_product`.

    Attributes:
      num_householder: n, the steps of the delta rule that a token takes.
      forget_gate: whether the state decays; without it the layer is DeltaProduct, and DeltaNet where n is 1.
      allow_neg_eigval: whether step sizes go up to 2.
      output_gate: whether the norm of the output has a gate.
    """

    # A token takes n tokens of the operator.
    rings: ClassVar[bool] = False

    num_householder: int = 2
    forget_gate: bool = True
    allow_neg_eigval: bool = False
    output_gate: bool = True

    def __post_init__(self):
        super().__post_init__()
        checks.check_size("num_householder", self.num_householder)

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the convolutions of queries, of n keys and of n values."""
        n = self.num_householder
        return (self.H * self.K,) * (1 + n) + (self.HV * self.V,) * n

    @property
    def conv_letters(self) -> tuple[str, ...]:
        """How the inputs of these convolutions are split."""
        return ("b.h",) * (1 + self.num_householder) + ("b.n",) * self.num_householder


@dataclasses.dataclass(frozen=True)
class Rwkv7AttentionConfig(LayerConfig):
    """The sizes of `rwkv7_attention`.

    Attributes:
      H: heads.
      HV: heads of values, which are H.
      W: 2, because the layer reads the hidden states of a token and of the token before.
      eps: the number that the norm of a head adds to the variance, 1e-5 K in trained models.
      R_decay, R_rate, R_gate: ranks of the projections of the decays, of the rates of the delta rule, and of the gates
        of the output.
      R_first: rank of the projection that says how much of the first layer's values a layer takes; None for the first
        layer, which takes none.
    """

    per_channel: ClassVar[bool] = True
    # A token takes two tokens of the operator.
    rings: ClassVar[bool] = False

    W: int = 2
    eps: float = 64e-5
    R_decay: int = 64
    R_rate: int = 64
    R_gate: int = 128
    R_first: int | None = None

    def __post_init__(self):
        super().__post_init__()
        checks.check(self.HV == self.H, f"`HV` must be `H`; got {self.HV} and {self.H}.")
        checks.check(self.W == 2, f"`W` must be 2, the tokens of a token shift; got {self.W}.")
        for name in ("R_decay", "R_rate", "R_gate"):
            checks.check_size(name, getattr(self, name))
        _check_rank("R_first", self.R_first)

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the hidden states, which are shifted by one token."""
        return (self.D,)

    @property
    def conv_letters(self) -> tuple[str, ...]:
        """How the hidden states are split."""
        return ("b..",)
