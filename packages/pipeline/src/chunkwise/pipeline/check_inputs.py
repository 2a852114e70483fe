"""Check the values of a training batch, for programs that shall raise an error where an operator cannot."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.fused_gdn import operator as gdn
from chunkwise.fused_gla import operator as gla
from chunkwise.kda import operator as kda
from chunkwise.shared.call import arguments, checks, gates, signature
from chunkwise.shared.call.arguments import Arguments
from chunkwise.shared.kernels import chunking, tiles
from chunkwise.two_keys import operator as two_keys

# The largest relative error of float32 sums of squares.
_ROUNDING = 1e-5
# From wrong entries to wrong entries outside of padding.
Where = Callable[[jax.Array], jax.Array]


def check_inputs(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    beta: jax.Array | None = None,
    *,
    g_gamma: jax.Array | None = None,
    p: jax.Array | None = None,
    b: jax.Array | None = None,
    w: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool | str = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    use_erase_sigmoid_in_kernel: bool = False,
    use_write_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> None:
    """Check the values of a training batch, beyond its shapes and types.

    The arrays are the arguments of any `chunk_` operator. They tell which one: beta means a delta rule, p Comba, b and
    w GDN-2, and g [B, T, HV, K] gates per channel. This function finds:

    - numbers that are not finite, except gates of -inf,
    - gates above 0, such as a decay from 0 to 1 where its log belongs,
    - step sizes and erase gates out of their range, and keys so long that the recurrence of a delta rule diverges,
    - boundaries that fall or pass the end, and rows that are padded with segment ids of 0.

    Padding may hold anything. Outside of jit an error names the first fault. Inside of jit nothing can be raised,
    unless the program is made for it::

        checked = checkify.checkify(step)  # step calls check_inputs; checkify is of jax.experimental
        error, results = jax.jit(checked)(...)
        error.throw()

    Args:
      q, k, v, g, beta, g_gamma, p, b, w, initial_state: as in the operator.
      use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel: as in the
        operator.
      use_erase_sigmoid_in_kernel, use_write_sigmoid_in_kernel: as in the operator.
      allow_neg_eigval: whether step sizes, or erase gates, may be up to 2, whether they are raw or not.
      cu_seqlens, segment_ids: as in the operator. A row whose ids are above 0, and 0 at its end, is an error: the zeros
        look like padding, but 0 is a document here.

    Raises:
      ValueError: a shape or type is wrong, or outside of jit a value.

    Cost: one read of every array. Outside of jit it waits for the result.
    """
    doubled = (use_beta_sigmoid_in_kernel or use_erase_sigmoid_in_kernel) and allow_neg_eigval
    x, options, _ = signature.to_records(locals() | dict(allow_neg_eigval=doubled))
    _check_types(x, options)
    checks.check_flags(allow_neg_eigval=allow_neg_eigval)
    checks.check_values(x.arrays().values(), lambda: _find_faults(x, options, allow_neg_eigval))


def _check_types(x: Arguments, options: arguments.Options) -> None:
    """Check the shapes and types that the operator with these arguments checks."""
    if x.b is not None or x.w is not None or x.p is not None:
        (two_keys.COMBA if x.p is not None else two_keys.GDN2).check(x, options)
    elif x.beta is None:
        raw = options.activation.use_gate_in_kernel or options.activation.use_beta_sigmoid_in_kernel
        checks.check(not raw, "`beta` must be an array [B, T, HV] where gates or step sizes are raw; got None.")
        gla.check(x, options)
    else:
        per_channel = getattr(x.g, "ndim", 3) == 4
        (kda if per_channel else gdn).OPERATOR.check(x, options)
    checks.check_initial_state(x.initial_state, (x.num_states, *x.v.shape[2:3], x.q.shape[3], x.v.shape[3]))
    arguments.check_shared(x, options)


def _find_faults(x: Arguments, options: arguments.Options, allow_neg_eigval: bool) -> Iterator[checks.Fault]:
    """Yield the faults that the values of a batch may have."""
    T, raw = x.q.shape[1], options.activation
    if x.cu_seqlens is not None:
        yield _boundaries(x.cu_seqlens, T)
    if x.segment_ids is not None:
        yield _padding(x.segment_ids)
    valid = chunking.valid_tokens(x.cu_seqlens, x.segment_ids, T)
    # Padding may hold anything.
    inside = lambda wrong: wrong if valid is None else chunking.select_tokens(valid, wrong, False)
    everywhere = lambda wrong: wrong
    tokens = ("q", "k", "v", "beta", "p", "b", "w", *(("g",) if raw.use_gate_in_kernel else ()))
    for name in (*tokens, "initial_state", "A_log", "dt_bias"):
        y = getattr(x, name)
        if y is not None:
            where = inside if name in tokens else everywhere
            yield _fault(where(~jnp.isfinite(y)), y, f"`{name}` must be finite")
    if x.g is not None and not raw.use_gate_in_kernel:
        yield from _gates("g", x.g, inside)
    if x.g_gamma is not None:
        yield from _gates("g_gamma", x.g_gamma, everywhere)
    if x.beta is None and x.b is None:
        return
    if x.b is not None:
        beta, name, apart = x.b, "b", raw.use_erase_sigmoid_in_kernel
    else:
        beta, name, apart = x.beta, "beta", raw.use_beta_sigmoid_in_kernel
    if apart:
        beta = gates.step_sizes(beta, raw.allow_neg_eigval, valid)
    else:
        most = 2 if allow_neg_eigval else 1
        rule = f"`{name}` must be from 0 to {most}" + ("" if allow_neg_eigval else ", or to 2 with `allow_neg_eigval`")
        yield _fault(inside((beta < 0) | (beta > most)), beta, rule)
    if not options.use_qk_l2norm_in_kernel:
        yield _lengths(x.k, x.k if x.p is None else x.p, beta, inside)


def _boundaries(cu_seqlens: jax.Array, T: int) -> checks.Fault:
    """Return the fault of boundaries that do not rise from 0 to at most T."""
    first = jnp.arange(cu_seqlens.shape[0]) == 0
    before = jnp.pad(cu_seqlens[:-1], (1, 0))
    wrong = (cu_seqlens < before) | (cu_seqlens > T) | (first & (cu_seqlens != 0))
    return _fault(wrong, cu_seqlens, f"`cu_seqlens` must rise from 0 to at most T = {T}")


def _padding(segment_ids: jax.Array) -> checks.Fault:
    """Return the fault of rows that are padded with zeros: their last ids are 0, and all ids before are above 0."""
    later = jnp.cumsum((segment_ids != 0)[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    trailing = later == 0
    padded = jnp.all(trailing | (segment_ids > 0), axis=1, keepdims=True) & ~jnp.all(trailing, axis=1, keepdims=True)
    rule = "`segment_ids` must be below 0 for padding, because 0 is a document"
    return _fault(trailing & padded, segment_ids, rule, ", the first of the zeros that end a row")


def _gates(name: str, g: jax.Array, where: Where) -> Iterator[checks.Fault]:
    """Yield the faults of gates above 0: first if they are decays in the place of their logs, then all others."""
    decays = (g > 0) & (g <= 1)
    only = ~jnp.any(where(~decays))
    rule = f"`{name}` must be at most 0, the log of a decay"
    yield _fault(where(decays) & only, g, rule, ", and all entries are from 0 to 1: take the log of a decay")
    yield _fault(where(~(g <= 0)), g, rule)


def _lengths(k: jax.Array, p: jax.Array, rate: jax.Array, where: Where) -> checks.Fault:
    """Return the fault of keys that are so long, for step sizes or erase gates, that states grow without bound."""
    product = k.astype(jnp.float32) * p.astype(jnp.float32)
    to_values = lambda y: tiles.repeat_heads(y, rate.shape[2], axis=2)
    rate = rate.astype(jnp.float32)
    channels = rate.ndim == 4
    y = jnp.sum(to_values(product) * rate, axis=3) if channels else rate * jnp.abs(to_values(jnp.sum(product, axis=3)))
    most = 2 * (1 + max(float(jnp.finfo(k.dtype).eps), _ROUNDING))
    rule = (
        "`k` must have |k . p| of at most 2, or states grow"
        if channels or p is not k
        else "`k` must have |k|^2 beta of at most 2, or states grow"
    )
    return _fault(where(y > most), y, rule, "; `use_qk_l2norm_in_kernel` makes keys of unit length")


def _fault(wrong: jax.Array, y: jax.Array, rule: str, more: str = "") -> checks.Fault:
    """Return the fault of an array that is `wrong` in some places; the message has the first one and its value."""
    at = ", ".join(f"{{i{axis}}}" for axis in range(y.ndim))
    integers = jnp.issubdtype(y.dtype, jnp.integer)
    form, y = ("{value}", y) if integers else ("{value:g}", y.astype(jnp.float32))
    return checks.Fault(jnp.any(wrong), f"{rule}; got {form} at [{at}]{more}.", lambda: _first(wrong, y))


def _first(wrong: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Return the indices and the value of the first wrong entry; reductions alone find it, which run on any mesh."""
    found = {}
    for axis in range(y.ndim):
        others = tuple(other for other in range(y.ndim) if other != axis)
        found[f"i{axis}"] = jnp.argmax(jnp.any(wrong, axis=others))
        wrong &= lax.broadcasted_iota(jnp.int32, y.shape, axis) == found[f"i{axis}"]
    return found | dict(value=jnp.sum(jnp.where(wrong, y, jnp.zeros((), y.dtype)), dtype=y.dtype))
