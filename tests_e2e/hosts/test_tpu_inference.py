"""tpu-inference's own tests of its kernel, out of its wheel, with ours in its place, and ours beside its functions.

`nox -s host-tpu-inference` runs them. Its kernel runs on TPUs only, so it is compiled here, and on a CPU its functions
of plain JAX stand beside ours.
"""

import collections
import functools
import sys
import types
import unittest
from importlib import metadata
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import decode_mixer
from benchmarks.step import MIXTURES
from chunkwise.command.models import Layer
from chunkwise.integrations import tpu_inference
from chunkwise.shared.testing.compare import assert_close
from tests_e2e.hosts.host import count_places, load, module_of, on_v6e, path_of, run_whole
from tests_e2e.hosts.tpu_inference_bundles import load_kernel

# Before the first computation of the process.
jax.config.update("jax_num_cpu_devices", 4)
_GDN = "tpu_inference.kernels.gdn."


KERNEL = load_kernel()
TOKEN_BY_TOKEN = load("tpu-inference", f"{_GDN}reference.ragged_gated_delta_rule_ref")
load("tpu-inference", f"{_GDN}triangle_solver")
CHUNKED = load("tpu-inference", f"{_GDN}reference.ragged_gated_delta_rule_chunked")
W = 4

_FILE = path_of("tpu-inference", "tests/kernels/gdn_attention_v3_test.py")
_THEIRS = module_of(_FILE, "gdn_attention_v3_test", {"tpu_inference.kernels.gdn.v3.wrapper": tpu_inference})

for _name, _value in vars(_THEIRS).items():
    if isinstance(_value, type) and issubclass(_value, unittest.TestCase):
        globals()[_name] = _value


class Backends:
    """The registry of vLLM, which brings torch and kernels for other accelerators: what tpu-inference uses of it."""

    __members__: ClassVar[dict] = {}

    @classmethod
    def register(cls, name: str, path: str) -> None:
        cls.__members__[name] = types.SimpleNamespace(name=name, get_path=lambda: path)


@functools.cache
def attention():
    """Return tpu-inference's backends, and what asks them for a kernel; vLLM and a part of tpu-inference stand in."""
    of, path = types.SimpleNamespace, "tpu_inference.layers.common."
    registry, lazy = of(AttentionBackendEnum=Backends), of(is_in_ray_actor=lambda: False)
    around = {"envs": of(), "ray.lazy_utils": lazy, "v1.attention.backends.registry": registry}
    around = {f"vllm.{name}": module for name, module in around.items()} | {"tpu_inference.envs": of()}
    backends = load("tpu-inference", f"{path}attention_backend", around)
    names, utils = (
        of(ATTN_DATA="data", ATTN_HEAD="model"),
        of(get_mesh_shape_product=lambda mesh, axis: mesh.shape[axis]),
    )
    around = {f"{path}sharding": of(ShardingAxisName=names), "tpu_inference.utils": utils}
    return backends, load("tpu-inference", f"{path}gdn_attention", around)


def test_the_backend_is_registered():
    """The entry point as vLLM calls it, more than once, with tpu-inference's own registration."""
    host, _ = attention()
    sys.modules["tpu_inference"].__spec__ = types.SimpleNamespace(name="tpu_inference")
    (plugin,) = (x for x in metadata.entry_points(group="vllm.general_plugins") if x.name == "chunkwise")
    for _ in range(2):
        plugin.load()()
    assert host.is_registered_attention_backend(Backends.__members__["CHUNKWISE"])
    backend = host.create_linear_attention_backend("chunkwise")
    assert isinstance(backend, host.LinearAttentionBackend)
    assert backend.conv1d_gdn_kernel() is tpu_inference.fused_conv1d_gdn
    assert isinstance(host.create_attention_backend("chunkwise"), host.RPAAttentionBackend)
    assert isinstance(host.create_linear_attention_backend("rpa"), host.GDNLinearAttentionBackend)
    put_back = tpu_inference.install()
    assert host.create_linear_attention_backend("rpa").conv1d_gdn_kernel() is tpu_inference.fused_conv1d_gdn
    put_back()


