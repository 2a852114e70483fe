"""The way of arguments from the call to an implementation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.call.arguments import Arguments, Options, choose_scale, whole_scale
from chunkwise.shared.implementation import implementations
from chunkwise.shared.implementation.implementations import Implementation
from chunkwise.shared.operator import define
from chunkwise.shared.testing.inputs import spec

x = Arguments(spec(2, 20, 1, 16), spec(2, 20, 1, 16), spec(2, 20, 1, 8))
# What an implementation got takes the place of its output.
KNOWN = [Implementation(name, lambda x, options, _, name=name: ((name, options), None)) for name in ("fused", "xla")]
KNOWN[0] = KNOWN[0]._replace(sizes=lambda x, options, _: implementations.with_chunk_size("fused", x, options))
OPERATOR = define("operator", lambda x, options: None, *KNOWN)


def run(x=x, options=Options(), implementation=None):  # noqa: B008
    got, _ = OPERATOR.chunk(x, options, implementation)
    return got


def test_what_is_filled_in():
    name, options = run()
    # Plain JAX chooses a chunk size for the platform.
    assert (name, options.scale, options.chunk_size) == ("xla", 0.25, None)
    name, options = run(implementation="fused")
    assert (name, options.chunk_size) == ("fused", 32)
    assert run(options=Options(chunk_size=128))[1].chunk_size == 128
    assert run(x._replace(scale=np.float64(2.0)))[1].scale == 2.0


def test_what_is_known_of_sequences():
    assert (x.num_states, x.with_state) == (2, False)
    packed = x._replace(cu_seqlens=spec(5, dtype=jnp.int32), initial_state=spec(4, 1, 16, 8))
    assert (packed.num_states, packed.with_state) == (4, True)


def scale_of(scale):
    y, options = choose_scale(x._replace(scale=scale), Options())
    return y.scale, options.scale


def test_scale():
    assert scale_of(None) == (None, 0.25)
    assert isinstance(scale_of(np.array(0.5))[1], float)
    with jax.enable_x64(True):
        assert scale_of(jnp.float64(0.5))[0].dtype == jnp.float32
    assert jax.jit(lambda s: whole_scale(*choose_scale(x._replace(scale=s), Options())))(3).dtype == jnp.float32


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (dict(options=Options(use_qk_l2norm_in_kernel=spec())), ValueError,
         "`use_qk_l2norm_in_kernel` must be True or False, known when the program is built; got an array float32 ()"),
        (dict(implementation="gpu"), ValueError,
         "`implementation` must be None or one of ('fused', 'xla'); got 'gpu'."),
        (dict(implementation="staged"), NotImplementedError,
         "`implementation` must be None or one of ('fused', 'xla') for this operator; got 'staged'."),
    ],
)  # fmt: skip
def test_errors(arguments, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        run(**arguments)


def test_an_option_that_an_implementation_does_not_read(monkeypatch):
    """By its name a call gets an error, and without a name another implementation, on a TPU and elsewhere."""
    fused, plain = KNOWN
    operator = define("operator", lambda x, options: None, fused._replace(options=frozenset({"config"})), plain)
    options = Options(config=2)
    with pytest.raises(NotImplementedError, match=re.escape('"xla" does not read `config`; got 2.')):
        operator.chunk(x, options, "xla")
    for backend in ("cpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert operator.chunk(x, options, None)[0][0] == "fused"
        both = define("operator", operator.check, fused, plain._replace(options=frozenset({"config"})))
        assert both.chunk(x, options, None)[0][0] == "xla"


def test_sizes_that_an_implementation_does_not_take(monkeypatch):
    fused, plain = KNOWN
    fused = fused._replace(sizes=lambda x, options, _: '"fused" takes no heads at all.')
    operator = define("operator", lambda x, options: None, fused, plain)
    with pytest.raises(NotImplementedError, match=re.escape('"fused" takes no heads at all.')):
        operator.chunk(x, Options(), "fused")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert operator.chunk(x, Options(), None)[0][0] == "xla"
