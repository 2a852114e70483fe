"""The implementation "jla" on a CPU, by the plain forms of jax-linear-attention, and compiled for an H100 without one.

`nox -s host-jax-linear-attention`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_compiler
from chunkwise import pipeline
from chunkwise.integrations import jax_linear_attention
from chunkwise.shared.testing.compare import assert_close

gpu_compiler.setup()
B, T, H, HV, K, V = 2, 100, 2, 4, 16, 24
NAMES = ("gated_delta_rule", "kda", "gla", "simple_gla", "gdn2")


@pytest.fixture(autouse=True)
def installed():
    put_back = jax_linear_attention.install()
    yield
    put_back()


def inputs(name, B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=jnp.float32):
    keys = iter(jax.random.split(jax.random.key(0), 9))
    normal = lambda *shape: jax.random.normal(next(keys), shape, dtype)
    uniform = lambda *shape: jax.random.uniform(next(keys), shape)
    x = dict(q=normal(B, T, H, K), k=normal(B, T, H, K) / K**0.5, v=normal(B, T, HV, V))
    x["g"] = -uniform(B, T, HV, K) if name in ("kda", "gla", "gdn2") else -uniform(B, T, HV)
    if name in ("gated_delta_rule", "kda"):
        x["beta"] = uniform(B, T, HV)
    if name == "gdn2":
        x |= dict(b=uniform(B, T, HV, K), w=uniform(B, T, HV, V))
    return x


def results(name, x, implementation, static=(), **arrays):
    """Return the output, the states and all gradients."""
    options = dict(static)

    def loss(x, arrays):
        o, state = getattr(pipeline, f"chunk_{name}")(**x, **arrays, **options, implementation=implementation)
        return jnp.sum(jnp.sin(o)) + (0 if state is None else jnp.sum(jnp.sin(state))), (o, state)

    floating = {n: y for n, y in arrays.items() if jnp.issubdtype(y.dtype, jnp.floating)}
    rest = {n: y for n, y in arrays.items() if n not in floating}
    run = lambda x, floating: loss(x, floating | rest)
    return jax.jit(jax.grad(run, argnums=(0, 1), has_aux=True))(x, floating)


def assert_alike(name, x, static=(), **arrays):
    found = [results(name, x, implementation, static, **arrays) for implementation in ("jla", "xla")]
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        assert_close(name, ours, np.asarray(theirs, np.float64), 2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_states(name):
    """With states in and out, repeated heads, and an array for a scale."""
    state = jax.random.normal(jax.random.key(5), (B, HV, K, V))
    static = dict(output_final_state=True)
    assert_alike(name, inputs(name), static, initial_state=state, scale=jnp.float32(0.3))


@pytest.mark.parametrize("name", NAMES)
def test_packed(name):
    """Padding may hold anything, and gives zeros; boundaries and ids give the same."""
    x = inputs(name, B=1)
    ids = jnp.where(jnp.arange(T) < 90, jnp.arange(T) // 37, -1)[None].astype(jnp.int32)
    x["v"] = jnp.where(ids[..., None, None] < 0, jnp.nan, x["v"])
    assert_alike(name, x, segment_ids=ids)
    assert_alike(name, x, cu_seqlens=jnp.array([0, 37, 74, 90], jnp.int32))


def test_raw_gates():
    """The law of raw gates, the sigmoid of step sizes and unit length."""
    x = inputs("kda")
    x |= dict(A_log=jnp.linspace(-1, 1, HV), dt_bias=jnp.ones((HV, K)))
    names = ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "use_qk_l2norm_in_kernel", "allow_neg_eigval")
    assert_alike("kda", x, dict.fromkeys(names, True))
    x = inputs("simple_gla")
    assert_alike("simple_gla", x, g_gamma=-jnp.linspace(0.1, 1, HV))


def test_refused(monkeypatch):
    x = inputs("kda", B=1)
    with pytest.raises(NotImplementedError, match=r'^"jla" must have no states beside `cu_seqlens`'):
        pipeline.chunk_kda(**x, cu_seqlens=jnp.array([0, 50, T]), output_final_state=True, implementation="jla")
    monkeypatch.setattr(jax_linear_attention, "_JAX", "0.11.1")
    with pytest.raises(ValueError, match=r"^jax must be 0.11.1 for the implementation 'jla'; got 0.11.2\.$"):
        jax_linear_attention.install()


def test_put_back():
    jax_linear_attention.install()()
    with pytest.raises(ValueError, match=r"^`implementation` must be None or one of"):
        pipeline.chunk_kda(**inputs("kda"), implementation="jla")


@pytest.fixture
def hopper(monkeypatch):
    """Let both libraries take this machine for one with an H100."""
    from jla.ops import mosaic_gpu  # noqa: F401
    from jla.ops.mosaic_gpu import _common, scalar_gate, scalar_gate_kb, vector_gate_ops

    for module in (_common, scalar_gate, scalar_gate_kb, vector_gate_ops):
        monkeypatch.setattr(module, "is_hopper", lambda: True)


def launches(name, implementation, gradient: bool, **options) -> int:
    x = jax.eval_shape(functools.partial(inputs, name, 1, 8192, 16, 32, 128, 128, jnp.bfloat16))

    def run(x):
        return getattr(pipeline, f"chunk_{name}")(**x, **options, implementation=implementation)[0]

    def both(x, do):
        o, pullback = jax.vjp(run, x)
        return o, pullback(do)

    program = gpu_compiler.compile_for(both, x, x["v"]) if gradient else gpu_compiler.compile_for(run, x)
    return gpu_compiler.count_launches(program.as_text())


@pytest.mark.parametrize("name", NAMES)
def test_launches_on_an_h100(hopper, record, name):
    """The default takes the kernels there: few launches, where plain JAX has hundreds."""
    options = {} if "gla" in name else dict(use_qk_l2norm_in_kernel=True)
    forward, both = (launches(name, None, gradient, **options) for gradient in (False, True))
    found = dict(operator=name, launches=forward, launches_with_backward=both)
    record("jax-linear-attention", f"{name} for an H100", **found)
    assert forward <= 10
    assert both <= (25 if name == "gated_delta_rule" else 32)


def test_the_rest_is_plain_jax(hopper):
    """Float32 is none of the kernels' types."""
    x = inputs("kda")
    y = jax.make_jaxpr(lambda x: pipeline.chunk_kda(**x)[0])(x)
    assert "pallas_call" not in str(y)
    with pytest.raises(NotImplementedError, match=r'^"jla" must have sizes and types that the kernels'):
        pipeline.chunk_kda(**x, implementation="jla")
