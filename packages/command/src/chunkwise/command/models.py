"""The shapes of real models, by name, and their cost: flops and bytes, the same for every implementation.

`chunkwise report` and the benchmarks measure them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise import pipeline
from chunkwise.pipeline.operators import COMPOSED, OPERATORS, Entry
from chunkwise.shared.call.checks import choose_chunk_size
from chunkwise.shared.kernels.chunking import token_owners
from chunkwise.shared.kernels.spans import pools
from chunkwise.shared.testing.compare import with_gradients
from chunkwise.shared.testing.inputs import NOT_TOKENS


@dataclass(frozen=True)
class Layer:
    """A layer of a model.

    Attributes:
      operator: name of the operator, without a prefix.
      H, HV, K, V: heads and head dimensions.
      T: tokens, unless the command line says otherwise.
      sequences: how many packed sequences; 0 for one sequence that is not packed.
      ragged: whether sequence n, from 0, is n + 1 times as long as sequence 0; otherwise all have the same length.
      segments: whether ids of the tokens mark the sequences, in place of boundaries.
      normalise: whether the operator scales queries and keys to unit length.
      disable_recompute: whether the operator keeps for its backward what it makes again otherwise.
    """

    operator: str
    H: int
    HV: int
    K: int = 128
    V: int = 128
    T: int = 8192
    sequences: int = 0
    ragged: bool = False
    segments: bool = False
    normalise: bool = False
    disable_recompute: bool = False

    @property
    def table(self) -> Entry:
        """The operator's line in the table of operators."""
        return (OPERATORS | COMPOSED)[f"chunk_{self.operator}"]

    @property
    def width(self) -> int:
        """Return the channels of o, of all heads together."""
        return self.HV * self.V

    def function(self, implementation: str, sharding=None) -> Callable:
        """Return the function from the inputs by name, and cu_seqlens or None, to a dict of o.

        `sharding` says how v is split over devices; None for one device.
        """
        # Not every operator takes both.
        asked = dict(use_qk_l2norm_in_kernel=self.normalise, disable_recompute=self.disable_recompute)
        options = dict(self.table.static) | {name: True for name, value in asked.items() if value}

        def run(x, cu_seqlens):
            packing = {"cu_seqlens": cu_seqlens}
            if self.segments:
                packing = {"segment_ids": token_owners(x["q"].shape[1], cu_seqlens)[None]}
            more = options | packing | dict(implementation=implementation, sharding=sharding)
            return {"o": self.table.function(**x, **more)[0]}

        return run

    def inputs(self, T: int, dtype) -> dict:
        """Return seeded inputs by argument name, without constant gates."""
        x = self.table.source.inputs(1, T, self.H, self.HV, self.K, self.V, dtype=dtype)
        x.pop("g_gamma", None)
        return x

    def specs(self, T: int, dtype) -> dict:
        """Return the shapes and types of the inputs, which have some entries for every token, or are weights."""
        shape = lambda name, x: x.shape if name in NOT_TOKENS else (1, T * x.shape[1], *x.shape[2:])
        return {name: jax.ShapeDtypeStruct(shape(name, x), x.dtype) for name, x in self.inputs(1, dtype).items()}

    def part(self, x: dict, tokens: slice) -> dict:
        """Return some tokens of the last key head with its value heads, of inputs, results or gradients by name.

        Heads and sequences do not mix, so a whole sequence of the last heads gives the same results alone.
        """
        heads = {"q": 1, "k": 1, "p": 1, "dq": 1, "dk": 1, "dp": 1}
        last = {name: -heads.get(name, self.HV // self.H) for name in x}
        weights = {prefix + name for name in NOT_TOKENS for prefix in ("", "d")}
        return {name: y[last[name] :] if name in weights else y[:, tokens, last[name] :] for name, y in x.items()}

    def expected(self, part: dict, do) -> dict[str, np.ndarray]:
        """Return o in float64 for one sequence of a `part`, and the gradients of the inputs if do is given."""
        o, _, *gradients = self.table.source.reference(part, do=do, use_qk_l2norm_in_kernel=self.normalise)
        return {"o": o} | ({} if do is None else {f"d{name}": gradients[0][name] for name in part})

    def tolerance(self, name: str, dtype: str) -> float:
        """Return the tolerance of a result, or of a gradient, whose name begins with d."""
        return self.table.source.tolerance(name, dtype)

    def boundaries(self, T: int):
        """Return cu_seqlens int32 [sequences + 1], or None."""
        if not self.sequences:
            return None
        n = jnp.arange(self.sequences + 1, dtype=jnp.int32)
        if self.ragged:
            return T * (n * (n + 1)) // (self.sequences * (self.sequences + 1))
        return n * (T // self.sequences)

    def cost(self, T: int, dtype, backward: bool) -> tuple[int, int]:
        """Return flops and bytes, as the package's `cost` counts them, of the forward or of both directions together.

        They count the matrix products of whole chunks, and every tensor moved once in each direction. They are the same
        for all implementations, so that rates can be compared.
        """
        sizes = dict(B=1, T=T, H=self.H, HV=self.HV, K=self.K, V=self.V, C=choose_chunk_size(None, T=T))
        itemsize = jnp.dtype(dtype).itemsize
        cost = self.table.cost
        # Only recurrent forms have no cost.
        assert cost is not None
        costs = [cost(**sizes, itemsize=itemsize, backward=way) for way in (False, True)[: 1 + backward]]
        return sum(x.flops for x in costs), sum(x.bytes_accessed for x in costs)


MODELS = {
    "qwen3-next-80b": Layer("gated_delta_rule", H=16, HV=32),
    "qwen3.5-397b": Layer("gated_delta_rule", H=16, HV=64),
    "kimi-linear-48b": Layer("kda", H=32, HV=32),
    "gdn2": Layer("gdn2", H=32, HV=32),
    "minimax-text-01": Layer("simple_gla", H=64, HV=64),
    "mamba-codestral-7b": Layer("simple_gla", H=8, HV=128, V=64),
    "gla": Layer("gla", H=16, HV=16),
    # What one of 8 devices has, over which an engine splits the heads.
    "qwen3-next-80b-tp8": Layer("gated_delta_rule", H=2, HV=4),
    "qwen3.5-397b-tp8": Layer("gated_delta_rule", H=2, HV=8),
    "kimi-linear-48b-tp8": Layer("kda", H=4, HV=4),
}


def program(case, implementation: str, T: int, backward: bool, cu_seqlens, sharding=None, results: bool = False):
    """Return a case as a function and its argument shapes, bfloat16 [B, T, heads * channels], as after projections.

    Args:
      case: a `Layer`.
      implementation: an implementation of the operator.
      T: tokens.
      backward: whether the function also returns the gradients, for a cotangent, which is its last argument.
      cu_seqlens: the shape of the boundaries, None for a single sequence.
      sharding: how v is split over devices; None for one device.
      results: whether to return the output beside the gradients.
    """
    shapes = case.specs(T, jnp.bfloat16)
    # Weights keep their shapes.
    flat = {
        n: jax.ShapeDtypeStruct((1, T, x.size // T), x.dtype) if x.ndim > 2 and x.shape[1] % T == 0 else x
        for n, x in shapes.items()
    }

    def run(flat, cu_seqlens):
        x = {name: y.reshape(shapes[name].shape) for name, y in flat.items()}
        function = case.function(implementation, sharding) if sharding else case.function(implementation)
        return {"o": function(x, cu_seqlens)["o"].reshape(1, T, -1)}

    if not backward:
        return run, (flat, cu_seqlens)
    do = jax.ShapeDtypeStruct((1, T, case.width), jnp.bfloat16)

    def gradients(flat, cu_seqlens, do):
        found = with_gradients(run)(flat, cu_seqlens, {"o": do})
        return {name: x for name, x in found.items() if results or name != "o"}

    return jax.jit(gradients), (flat, cu_seqlens, do)


@dataclass(frozen=True)
class Mixture:
    """The sequences of one serving step.

    Attributes:
      decodes: how many sequences are decodes, all from a state.
      W: tokens of a decode; the state after each of them is kept.
      prefills: tokens of every other sequence, each of which also starts from a state.
      pool: type of the states.
      replay: tokens of the ring of a slot, or 0 for no ring. Rings are half full; all tokens of a decode are kept, and
        a ring is folded once in `folds_every` steps.
    """

    decodes: int = 0
    W: int = 1
    prefills: tuple[int, ...] = ()
    pool: str = "float32"
    replay: int = 0

    @property
    def folds_every(self) -> int:
        """After how many steps a ring is full."""
        return self.replay // self.W

    @property
    def N(self) -> int:
        """Sequences."""
        return self.decodes + len(self.prefills)

    @property
    def T(self) -> int:
        """Tokens."""
        return self.decodes * self.W + sum(self.prefills)

    def step(self) -> dict[str, Any]:
        """Return the arguments that change from step to step, by name."""
        lengths = [self.W] * self.decodes + list(self.prefills)
        columns = 1 if self.replay else self.W
        indices = np.arange(self.N * columns, dtype=np.int32)
        step: dict[str, Any] = {
            "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32),
            "state_indices": indices if columns == 1 else indices.reshape(self.N, columns),
            "has_initial_state": np.ones(self.N, bool),
            "num_decodes": np.int32(self.decodes),
            "num_sequences": np.int32(self.N),
        }
        if self.replay and self.W > 1:
            step["num_accepted_tokens"] = np.full(self.N, self.W, np.int32)
        return step

    @property
    def over_array(self) -> bool:
        """Whether the pool is an array of states: of a floating type, without a ring."""
        return not self.replay and self.pool != "int8"

    def make_pool(self, case: Layer, slots: int):
        """Return the pool of a layer: an array of states, or a StatePool."""
        # In pairs the states of two heads fill the lanes of a TPU.
        if self.over_array and not pools.lies_in_pairs(case.HV, case.K, case.V):
            return jnp.zeros((slots, case.HV, case.K, case.V), self.pool)
        return pipeline.make_pool(
            slots, case.HV, case.K, case.V, self.pool, replay=self.replay, H=case.H, per_channel=case.table.per_channel
        )


def serving_step(case: Layer, implementation: str, mixture: Mixture | None = None) -> Callable:
    """Return a serving step, a function of the tensors, the pool, and the arguments of `Mixture.step`.

    `mixture` says how many tokens a decode over a ring has; None where there is no ring.
    """
    operator = getattr(pipeline, f"ragged_{case.operator}")
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True} if case.table.delta else {}
    if mixture is not None and mixture.replay:
        options["decode_tokens"] = mixture.W
    return lambda x, states, step: operator(**x, states=states, **step, **options, implementation=implementation)


def moved_bytes(case: Layer, mixture: Mixture) -> tuple[int, int]:
    """Return the bytes that the decodes and the prefills must move: every token and every state, bfloat16 tensors.

    Over a ring a decode reads a state and half a ring, adds its tokens to the ring, and writes a state once in
    `folds_every` steps.
    """
    # The bytes of a slot are the bytes of its state and of its ring.
    pool = jax.eval_shape(lambda: mixture.make_pool(case, 1))
    size = lambda y: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(y))
    state = size(pool) if isinstance(pool, jax.ShapeDtypeStruct) else size((pool.states, pool.scales))
    # q, k, v and o, the decays and the step sizes.
    gates = case.HV * ((case.K if case.table.per_channel else 1) + case.table.delta)
    erases = {None: 0, "key": case.H * case.K, "gate": case.HV * (case.K + case.V)}[case.table.erase]
    token = 2 * 2 * (case.H * case.K + case.HV * case.V) + 4 * gates + 2 * erases
    each = mixture.W * token + (1 + mixture.W) * state
    if mixture.replay:
        ring = size((pool.keys, pool.writes, pool.gates)) / mixture.replay
        each = mixture.W * (token + ring) + ring * mixture.replay / 2 + (1 + 1 / mixture.folds_every) * state
    return round(mixture.decodes * each), sum(mixture.prefills) * token + 2 * len(mixture.prefills) * state
