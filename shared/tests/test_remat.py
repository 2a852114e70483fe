"""What a program reads decides which of two functions it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.implementation.remat import unless_unread

TRANSFORMS = {
    "jit": lambda fn: fn,
    "nested jit": jax.jit,
    "vmap": lambda fn: jax.vmap(fn, in_axes=(0, None)),
    "remat": jax.checkpoint,
    "scan": lambda fn: lambda x, y: jax.lax.scan(lambda _, x: (None, fn(x, y)), None, x)[1],
}


def pair(x, y):
    """A pair of trees: whole multiplies by a sine, part by a cosine of another phase."""
    whole = lambda x, y: (dict(a=x * jnp.sin(y)), (x.astype(jnp.bfloat16), x + y))
    part = lambda x, y: dict(a=x * jnp.cos(y - np.pi / 2))
    return unless_unread(whole, part, x, y)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_is_read_is_computed(transform):
    x, y = jnp.arange(4.0), jnp.float32(0.3)
    fn = TRANSFORMS[transform](pair)
    for read in (True, False):
        program = jax.jit(lambda x, y, read=read: fn(x, y) if read else fn(x, y)[0])
        text = program.lower(x, y).as_text()
        assert ("stablehlo.sine" in text, "stablehlo.cosine" in text) == (read, not read)
        kept, rest = program(x, y) if read else (program(x, y), None)
        np.testing.assert_allclose(kept["a"], x * np.sin(0.3), rtol=1e-6)
        if read:
            assert rest[0].dtype == jnp.bfloat16
            np.testing.assert_array_equal(rest[1], x + y)
