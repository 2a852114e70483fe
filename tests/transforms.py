"""Transforms of JAX under which a result must not change."""

import jax

from chunkwise.shared.testing import compare

# A policy of `jax.checkpoint` under which an operator whose tokens are split repeats no launch of its forward.
KEEPING = jax.checkpoint_policies.save_only_these_names(
    "chunkwise_context_map", "chunkwise_context_state", "chunkwise_residuals"
)


def _vmapped(fn, args):
    singles = jax.tree.map(lambda x: x[:, None], args)
    return jax.tree.map(lambda x: x[:, 0], jax.vmap(fn)(*singles))


def _exported(fn, args):
    return jax.export.export(jax.jit(fn))(*args).call(*args)


# Ways to run fn(*args) that must not change its result, for functions that map a batch [B, ...] row by row.
TRANSFORMS = {
    "jit": lambda fn, args: jax.jit(fn)(*args),
    "vmap": _vmapped,
    "remat": lambda fn, args: jax.checkpoint(fn)(*args),
    "export": _exported,
}


def assert_transform(transform: str, fn, args) -> None:
    """Fail unless fn(*args) is the same under a transform of TRANSFORMS, and has the types that eval_shape promises."""
    expected = fn(*args)
    promised = jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(fn, *args))
    assert promised == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(TRANSFORMS[transform](fn, args)), strict=True):
        compare.assert_close(transform, got, want, 1e-6)


def assert_traced_once(fn, *batches: tuple, expected=None, tolerance: float = 1e-6) -> None:
    """Fail unless jit(fn) serves all argument tuples with a single trace and calls nothing on the host.

    The results must equal `expected`, a function of the same arguments, up to a tolerance. By default it is fn itself,
    compiled a second time.
    """
    traces = []

    def counted(*args):
        traces.append(args)
        return fn(*args)

    compiled = jax.jit(counted)
    for args in batches:
        wanted = jax.tree.leaves((expected or fn)(*args))
        for want, got in zip(wanted, jax.tree.leaves(compiled(*args)), strict=True):
            compare.assert_close("under jit", got, want, tolerance)
    assert len(traces) == 1, f"traced {len(traces)} times"
    assert "callback" not in compiled.lower(*batches[0]).as_text()
