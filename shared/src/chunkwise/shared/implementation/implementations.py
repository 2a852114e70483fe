"""One way to compute an operator over whole sequences, and how the arguments of a user become its arguments."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from chunkwise.shared import compat
from chunkwise.shared.call import arguments, checks
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation import platforms
from chunkwise.shared.kernels import interleaved
from chunkwise.shared.plain import chunks, segments
from chunkwise.shared.plain.state_map import Found, augment_with_identity, map_by_running

# The options that the code around implementations reads, and those that every implementation reads. An implementation
# names the others that it reads in `Implementation.options`.
_READ_BY_ALL = frozenset({
    "output_final_state", "chunk_size", "activation", "sharding", "context_axis", "block_size", "decode_tokens",
    "scale", "large_steps", "disable_recompute",
})  # fmt: skip


class Implementation(NamedTuple):
    """One way to compute an operator. Its functions take prepared arguments, see `prepare`.

    Attributes:
      name: how a user asks for it.
      run: from arguments, options, and the `precomputed` of a state map or None, to the output [B, T, HV, V] and the
        final states [N, HV, K, V], None unless asked for.
      state_map: from arguments, options and whether M is asked for to the map that the tokens apply to a state; None
        where `map_by_running` finds it by `run`.
      state_gradient: from arguments, options, the `precomputed` of the map and the cotangents of `run` to the gradient
        of the initial states alone; None where JAX differentiates `run` for it.
      at_once: whether kernels make all gradients of `run` at once. To find the gradient of the initial states alone,
        JAX would launch these kernels, and the kernels whose results they read, a second time; so this gradient is
        taken from all gradients of `run`.
      pooled: from arguments, options and routes to the output and the pool, whose slots it reads and writes itself;
        None where the states are gathered before `run` and scattered after it.
      chunk_states: from arguments and options of a packed batch with states to the states before all chunks, which
        restart at every sequence: [1, NT, HV, K, V], meaningless for the first chunk of a sequence. None if there is
        `pooled`.
      options: the names of the fields of `Options` that it reads, beside those that all implementations read. A call
        that sets another one gets an error, or for `implementation=None` another implementation.
      sizes: from arguments, options, and whether only states are wanted, to the options with the sizes of chunks and
        tiles; or the sentence that says why it does not take arguments of these sizes and types.
      raw_gates: whether it takes raw gates per channel and their law, and erase and write gates; the others get decays,
        and erase keys and values of every value head, see `arguments.with_final_gates`.
      best_here: returns whether it is the best one on this machine, for calls that it takes; None where the order of
        implementations says so.
      interleaves: whether `run` takes tokens of several kinds, each `Interleaved`; the others get one array of them.
      knows_segments: whether it takes segment ids; the others get tokens that neither keep nor read anything of the
        state where a segment begins.
    """

    name: str
    run: Callable[[Arguments, Options, Any], tuple[jax.Array, Any]]
    state_map: Callable[[Arguments, Options, bool], Found] | None = None
    state_gradient: Callable[[Arguments, Options, Any, jax.Array, jax.Array], jax.Array] | None = None
    at_once: bool = False
    pooled: Callable[[Arguments, Options, Any], tuple[jax.Array, jax.Array]] | None = None
    chunk_states: Callable[[Arguments, Options], jax.Array] | None = None
    options: frozenset[str] = frozenset()
    sizes: Callable[[Arguments, Options, bool], Options | str] = lambda x, options, states: options
    raw_gates: bool = False
    knows_segments: bool = False
    interleaves: bool = False
    best_here: Callable[[], bool] | None = None

    def unread(self, options: Options) -> list[str]:
        """Return the names of the options that are set, and that it does not read."""
        known, default = _READ_BY_ALL | self.options, Options()
        values = {name: value for name, value in options._asdict().items() if name not in known}
        return [name for name, value in values.items() if value is not None and value != getattr(default, name)]

    def supports(self, x: Arguments, options: Options) -> bool:
        """Return whether it reads the options that are set, and takes arguments of these sizes and types."""
        return not self.unread(options) and not isinstance(self.sizes(x, options, False), str)


class Plan(NamedTuple):
    """How a call is computed, chosen once: an implementation, and options with the sizes of chunks and tiles."""

    implementation: Implementation
    options: Options


def plan(implementation: Implementation, x: Arguments, options: Options, states: bool = False) -> Plan:
    """Return how an implementation computes a call, or with `states` the map and the gradient of its states alone.

    Raises:
      NotImplementedError: it does not take arguments of these sizes and types.
    """
    chosen = implementation.sizes(x, options, states)
    if isinstance(chosen, str):
        raise NotImplementedError(chosen)
    return Plan(implementation, chosen)


def choose(known: dict[str, Implementation], asked: str | None, x: Arguments, options: Options) -> Implementation:
    """Return the implementation that was asked for, or for None the best that reads the options and takes the sizes.

    Args:
      known: implementations by name, the best for a TPU first.
      asked: the user's name of an implementation, or None.
      x, options: checked arguments and options.

    Raises:
      NotImplementedError: an option is set that the implementation does not read.
    """
    open_ = next((name for name, y in x.arrays().items() if not all(isinstance(n, int) for n in y.shape)), None)
    if open_ is not None and (asked or "xla") != "xla" and asked in known:
        raise NotImplementedError(
            f'"{asked}" must know the sizes of arrays when the program is built; got `{open_}` of shape '
            f'{x.arrays()[open_].shape}: use implementation="xla".'
        )
    if asked is None and open_ is not None:
        asked = "xla"
    if asked is None:
        for_here = (name for name, each in known.items() if each.best_here is not None and each.best_here())
        asked = next((name for name in for_here if known[name].supports(x, options)), None)
    if asked is None:
        able = [name for name, each in known.items() if not each.unread(options) and each.best_here is None]
        # The only one is not asked for sizes: on a mesh these are the sizes of all devices, and it takes those of one.
        best = next((name for name in able if len(able) == 1 or known[name].supports(x, options)), "xla")
        name = checks.choose_implementation(None, tuple(known), best)
        # Plain JAX is the best where there is no TPU, unless it does not read an option.
        asked = name if name in able else best
    chosen = known[checks.choose_implementation(asked, tuple(known), asked)]
    if unread := chosen.unread(options):
        value = checks.shown(getattr(options, unread[0]))
        raise NotImplementedError(f'"{chosen.name}" does not read `{unread[0]}`; got {value}.')
    return chosen


def in_plain_jax(function: Callable, *static: int) -> Callable:
    """Compile a function that takes the whole scale as an array; return one of prepared arguments and options.

    `static` are the positions of other static arguments.
    """
    compiled = jax.jit(function, static_argnums=(1, *static))

    @functools.wraps(function)
    def run(x: Arguments, options: Options, *more: object) -> Any:
        scale = arguments.whole_scale(x, options)
        return compiled(x._replace(scale=scale), options._replace(scale=arguments.ABSENT), *more)

    return run


def plain(rule: chunks.Rule, *options: str) -> Implementation:
    """Return the implementation "xla" of an operator by its rule, which reads these options.

    GPUs go through the chunks in a way of their own.
    """

    def on(gpu: bool, x: Arguments, options: Options, **more: Any) -> tuple[Any, Any, Any]:
        options = with_chunk_size("gpu" if gpu and rule.delta else "xla", x, options)
        if rule.most_rows is not None and not gpu:
            options = options._replace(chunk_size=min(options.chunk_size, rule.most_rows))
        return chunks.run(rule, x, options, gpu, **more)

    def run(x: Arguments, options: Options, inverses: object = None) -> Any:
        otherwise = lambda x, inverses: on(False, x, options, inverses=inverses)[:2]
        return platforms.choose(lambda x, _: on(True, x, options)[:2], otherwise, x, inverses)

    def states_after(x: Arguments, options: Options) -> tuple[jax.Array, jax.Array]:
        options = options._replace(output_final_state=True)
        otherwise = lambda x: on(False, x, options, with_output=False)[1:]

        def on_gpu(x):
            # On a GPU chunks have another size, so nothing is precomputed; these zeros only have the right shape.
            _, states, _ = on(True, x, options, with_output=False)
            return states, compat.varying_zeros(jax.eval_shape(otherwise, x)[1].shape, states)

        return platforms.choose(on_gpu, otherwise, x)

    def state_map(x: Arguments, options: Options, with_M: bool) -> Found:
        return augment_with_identity(lambda y: states_after(y, options), x, with_M=with_M)

    def chunk_states(x: Arguments, options: Options) -> jax.Array:
        options = options._replace(output_final_state=True)
        find = lambda gpu, x: chunks.run(rule, x, options, gpu, with_output=False, keep_states=True)[2][None]
        return platforms.choose(functools.partial(find, True), functools.partial(find, False), x)

    found = in_plain_jax(state_map, 2) if rule.delta else None
    return Implementation(
        "xla", in_plain_jax(run), found, chunk_states=in_plain_jax(chunk_states), options=frozenset(options)
    )  # fmt: skip


def with_chunk_size(name: str, x: Arguments, options: Options) -> Options:
    """Return options with the chunk size that was asked for, or else the best one for an implementation or "gpu".

    Plain JAX asks when it runs, because its chunk size is the platform's.
    """
    per_channel, delta = x.g is not None and x.g.ndim == 4, x.beta is not None or x.erases
    state = 0 if delta else x.k.shape[3] * x.v.shape[3]
    chunk_size = checks.choose_chunk_size(options.chunk_size, name, x.q.shape[1], per_channel=per_channel, state=state)
    return options._replace(chunk_size=chunk_size)


def prepare(plan: Plan, x: Arguments) -> tuple[Arguments, Options]:
    """Return the arguments and options that an implementation takes: with a scale and final gates."""
    return arguments.with_final_gates(*arguments.choose_scale(x, plan.options), plan.implementation.raw_gates)


def run(plan: Plan, x: Arguments, precomputed: object = None):
    """Compute the call of a user: the output and the final states, None unless asked for."""
    implementation, dtype = plan.implementation, x.v.dtype
    x = x if implementation.interleaves else interleaved.whole(x)
    x, options = prepare(plan, x)
    if x.segment_ids is None or implementation.knows_segments:
        o, states = implementation.run(x, options, precomputed)
    else:
        # Segments begin with a gate that forgets everything, which is below any promise.
        options = options._replace(min_gate=None)
        o, states = segments.run_segments(lambda x: implementation.run(x, options, precomputed), x)
    # If there are erase keys, values have become float32.
    return o if x.p is None else o.astype(dtype), states


def map_states(plan: Plan, x: Arguments, with_M: bool = True) -> Found:
    """Return the map that a user's tokens apply to a state, with M or without, and what is precomputed."""
    find = plan.implementation.state_map
    if find is None:
        return map_by_running(lambda x: run(plan, x), x, with_M)
    x, options = prepare(plan, x)
    if x.segment_ids is None or plan.implementation.knows_segments:
        return find(x, options, with_M)
    options = options._replace(min_gate=None)
    return segments.map_segments(lambda x: find(x, options, with_M), x)


def state_gradient(plan: Plan, x: Arguments, precomputed: object, do: jax.Array, dstates: jax.Array) -> jax.Array:
    """Return the gradient of the initial states alone, from the cotangents of `run`."""
    if plan.implementation.state_gradient is not None:
        return plan.implementation.state_gradient(*prepare(plan, x), precomputed, do, dstates)
    of_state = lambda S: run(plan, x._replace(initial_state=S), precomputed)
    return jax.vjp(of_state, x.initial_state)[1]((do, dstates))[0]
