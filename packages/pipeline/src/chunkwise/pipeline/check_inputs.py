"""Check the values of a training batch, for programs that shall raise an error where an operator cannot."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.delta_product import operator as delta_product
from chunkwise.dplr import operator as dplr
from chunkwise.fused_gdn import operator as gdn
from chunkwise.fused_gla import operator as gla
from chunkwise.kda import operator as kda
from chunkwise.mlstm import operator as mlstm
from chunkwise.pipeline.operators import COMPOSITIONS, OPERATORS
from chunkwise.shared import tuning
from chunkwise.shared.call import arguments, checks, faults, gates, signature
from chunkwise.shared.call.arguments import Arguments
from chunkwise.shared.kernels import chunking, tiles
from chunkwise.shared.testing.definitions import Composition
from chunkwise.two_keys import operator as two_keys

# The largest relative error of float32 sums of squares.
_ROUNDING = 1e-5
# The largest relative error of a constant that somebody types for 1 / ln 2.
_CONSTANT = 1e-3
# How many tokens with falling gates, and how many raw numbers between 0 and 1, are no accident.
_SORTED, _UNSIGNED = 30, 32
# The user's names of arguments that have other names in the record of an operator.
_LOW_RANK = dict(g="gk", p="a", w="b")
# The arguments of this function alone, and the arrays that operators of all kinds take.
_OWN, _SHARED = ("min_gate", "allow_padding"), ("initial_state", "cu_seqlens", "segment_ids")
# From wrong entries to wrong entries outside of padding.
Where = Callable[[jax.Array], jax.Array]


def check_inputs(
    q: jax.Array | None = None, k: jax.Array | None = None, v: jax.Array | None = None, g: jax.Array | None = None,
    beta: jax.Array | None = None, *, g_gamma: jax.Array | None = None, p: jax.Array | None = None,
    b: jax.Array | None = None, w: jax.Array | None = None, a: jax.Array | None = None, gk: jax.Array | None = None,
    i: jax.Array | None = None, f: jax.Array | None = None, num_householder: int | None = None,
    initial_state: jax.Array | None = None, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool | str = False, A_log: jax.Array | None = None, dt_bias: jax.Array | None = None,
    lower_bound: float | None = None, use_beta_sigmoid_in_kernel: bool = False,
    use_erase_sigmoid_in_kernel: bool = False, use_write_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, min_gate: float | None = None, cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None, allow_padding: bool = False, **others: Any,
) -> None:  # fmt: skip
    """Check the values of a training batch, beyond its shapes and types.

    The call is::

        check_inputs(q, k, v, g, beta, min_gate=-5.0)

    The arrays are the arguments of any `chunk_` operator. They tell which one: beta means a delta rule, p Comba, b and
    w GDN-2, a, b and gk a delta rule with diagonal plus low-rank transitions, num_householder Gated DeltaProduct, i and
    f mLSTM, g [B, T, HV, K] gates per channel, and the names of all arrays Mamba-2 and recipes. This function finds:

    - numbers that are not finite, except gates of -inf, and raw forget gates of mLSTM of inf,
    - gates and rates A above 0, such as a decay from 0 to 1 where its log belongs,
    - gates that fall from token to token in every sequence, as their cumulative sums do,
    - gates below `min_gate`, as logs to base 2 are if the gates of the model have a bound,
    - step sizes and erase gates out of their range, or after two sigmoids, and keys so long that a delta rule diverges,
    - boundaries that fall, pass the end or stop short of it, and rows that are padded with segment ids of 0.

    Padding may hold anything. The cost is one read of every array. Outside of jit the call waits for the result, and an
    error names the first fault. Inside of jit nothing can be raised, unless the program is made for it::

        checked = checkify.checkify(step)  # step calls check_inputs; checkify is of jax.experimental
        error, results = jax.jit(checked)(...)
        error.throw()

    Args:
      q, k, v, g, beta, g_gamma, p, b, w, a, gk, i, f, num_householder, initial_state: as in the operator.
      use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, lower_bound: as in the operator.
      use_beta_sigmoid_in_kernel, use_erase_sigmoid_in_kernel, use_write_sigmoid_in_kernel: as in the operator.
      allow_neg_eigval: whether step sizes, or erase gates, may be up to 2, whether they are raw or not.
      min_gate: the bound of gates in nats that are not raw, such as -5 for a law with this `lower_bound`; static.
      cu_seqlens, segment_ids: as in the operator. A row whose ids are above 0, and 0 at its end, is an error: the zeros
        look like padding, but 0 is a document here.
      allow_padding: whether padding may follow the last of `cu_seqlens`; static. Without it boundaries end at T.
      others: arguments of Mamba-2 or of a recipe by names that no other operator has, such as dt_softplus.

    Raises:
      ValueError: a shape or type is wrong, or outside of jit a value.
    """
    doubled = (use_beta_sigmoid_in_kernel or use_erase_sigmoid_in_kernel) and allow_neg_eigval
    named = locals() | dict(allow_neg_eigval=doubled)
    names = _LOW_RANK if gk is not None else {}
    checks.check_flags(allow_neg_eigval=allow_neg_eigval, allow_padding=allow_padding)
    tensors: dict[str, Any] = {
        name: y for name, y in (named | others).items() if hasattr(y, "shape") and name not in _SHARED
    }
    if recipe := _recipe_of(tensors, others):
        return _check_recipe(recipe, tensors, named | dict(allow_neg_eigval=allow_neg_eigval))
    arrays, options, more = _to_records(named)

    def find() -> Iterator[faults.Fault]:
        yield from _find_faults(arrays, options, allow_neg_eigval, allow_padding, names)
        valid = chunking.valid_tokens(arrays.cu_seqlens, arrays.segment_ids, arrays.q.shape[1])
        yield from _of_mlstm(more, valid)

    faults.check_values((*arrays.arrays().values(), *more.values()), find)


def _recipe_of(tensors: dict[str, jax.Array], others: dict[str, Any]) -> Composition | None:
    """Return the recipe, or Mamba-2, that takes all arrays of a call and needs no more; None for another operator."""
    known = [(x, inspect.signature(x.chunk).parameters) for x in COMPOSITIONS if x.values]
    needed = lambda p: {name for name, x in p.items() if x.default is x.empty} - {"options"}
    found = [x for x, p in known if needed(p) <= tensors.keys() <= p.keys()]
    rule = "must come with all arrays of its operator"
    checks.check(bool(found) or not others, f"`{min(others, default='')}` {rule}; got {sorted(tensors)}.")
    # Two have the same names, for gates per head and per channel.
    channels = getattr(tensors.get("g"), "ndim", 3) == 4
    return min(found, key=lambda x: OPERATORS[f"chunk_{x.runs}"].per_channel != channels, default=None)


def _check_recipe(recipe: Composition, tensors: dict[str, jax.Array], named: dict[str, Any]) -> None:
    """Check the arrays of a recipe; its function checks their shapes and types, and refuses other options."""
    shared, known = {name: named[name] for name in _SHARED}, inspect.signature(check_inputs).parameters
    given = {name: named[name] for name, x in known.items() if named[name] is not x.default} | named["others"]
    options = {name: given[name] for name in given.keys() - {*tensors, *shared, *_OWN, "others"}}
    jax.eval_shape(functools.partial(recipe.chunk, **options), **tensors, **shared)
    states, v, bound = shared.pop("initial_state"), tensors[recipe.definition.values], named["min_gate"]
    x, kinds = Arguments(v, v, v, **shared), dict(recipe.values)
    if options.get("dt_softplus") or "dt_bias" in tensors:
        kinds.pop("dt", None)  # raw
    valid = chunking.valid_tokens(x.cu_seqlens, x.segment_ids, v.shape[1])
    inside = lambda wrong: chunking.select_tokens(valid, wrong, False) if wrong.ndim > 2 else wrong

    def find() -> Iterator[faults.Fault]:
        yield from _of_sequences(x, named["allow_padding"])
        for name, y in tensors.items():
            if kinds.get(name) == "log decay":
                yield from _gates(name, y, inside)
                yield from () if bound is None else _bound(name, y, bound, inside)
                yield _sums(name, y, x, valid)
                continue
            yield faults.fault(inside(~jnp.isfinite(y)), y, f"`{name}` must be finite")
            least, most = kinds.get(name, (-math.inf, math.inf))
            yield faults.fault(inside((y < least) | (y > most)), y, f"`{name}` must be from {least:g} to {most:g}")
        for y in jax.tree.leaves(states):
            yield faults.fault(~jnp.isfinite(y), y, "`initial_state` must be finite")

    faults.check_values(jax.tree.leaves((tensors, states, shared)), find)


def _to_records(named: dict[str, Any]) -> tuple[Arguments, arguments.Options, dict[str, Any]]:
    """Check the shapes and types of all arguments; return the records, and the arrays that these have no place for."""
    if named["i"] is not None or named["f"] is not None:
        arrays, options = mlstm.check(named | dict(eps=0.0))
        state = named["initial_state"]
        states = {} if state is None else mlstm.MlstmState(*state)._asdict()
        return arrays, options, {name: named[name] for name in "if" if named[name] is not None} | states
    low_rank = named["gk"] is not None
    if low_rank:
        # The record has the keys a and b apart, as p and w, and the name of the gates differs.
        named = named | dict(g=named["gk"], p=named["a"], w=named["b"], b=None)
    arrays, options, _ = signature.to_records(named)
    return _check_types(arrays, options, low_rank, named["num_householder"]), options, {}


def _check_types(x: Arguments, options: arguments.Options, low_rank: bool, steps: int | None) -> Arguments:
    """Check the shapes and types that the operator with these arguments checks; return its arguments.

    `low_rank` says that there are the keys of a transition of low rank, and `steps` how many steps a token takes.
    """
    view = x
    if low_rank:
        dplr.check({name: name for name in dplr.TENSORS}, [x.q, x.k, x.v, x.p, x.w, x.g], x.cu_seqlens)
    elif steps is not None:
        view = delta_product.check(x, options, steps)
    elif x.b is not None or x.w is not None or x.p is not None:
        (two_keys.COMBA if x.p is not None else two_keys.GDN2).check(x, options)
    elif x.beta is None:
        raw = options.activation.use_gate_in_kernel or options.activation.use_beta_sigmoid_in_kernel
        checks.check(not raw, "`beta` must be an array [B, T, HV] where gates or step sizes are raw; got None.")
        gla.check(x, options)
    else:
        per_channel = getattr(x.g, "ndim", 3) == 4
        (kda if per_channel else gdn).OPERATOR.check(x, options)
    checks.check_initial_state(x.initial_state, (x.num_states, *x.v.shape[2:3], x.q.shape[3], x.v.shape[3]))
    return arguments.check_shared(view, options)._replace(k=x.k, v=x.v)


def _find_faults(
    x: Arguments, options: arguments.Options, allow_neg_eigval: bool, allow_padding: bool, names: dict[str, str]
) -> Iterator[faults.Fault]:
    """Yield the faults that the values of a batch may have; `names` has the user's names where others differ."""
    T, raw = x.q.shape[1], options.activation
    yield from _of_sequences(x, allow_padding)
    valid = chunking.valid_tokens(x.cu_seqlens, x.segment_ids, T)
    # Padding may hold anything. An array may have several entries for a token.
    of = lambda y: valid if valid is None or y.shape[1] == T else jnp.repeat(valid, y.shape[1] // T, axis=1)
    inside = lambda wrong: chunking.select_tokens(of(wrong), wrong, False)
    everywhere = lambda wrong: wrong
    tokens = ("q", "k", "v", "beta", "p", "b", "w", *(("g",) if raw.use_gate_in_kernel else ()))
    for name in (*tokens, "initial_state", "A_log", "dt_bias"):
        y = getattr(x, name)
        if y is not None:
            where = inside if name in tokens else everywhere
            yield faults.fault(where(~jnp.isfinite(y)), y, f"`{names.get(name, name)}` must be finite")
    if x.g is not None and not raw.use_gate_in_kernel:
        gate = names.get("g", "g")
        yield from _gates(gate, x.g, inside)
        if options.min_gate is not None:
            yield from _bound(gate, x.g, options.min_gate, inside)
        yield _sums(gate, x.g, x, valid)
    if names is _LOW_RANK:
        yield from _transition(x, inside)
        return
    if x.g_gamma is not None:
        yield from _gates("g_gamma", x.g_gamma, everywhere)
    for name, flag in (("beta", "beta"), ("b", "erase"), ("w", "write")):
        if getattr(raw, f"use_{flag}_sigmoid_in_kernel"):
            yield _twice(name, getattr(x, name), f"use_{flag}_sigmoid_in_kernel", inside)
    if x.beta is None and x.b is None:
        return
    if x.b is not None:
        beta, name, apart = x.b, "b", raw.use_erase_sigmoid_in_kernel
    else:
        beta, name, apart = x.beta, "beta", raw.use_beta_sigmoid_in_kernel
    if apart:
        beta = gates.step_sizes(beta, raw.allow_neg_eigval, of(beta))
    else:
        most = 2 if allow_neg_eigval else 1
        rule = f"`{name}` must be from 0 to {most}" + ("" if allow_neg_eigval else ", or to 2 with `allow_neg_eigval`")
        yield faults.fault(inside((beta < 0) | (beta > most)), beta, rule)
    if x.p is not None:
        yield _growth(x, x.p, beta, options, valid, inside)
    elif not options.use_qk_l2norm_in_kernel:
        yield _lengths(x.k, beta, inside)


def _of_mlstm(named: dict[str, jax.Array], valid: jax.Array | None) -> Iterator[faults.Fault]:
    """Yield the faults of the raw gates and states of mLSTM by name; padding may hold any gates."""
    for name, y in named.items():
        # Tokens may write nothing, and forget everything or nothing; a state may have no token yet.
        known = dict(i=y == -jnp.inf, m=y == -jnp.inf, f=jnp.isinf(y)).get(name, False)
        wrong = ~(jnp.isfinite(y) | known)
        wrong = chunking.select_tokens(valid, wrong, False) if name in ("i", "f") else wrong
        rule = dict(i="a number below inf", f="a number", m="a number below inf").get(name, "finite")
        label = name if name in ("i", "f") else f"initial_state.{name}"
        yield faults.fault(wrong, y, f"`{label}` must be {rule}")


def _of_sequences(x: Arguments, allow_padding: bool) -> Iterator[faults.Fault]:
    """Yield the faults of boundaries and of ids."""
    if x.cu_seqlens is not None:
        yield from _boundaries(x.cu_seqlens, x.q.shape[1], allow_padding)
    if x.segment_ids is not None:
        yield _padding(x.segment_ids)


def _boundaries(cu_seqlens: jax.Array, T: int, allow_padding: bool) -> Iterator[faults.Fault]:
    """Yield the faults of boundaries that do not rise from 0 to at most T, or stop short of T."""
    first = jnp.arange(cu_seqlens.shape[0]) == 0
    before = jnp.pad(cu_seqlens[:-1], (1, 0))
    wrong = (cu_seqlens < before) | (cu_seqlens > T) | (first & (cu_seqlens != 0))
    yield faults.fault(wrong, cu_seqlens, f"`cu_seqlens` must rise from 0 to at most T = {T}")
    if not allow_padding:
        last = jnp.arange(cu_seqlens.shape[0]) == cu_seqlens.shape[0] - 1
        rule = f"`cu_seqlens` must end at T = {T}, or before it with `allow_padding`"
        yield faults.fault(last & (cu_seqlens < T), cu_seqlens, rule)


def _padding(segment_ids: jax.Array) -> faults.Fault:
    """Return the fault of rows that are padded with zeros: their last ids are 0, and all ids before are above 0."""
    later = jnp.cumsum((segment_ids != 0)[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    trailing = later == 0
    padded = jnp.all(trailing | (segment_ids > 0), axis=1, keepdims=True) & ~jnp.all(trailing, axis=1, keepdims=True)
    rule = "`segment_ids` must be below 0 for padding, because 0 is a document"
    return faults.fault(trailing & padded, segment_ids, rule, ", the first of the zeros that end a row")


def _gates(name: str, g: jax.Array, where: Where) -> Iterator[faults.Fault]:
    """Yield the faults of gates above 0: first if they are decays in the place of their logs, then all others."""
    decays = (g > 0) & (g <= 1)
    only = ~jnp.any(where(~decays))
    rule = f"`{name}` must be at most 0, the log of a decay"
    yield faults.fault(where(decays) & only, g, rule, ", and all entries are from 0 to 1: take the log of a decay")
    yield faults.fault(where(~(g <= 0)), g, rule)


def _bound(name: str, g: jax.Array, least: float, where: Where) -> Iterator[faults.Fault]:
    """Yield the faults of gates below a bound: first if logs to base 2 would obey it, then all others."""
    rounded = 1 + float(jnp.finfo(g.dtype).eps)
    below, base_2 = g < least * rounded, least * tiles.LOG2_E
    only = ~jnp.any(where(g < base_2 * rounded * (1 + _CONSTANT)))
    rule = f"`{name}` must be at least `min_gate` = {least:g} nats"
    more = f", and all entries are at least {base_2:g}, as logs to base 2 are: multiply these by ln 2"
    yield faults.fault(where(below) & only, g, rule, more)
    yield faults.fault(where(below), g, rule)


def _sums(name: str, g: jax.Array, x: Arguments, valid: jax.Array | None) -> faults.Fault:
    """Return the fault of gates that fall from token to token in every sequence, as sums over tokens or chunks do."""
    T, tokens = g.shape[1], jnp.arange(g.shape[1], dtype=jnp.int32)[None]
    owners = x.segment_ids if x.cu_seqlens is None else chunking.token_owners(T, x.cu_seqlens)[None]
    owners = jnp.zeros_like(tokens) if owners is None else owners
    begins = jnp.pad(owners[:, 1:] != owners[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    place = tokens - lax.cummax(jnp.where(begins, tokens, 0), axis=1)
    # The sums of a chunk begin again at the next one.
    follows = place % min(tuning.CHUNK_SIZES) != 0
    follows = follows if valid is None else follows & valid
    heads = tuple(range(2, g.ndim))
    before = jnp.pad(g[:, :-1], ((0, 0), (1, 0), *((0, 0) for _ in heads)))
    falls = follows & jnp.all(g <= before, axis=heads) & jnp.any(g < before, axis=heads)
    # Random gates of so many tokens do not all fall, whatever their heads have in common.
    wrong = (jnp.sum(falls, dtype=jnp.int32) >= _SORTED) & jnp.all(falls == follows)
    return faults.Fault(
        wrong,
        f"`{name}` must be the log decay of each token alone; got gates that fall from token to token in every "
        "sequence, as cumulative sums do.",
    )


def _twice(name: str, y: jax.Array, flag: str, where: Where) -> faults.Fault:
    """Return the fault of raw numbers that are all between 0 and 1, and so many that this is no accident."""
    only = ~jnp.any(where(~((y > 0) & (y < 1))))
    rule = f"`{name}` must be raw with `{flag}`"
    return faults.fault(where(y > 0) & only & (y.size >= _UNSIGNED), y, rule, ", and all entries are from 0 to 1")


def _rounding(k: jax.Array) -> float:
    """Return how far a product of keys of this type may be above its bound."""
    return max(float(jnp.finfo(k.dtype).eps), _ROUNDING)


def _growth(
    x: Arguments, p: jax.Array, beta: jax.Array, options: arguments.Options, valid: jax.Array | None, where: Where
) -> faults.Fault:
    """Return the fault of erase keys with which states grow: they read before the decay, so a step is e^g - k p^T."""
    k, p = (y.astype(jnp.float32) for y in (x.k, p))
    if options.use_qk_l2norm_in_kernel:
        k, p = tiles.l2norm(k), tiles.l2norm(p)
    law = options.activation.law
    g = x.g.astype(jnp.float32) if law is None else gates.decays(x.g, x.A_log, x.dt_bias, law, valid)
    product = beta.astype(jnp.float32) * tiles.repeat_heads(jnp.sum(k * p, axis=3), beta.shape[2], axis=2)
    rounding = _rounding(x.k) * (1 + jnp.exp(g))
    grows = jnp.abs(jnp.exp(g) - product) > 1 + rounding
    return faults.fault(where(grows), product, "`k` must have beta k . p from e^g - 1 to e^g + 1, or states grow")


def _transition(x: Arguments, where: Where) -> Iterator[faults.Fault]:
    """Yield the faults of keys a and b, in p and w, with which states grow, by an eigenvalue of Diag(e^g) + b a^T.

    Where a is against b, the least eigenvalue is at most max e^g + a . b, and at least -1 if states shall not grow. The
    sum of all eigenvalues is that of e^g plus a . b, and one of them is above 1 if their mean is.
    """
    assert x.p is not None
    assert x.w is not None
    product = tiles.repeat_heads(
        jnp.sum(x.p.astype(jnp.float32) * x.w.astype(jnp.float32), axis=3), x.g.shape[2], axis=2
    )
    decays = jnp.exp(x.g.astype(jnp.float32))
    largest, rounding = jnp.max(decays, axis=3), _rounding(x.k)
    for wrong, rule in (
        (product < -(1 + largest) * (1 + rounding), "least -1 - max e^gk"),
        (product > jnp.sum(1 - decays, axis=3) + rounding * (1 + largest), "most the sum of 1 - e^gk"),
    ):
        yield faults.fault(where(wrong), product, f"`b` must have a . b of at {rule}, or states grow")


def _lengths(k: jax.Array, rate: jax.Array, where: Where) -> faults.Fault:
    """Return the fault of keys that are so long, for step sizes or erase gates, that states grow without bound."""
    product = jnp.square(k.astype(jnp.float32))
    to_values = lambda y: tiles.repeat_heads(y, rate.shape[2], axis=2)
    rate = rate.astype(jnp.float32)
    channels = rate.ndim == 4
    y = jnp.sum(to_values(product) * rate, axis=3) if channels else rate * jnp.abs(to_values(jnp.sum(product, axis=3)))
    most = 2 * (1 + _rounding(k))
    rule = f"`k` must have {'|k . p|' if channels else '|k|^2 beta'} of at most 2, or states grow"
    return faults.fault(where(y > most), y, rule, "; `use_qk_l2norm_in_kernel` makes keys of unit length")