def test_over_devices():
    """tpu-inference divides requests and heads by a `shard_map`, and calls ours for slots of every device's own."""
    _, module = attention()
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    # The same step with other numbers on each device: the whole has twice its heads and twice its requests.
    (x, sizes), parts = step((1, 1, 7, 12), 2), {}
    for i, j in np.ndindex(2, 2):
        change = lambda y, i=i, j=j: y * (1 + i + 2 * j) if jnp.issubdtype(y.dtype, jnp.floating) else y
        parts[i, j] = jax.tree.map(change, x)
    by_heads = dict.fromkeys(("qkv", "b", "a"), 1) | dict(conv_state=2, recurrent_state=1)
    weights = ("conv_weight", "a_log", "dt_bias")

    def whole(name):
        if name in weights:
            return jnp.concatenate([x[name]] * 2)
        rows = [[parts[i, j][name] for j in range(2)] for i in range(2)]
        joined = [jnp.concatenate(row, axis=by_heads[name]) if name in by_heads else row[0] for row in rows]
        return jnp.concatenate(joined)

    order = (
        "qkv", "b", "a", "conv_state", "recurrent_state", "conv_weight", "conv_bias", "a_log", "dt_bias",
        "state_indices", "query_start_loc", "distribution", "seq_lens",
    )  # fmt: skip
    arrays = [None if name == "conv_bias" else whole(name) for name in order]
    run = lambda *arrays: module.run_jax_gdn_attention(
        *arrays, 2 * sizes["n_kq"], 2 * sizes["n_v"], sizes["d_k"], sizes["d_v"], W, mesh
    )  # fmt: skip
    put_back, calls = tpu_inference.install(), collections.Counter()
    count_places(put_back, calls)
    (conv, state), out = jax.jit(run)(*arrays)
    put_back()
    assert calls.keys() == {place.label for place in put_back.places}
    alone = jax.jit(functools.partial(tpu_inference.fused_conv1d_gdn, kernel_size=W, **sizes))
    for (i, j), part in parts.items():
        (want_conv, want_state), want = alone(**part | {name: x[name] for name in weights})
        rows = ("conv", conv, want_conv, 2), ("state", state, want_state, 1), ("out", out, want, 1)
        for name, y, ref, axis in rows:
            own = jnp.split(jnp.split(y, 2)[i], 2, axis=axis)[j]
            assert_close(name, own, np.asarray(ref, np.float64), 1e-6)


def step(lengths, decodes, H=2, HV=4, size=32, dtype=jnp.float32):
    """Return what a step of tpu-inference has, and the sizes; every other request is new."""
    T, N, dim = sum(lengths), len(lengths), (2 * H + HV) * size
    keys = iter(jax.random.split(jax.random.key(0), 9))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    x = dict(
        qkv=normal(T, dim), b=normal(T, HV), a=normal(T, HV), conv_state=normal(N + 1, W - 1, dim),
        recurrent_state=normal(N + 1, HV, size, size), conv_weight=normal(dim, 1, W), conv_bias=None,
        a_log=normal(HV), dt_bias=normal(HV),
    )  # fmt: skip
    x |= {name: x[name].astype(dtype) for name in ("qkv", "b", "a", "conv_state")}
    lengths = jnp.asarray(lengths, jnp.int32)
    slots = jnp.arange(1, N + 1, dtype=jnp.int32)
    x |= dict(
        query_start_loc=jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0)), state_indices=slots,
        distribution=jnp.asarray([decodes, decodes, N], jnp.int32), seq_lens=lengths + 5 * (slots % 2),
        read_state_indices=slots,
    )  # fmt: skip
    return x, dict(n_kq=H, n_v=HV, d_k=size, d_v=size)


