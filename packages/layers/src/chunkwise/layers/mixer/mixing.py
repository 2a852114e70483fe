"""The mixer of a layer, between its projections: convolutions, operator, and the norm and gate of the output.

They run one after the other. If every sequence has one token, which follows a cache or the state in a slot, one launch
does all of them. Over a mesh whose devices share heads or rows, every device has such a launch, and sends nothing.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.layers import caches, config
from chunkwise.layers.mixer import norm, running
from chunkwise.shared import compat
from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.kernels import launcher
from chunkwise.shared.mesh import partition
from chunkwise.shared.serving import state_pool, step_table
from chunkwise.shared.serving.decode import choose, launch
from chunkwise.shared.serving.decode.records import Decodes, static_of
from chunkwise.shared.serving.state_pool import StatePool

_VALUES = partition.Layout(
    "v", dict(b="rows", t="tokens", n="value heads", d="value channels"), dict(v="btnd"), results=()
)

# The output of a step [T, HV V], the pools of its convolutions and the pool of its states.
Step = tuple[jax.Array, tuple[jax.Array, ...], StatePool]
# Arrays of a layer between its projections; the first one is the tuple of queries, keys and values, [B, T, channels].
Arrays = tuple[Any, ...]


class Mixer(NamedTuple):
    """What a layer does between its projections.

    Attributes:
      by_operators: from a run, the config and the arrays to the output [B, T, HV, V], and the cache after.
      decodes: from the config and the arrays to the record of all of it for single tokens.
      letters: how the arrays are split, in letters of `division.Letters`, in their structure.
    """

    by_operators: Callable[[running.Run, Any, Arrays], running.Mixed]
    decodes: Callable[[Any, Arrays], Decodes]
    letters: tuple[Any, ...]


# How queries, keys and values are split, and what belongs to each of their channels.
PROJECTED, OF_CHANNELS = ("bth", "bth", "btn"), ("h", "h", "n")


def way(run: running.Run, mixer: Mixer, x: jax.Array) -> Callable[..., running.Mixed]:
    """Return how a run mixes tokens x [B, T, channels]: a function of the run, the config and the arrays of a mixer.

    It returns the output of a layer before its last projection [B, T, HV, V], and the cache after its tokens.
    """
    if isinstance(run, running.Serving):
        return functools.partial(_serve_step, mixer)
    return functools.partial(_decode_token, mixer) if run.continues_by_one(x) else mixer.by_operators


def delta_rule(operators: running.Operators, *, activation: str, eps: float, **gates: Any) -> Mixer:
    """Return the mixer of a delta rule with a norm.

    Its arrays are queries, keys and values before the convolution; the weights of the convolutions; raw gates [B, T,
    HV] or [B, T, HV K], raw step sizes, and gates of the output [B, T, HV V]; the weight of the norm; and A_log and
    dt_bias, the arguments of the gates' law.

    Args:
      operators: the rule in its three forms.
      activation, eps: the arguments of the norm.
      **gates: further arguments of the operator about its gates.
    """

    def by_operators(run, config, arrays):
        projected, conv, g, beta, z, weight, A_log, dt_bias = arrays
        pairs = list(map(run.convolve, range(3), projected, conv, (None,) * 3, config.heads))
        q, k, v = (running.by_head(y, count) for (y, _), count in zip(pairs, config.heads, strict=True))
        o, state = run.operate(
            operators, q, k, v, running.by_head(g, config.HV) if config.per_channel else g, beta,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=True, **gates,
        )  # fmt: skip
        kept = tuple(after for _, after in pairs)
        return norm.norm_heads(run, o, z, weight, activation=activation, eps=eps), caches.Cache(kept, state)

    def decodes(config, arrays):
        projected, conv, g, beta, z, weight, A_log, dt_bias = arrays
        activations = GateActivation(True, use_beta_sigmoid_in_kernel=True, **gates)
        static = static_of(config.H, config.HV, config.K, config.V, activations)
        static = static._replace(norm_gate=activation, eps=eps)
        tokens = tuple(map(rows, projected)), rows(g), rows(beta), rows(z)
        return Decodes(static, *tokens, tuple(conv), (), A_log, dt_bias, weight)

    return Mixer(by_operators, decodes, (PROJECTED, OF_CHANNELS, "btn", "btn", "btn", "", "n", "n"))


def rows(x: jax.Array) -> jax.Array:
    """Return all tokens of x [B, T, channels], one row after the other."""
    return x.reshape(-1, x.shape[2])


def _serve_step(mixer: Mixer, run: running.Serving, config: config.LayerConfig, arrays: Arrays) -> running.Mixed:
    """Mix the tokens of a serving step."""
    if (division := _find_division(run, config, arrays)) is not None:
        named = {name: checks.as_int32(y) for name, y in run.slots.items() if hasattr(y, "shape")}
        tree = run.pool, named, arrays
        if not _divides(division, run, config, mixer, tree):
            return mixer.by_operators(run, config, arrays)
        return _on_devices(functools.partial(_serve_step, mixer), division, run, config, mixer, tree)
    x, pool = mixer.decodes(config, arrays), state_pool.as_pool(run.pool.state)
    x = x._replace(static=x.static._replace(W=run.decode_tokens or 1))
    slots = Slots(**{name: run.slots[name] for name in Slots._fields if name != "block_state_indices"})

    def others() -> Step:
        y, cache = mixer.by_operators(run, config, arrays)
        return y.reshape(-1, config.HV * config.V), cache.conv, state_pool.as_pool(cache.state)

    o, conv, after = fused_step(x, run.pool.conv, pool, run.step.cu_seqlens, slots, run.implementation, others)
    # A pool is returned as it came.
    state = after if pool is run.pool.state else after.states
    return o.reshape(1, -1, config.HV, config.V), caches.Cache(conv, state)


def _decode_token(mixer: Mixer, run: running.Sequences, config: config.LayerConfig, arrays: Arrays) -> running.Mixed:
    """Mix one token of each row, which follows a cache."""
    cache = run.cache
    # Only with a cache there is a token before.
    assert cache is not None
    tree = cache, {}, arrays

    def others(cache, _, arrays):
        return mixer.by_operators(dataclasses.replace(run, cache=cache), config, arrays)

    def together(cache, _, arrays):
        x, slots = mixer.decodes(config, arrays), _rows_as_slots(arrays)
        boundaries = jnp.arange(slots.num_decodes + 1, dtype=jnp.int32)
        o, conv, pool = launch.launch(x, cache.conv, StatePool(cache.state), boundaries, slots)
        return o.reshape(-1, 1, config.HV, config.V), caches.Cache(conv, pool.states)

    if (division := _find_division(run, config, arrays)) is None:
        x, slots = mixer.decodes(config, arrays), _rows_as_slots(arrays)
        one_launch = choose.by_kernel(run.implementation, x, StatePool(cache.state), slots, conv=cache.conv)
    else:
        one_launch = _divides(division, run, config, mixer, tree)
        decode_token = functools.partial(_decode_token, mixer)
        together = functools.partial(_on_devices, decode_token, division, run, config, mixer)
        together = lambda *tree, together=together: together(tree)
    if not one_launch:
        return others(*tree)
    # The gradient is taken from the other form, because one token is not worth a backward kernel.
    leaves, structure = jax.tree.flatten(tree)
    differentiable = launcher.with_gradient_of(others, together, "of one token after a cache")
    return differentiable(*structure.unflatten(compat.vary_alike(*leaves)))


def _rows_as_slots(arrays: Arrays) -> Slots:
    """Return the slots of a batch of single tokens, whose rows are the slots of their cache."""
    B = arrays[0][0].shape[0]
    return Slots(jnp.arange(B, dtype=jnp.int32), num_decodes=B)


def _find_division(run: running.Run, config: config.LayerConfig, arrays: Arrays) -> partition.Division | None:
    """Return how the heads of a layer are divided over a mesh; None on one device."""
    division = partition.find_division({"v": running.by_head(arrays[0][2], config.HV)}, _VALUES, run.sharding)
    if division is None:
        return None
    # All devices have a single key head.
    return division._replace(axes=division.axes | {"h": division.axes["n"] if config.H > 1 else ()})


def _key_heads(division: partition.Division, config: config.LayerConfig) -> int:
    """Return over how many devices the key heads of a layer are divided."""
    return partition.size_of(division.mesh, division.axes["h"])


def _letters(config: config.LayerConfig, mixer: Mixer, tree) -> tuple[Any, ...]:
    """Return how a tree of the cache, the arrays of a step and the arrays of a mixer is split."""
    # A mixer whose layer convolves before its projections has none in its cache.
    of_cache: Any = config.conv_letters[: len(tree[0].conv)], config.state_letters
    return caches.Cache(*of_cache), "", mixer.letters


def _divides(division: partition.Division, run: running.Run, config: config.LayerConfig, mixer: Mixer, tree) -> bool:
    """Return whether every device can have one launch for its heads, and for its rows of a batch.

    Devices that share one of several key heads, a token or channels of a value, or the slots of a pool, cannot. A pool
    must be an array.
    """
    whole = division.axes["t"] + division.axes["d"] + (division.axes["b"] if tree[1] else ())
    even = not whole and config.H % _key_heads(division, config) == 0
    letters = _letters(config, mixer, tree)
    placed = even and hasattr(tree[0].state, "dtype") and partition.can_place(division, tree, letters)
    return placed and choose.runs_kernels(run.implementation, whole=True)


def _on_devices(
    mix_here: Callable[..., running.Mixed], division: partition.Division, run: running.Run,
    config: config.LayerConfig, mixer: Mixer, tree,
) -> running.Mixed:  # fmt: skip
    """Call `_serve_step` or `_decode_token` on all devices of a mesh, each with its rows and heads."""
    devices = partition.size_of(division.mesh, division.axes["n"])
    config = dataclasses.replace(config, H=config.H // _key_heads(division, config), HV=config.HV // devices)

    def on_device(cache, step, arrays):
        changed: dict[str, Any] = {run.own_cache[0]: cache}
        if isinstance(run, running.Serving):
            changed["step"] = run.step._replace(**step)
        return mix_here(dataclasses.replace(run, sharding=None, **changed), config, arrays)

    letters = _letters(config, mixer, tree)
    return partition.on_devices(on_device, division, tree, letters, ("btn", letters[0]))


def fused_step(
    x: Decodes, conv: tuple[jax.Array, ...], pool: StatePool, cu_seqlens: jax.Array, slots: Slots,
    implementation: str | None, otherwise: Callable[[], Step],
) -> Step:  # fmt: skip
    """Return the result of a serving step: by one launch if all of its sequences decode, else otherwise().

    Where a count of the step is traced, the program has both branches.

    Args:
      x: the tokens of the step.
      conv, pool: the pools of the convolutions, and the pool of states, of any kind.
      cu_seqlens, slots: the boundaries and the slots of the step.
      implementation: the user's name of the operator's implementation, or None.
      otherwise: returns the result of the step, by one operation after the other.
    """
    given, slots = slots, step_table.with_counts(Slots(*map(checks.as_int32, slots)))
    if not pool.replay:
        # A decode has a slot for each of its tokens.
        x = x._replace(static=x.static._replace(W=choose.columns(slots)))
    if slots.num_decodes is None or not choose.by_kernel(implementation, x, pool, slots, conv=conv):
        return otherwise()
    together = functools.partial(launch.launch, x, conv, pool, checks.as_int32(cu_seqlens), slots)
    N = slots.state_indices.shape[0]
    sequences = N if given.num_sequences is None else given.num_sequences
    if all(isinstance(count, numbers.Integral) for count in (given.num_decodes, sequences)):
        if given.num_decodes < min(sequences, N):
            return otherwise()
        # The other way has all checks of arguments.
        jax.eval_shape(otherwise)
        return together()
    return lax.cond(slots.num_decodes >= jnp.minimum(sequences, N), together, otherwise)