def ours(x, sizes):
    """Return pool and output of the operator alone: its convolution passes its inputs on."""
    identity = jnp.zeros_like(x["conv_weight"]).at[:, 0, -1].set(1)
    return tpu_inference.fused_conv1d_gdn(**x | dict(conv_weight=identity), kernel_size=W, **sizes)


def theirs(x, sizes):
    """Return pool and output of the step, token by token."""
    at = (x[name] for name in ("query_start_loc", "state_indices", "distribution"))
    has = x["seq_lens"] > jnp.diff(x["query_start_loc"])
    return TOKEN_BY_TOKEN.ragged_gated_delta_rule(
        x["qkv"], x["b"], x["a"], x["recurrent_state"], x["a_log"], x["dt_bias"], *at, has, **sizes
    )


def their_decodes(x, sizes):
    """Return pool and output of a step of decodes."""
    qkv = jax.nn.silu(x["qkv"])
    q, k, v = jnp.split(qkv.reshape(len(qkv), -1, sizes["d_k"]), [sizes["n_kq"], 2 * sizes["n_kq"]], axis=1)
    q, k = (jnp.repeat(y, sizes["n_v"] // sizes["n_kq"], axis=1) for y in (q, k))
    at = (x[name] for name in ("a_log", "dt_bias", "query_start_loc", "state_indices", "distribution"))
    return CHUNKED.ragged_gated_delta_rule_decode_only(q, k, v, x["b"], x["a"], x["recurrent_state"], *at, True)


@pytest.mark.parametrize("lengths", [(1, 1, 7, 40), (1,) * 8])
def test_beside(lengths):
    decodes = lengths.count(1)
    x, sizes = step(lengths, decodes)
    if decodes == len(lengths):
        # That function starts no sequence.
        x["seq_lens"] = jnp.full(len(lengths), 6)
    (_, state), out = jax.jit(functools.partial(ours, sizes=sizes))(x)
    for function in (theirs, their_decodes) if decodes == len(lengths) else (theirs,):
        want, o = jax.jit(functools.partial(function, sizes=sizes))(x)
        assert_close("recurrent_state", state, np.asarray(want, np.float64), 1e-5)
        assert_close("out", out, np.asarray(o, np.float64), 1e-5)


@pytest.mark.parametrize("form", ["64 decodes", "a prompt of 8,192 tokens"])
def test_temporaries_on_v6e(form):
    """What XLA needs besides arguments and results in the step with its convolution, of Qwen3-Next's heads."""
    lengths, decodes = ((1,) * 64, 64) if form == "64 decodes" else ((8192,), 0)
    sizes = dict(n_kq=16, n_v=32, d_k=128, d_v=128)
    run = lambda x, module, **options: module.fused_conv1d_gdn(**x, kernel_size=W, **sizes, **options)
    both = (functools.partial(run, module=KERNEL), functools.partial(run, module=tpu_inference, implementation="fused"))
    print(f"\n{form}:", end=" ")
    shapes = jax.eval_shape(lambda: step(lengths, decodes, 16, 32, 128, jnp.bfloat16)[0])
    found = on_v6e(*both, shapes, auto_layout=True)
    # Those of a step of decodes are small: one state has 2 MiB.
    assert found["ours"] < max(found["theirs"], 2**21)


@pytest.mark.parametrize(("H", "HV"), [(2, 4), (2, 8)])
def test_bundles_of_a_decode(H, HV, record):
    """Both have the convolution, the gates and the rule of 64 decodes over a bfloat16 pool; ours has the norm too."""
    theirs = run_whole("tpu_inference_bundles", dict(H=H, HV=HV, chip="v6e"))
    mixer = Layer("gated_delta_rule", H=H, HV=HV)
    ours = decode_mixer.estimate(mixer, MIXTURES["decode-64-bfloat16"], "v6e", timeout=600)
    row = dict(theirs=theirs["bundles"] / theirs["sequences"], ours=ours["decode_bundles"] / 64)
    record("tpu-inference", f"a decode, {H} / {HV} heads, v6e", jax=theirs["jax"], bundles=row)
    assert row["ours"] < row["theirs"]
