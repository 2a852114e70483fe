"""The hosts' conventions, restated: what they call, and the recurrence in float64 token by token."""

import abc
import functools
import importlib.machinery
import importlib.util
import inspect
import re
import subprocess
import sys
import types
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import integrations
from chunkwise.integrations import levanter, maxtext, replacing, sglang_jax, tpu_inference
from chunkwise.layers import GatedDeltaNetConfig, gated_delta_net, init_gated_delta_net, load_gated_delta_net
from chunkwise.shared.testing.compare import assert_close

HOSTS = ("flax", "haliax", "levanter", "maxtext", "sgl_jax", "tpu_inference", "vllm")
# The same step with gates per channel.
THOROUGH = dict(
    test_tpu_inference_step=lambda law: law != "gdn",
    test_levanter_takes_axes_in_any_order=True,
    # Documents that do not see one another are a layer that does not leak.
    test_maxtext_layer_does_not_leak=True,
    test_sglang_jax=lambda form: form == "prefill",
    # The session of the host runs its backends.
    test_sglang_jax_backends_pass_the_pool_on=True,
    # Packs of the operators have documents.
    test_maxtext_documents_do_not_see_one_another=True,
)
# The parameters of what each of ours stands for, as the hosts declare them; ours may have keywords more.
SIGNATURES = {
    (maxtext, "jax_chunk_gated_delta_rule"): "query key value g beta chunk_size=64 initial_state=None "
    "use_qk_norm_in_gdn=False cp_axis=None compute_dtype",
    (maxtext, "jax_ar_gated_delta_rule"): "query key value g beta initial_state use_qk_norm_in_gdn=False compute_dtype",
    (tpu_inference, "fused_conv1d_gdn"): "qkv b a conv_state recurrent_state conv_weight conv_bias a_log dt_bias "
    "query_start_loc state_indices distribution seq_lens read_state_indices read_offsets=None n_kq n_v d_k d_v "
    "kernel_size num_spec_tokens=0 zero_initialize_out=True compute_precision decode_tile_size=4 mixed_tile_size=64",
    (sglang_jax, "decode_gated_delta_rule"): "mixed_qkv b a recurrent_state A_log dt_bias state_indices n_kq n_v d_k "
    "d_v has_initial_state=None track_indices=None track_mask=None",
    (sglang_jax, "prefill_gated_delta_rule"): "mixed_qkv b a recurrent_state A_log dt_bias cu_seqlens state_indices "
    "has_initial_state n_kq n_v d_k d_v chunk_size=64 track_indices=None track_mask=None",
    (levanter, "chunk_gated_delta_rule"): "query key value g beta chunk_size=64 initial_state=None "
    "output_final_state=False use_qk_l2norm_in_kernel=True",
    (levanter, "recurrent_gated_delta_rule"): "query key value g beta initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=True",
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "expected"), SIGNATURES.items(), ids=[f"{m.__name__[23:]}.{n}" for m, n in SIGNATURES]
)
def test_signatures(place, expected):
    module, name = place
    found = []
    for parameter in inspect.signature(getattr(module, name)).parameters.values():
        written = isinstance(parameter.default, int | None) and "dtype" not in parameter.name
        found.append(f"{parameter.name}={parameter.default}" if written else parameter.name)
    assert found[: len(expected.split())] == expected.split()


def test_no_host_is_imported():
    modules = ", ".join(f"chunkwise.integrations.{x}" for x in ("levanter", "maxtext", "sglang_jax", "tpu_inference"))
    code = f"import sys, {modules}; assert not set({HOSTS}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def unit(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def advance(state, q, k, v, g, beta=None):
    """Return the state [HV, K, V] after a token, and the output [HV, V]; g is [HV] or [HV, K]."""
    heads = state.shape[0] // q.shape[0]
    q, k = (np.repeat(x, heads, axis=0) for x in (q, k))
    state = state * np.exp(g)[..., None] if g.ndim == 2 else state * np.exp(g)[:, None, None]
    if beta is not None:
        v = beta[:, None] * (v - np.einsum("hk,hkv->hv", k, state))
    state = state + k[:, :, None] * v[:, None]
    return state, np.einsum("hk,hkv->hv", q, state)


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def doubles(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


# What `install` replaces: names of a host's modules.
GDN_BACKEND, KDA_BACKEND, LIGHTNING_BACKEND = (
    f"sgl_jax.srt.layers.attention.linear.{name}_backend" for name in ("gdn", "kda", "lightning")
)
REPLACED = {
    maxtext: {"maxtext.models.qwen3": ("jax_chunk_gated_delta_rule", "jax_ar_gated_delta_rule")},
    levanter: {"levanter.layers.gated_deltanet": ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")},
    sglang_jax: {
        GDN_BACKEND: (
            "decode_gated_delta_rule_ref", "chunked_gated_delta_rule_jax", "fused_chunk_parallel_prefill",
            "validate_fused_chunk_parallel_capability",
        ),
        KDA_BACKEND: ("KDAAttnBackend",),
        LIGHTNING_BACKEND: ("LightningAttnBackend",),
        "sgl_jax.srt.entrypoints.engine": ("run_scheduler_process",),
    },
}  # fmt: skip


def stand_in(monkeypatch, name: str, **members):
    """Put a module that has only these members, and the packages that it lies in, where a host is missing."""
    for end in range(1, name.count(".") + 1):
        package = ".".join(name.split(".")[:end])
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, types.ModuleType("package"))
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)


def with_functions(monkeypatch, path: str, names, reader: str = "layer") -> dict:
    """Put a module with functions of these names, which another one of its functions reads, and return them."""
    stand_in(monkeypatch, path, __name__=path)
    module = sys.modules[path]
    for name in names:
        exec(f"def {name}(*arguments, **options): ...", vars(module))
    exec(f"def {reader}(x): return lambda: ({', '.join(names)},)", vars(module))
    return {name: getattr(module, name) for name in names}


@pytest.fixture
def replaced(request, monkeypatch):
    """Return a module of chunkwise, and what it replaces by module and name, of a host that stands in."""
    module = request.param
    theirs = {}
    for path, names in REPLACED[module].items():
        if names[0].endswith("AttnBackend"):
            found = {name: type(name, (), {"__module__": path}) for name in names}
            stand_in(monkeypatch, path, **found)
        else:
            found = with_functions(monkeypatch, path, names)
        theirs |= {(path, name): value for name, value in found.items()}
        if path == GDN_BACKEND:
            backend = type("GDNAttnBackend", (), {"_forward_extend_chunked_jax": lambda self: None})
            sys.modules[path].GDNAttnBackend = backend
    yield module, theirs
    # It has the stand-ins in it.
    if sys.modules.pop("chunkwise.integrations.sglang_backends", None):
        del integrations.sglang_backends


@pytest.mark.parametrize("replaced", REPLACED, indirect=True, ids=lambda module: module.__name__[23:])
def test_install(replaced):
    """All names are ours after it, and the host's again in the end; a second installation changes nothing."""
    module, theirs = replaced
    now = lambda: {(path, name): getattr(sys.modules[path], name) for path, name in theirs}
    put_back = module.install()
    ours = now()
    assert not any(ours[place] is theirs[place] for place in theirs)
    said = str(put_back).splitlines()
    assert said[0] == "chunkwise replaces, until this is called:"
    assert [line.split(" -> ")[0] for line in said[1:]] == [".".join(place) for place in theirs]
    module.install()()
    assert now() == ours
    put_back()
    assert now() == theirs


SEAM = "levanter.layers.gated_deltanet"
FUNCTIONS = REPLACED[levanter][SEAM]


def assert_refused(error, message):
    """An installation is an error, and replaces nothing."""
    before = dict(vars(sys.modules[SEAM]))
    with pytest.raises(error, match=message):
        levanter.install()
    assert vars(sys.modules[SEAM]) == before


def test_install_refuses_a_host_without_a_name(monkeypatch):
    with_functions(monkeypatch, SEAM, FUNCTIONS[:1])
    assert_refused(AttributeError, "recurrent_gated_delta_rule")


@pytest.mark.parametrize("moved", ["all", "layer"])
def test_install_refuses_a_host_whose_layer_has_moved(monkeypatch, moved):
    """The layer reads the names of its own module; the old module passes names on, or has the functions alone."""
    elsewhere = with_functions(monkeypatch, "levanter.layers.moved", FUNCTIONS)
    elsewhere["layer"] = type("Layer", (), {"__call__": sys.modules["levanter.layers.moved"].layer})
    if moved == "all":
        stand_in(monkeypatch, SEAM, **elsewhere)
    else:
        with_functions(monkeypatch, SEAM, FUNCTIONS)
        monkeypatch.setattr(sys.modules[SEAM], "layer", elsewhere["layer"])
    assert_refused(AttributeError, f"{SEAM}.chunk_gated_delta_rule must be read where it is replaced; nothing reads it")


@pytest.mark.parametrize("decorated", ["method", "wrapped", "closure", "partial", "static"])
def test_install_finds_a_layer_behind_decorators(monkeypatch, decorated):
    with_functions(monkeypatch, SEAM, FUNCTIONS)
    module = sys.modules[SEAM]
    layer = module.layer
    module.layer = {
        "method": lambda: type("Layer", (), {"__call__": layer}),
        "wrapped": lambda: jax.jit(layer),
        "closure": lambda: lambda x: layer(x),
        "partial": lambda: functools.partial(layer, None),
        "static": lambda: type("Layer", (), {"run": staticmethod(layer), "size": property(lambda self: 1)}),
    }[decorated]()
    levanter.install()()


@pytest.mark.parametrize(
    ("theirs", "fits"),
    [
        ("query, key, value, g, beta, *, chunk_size=64", True),
        ("query, key, value, g, beta, *, initial_state=None, output_final_state=False", True),
        ("query, key, value, g, beta, *, segments=None", False),
        ("query, key, value, gate, beta", False),
        ("query, key, value, beta, g", False),
        ("query, key, value, g", False),
        ("query, key, value, g, beta, state", False),
    ],
)
def test_install_compares_arguments(monkeypatch, theirs, fits):
    with_functions(monkeypatch, SEAM, FUNCTIONS)
    exec(f"def chunk_gated_delta_rule({theirs}): ...", vars(sys.modules[SEAM]))
    if fits:
        levanter.install()()
    else:
        assert_refused(
            TypeError, rf"{SEAM}.chunk_gated_delta_rule takes \({re.escape(theirs)}\) in this version of the"
        )


def test_install_compares_methods(monkeypatch):
    """Of a class whose place one of ours takes, and of a class that gets a method of ours."""

    class Host:
        def step(self, q, k): ...
        def other(self): ...

    class Ours:
        def step(self, q, k, scale=None): ...
        def more(self, x): ...

    class Wrong:
        def step(self, k, q): ...

    Host.__module__ = SEAM
    stand_in(monkeypatch, SEAM, Host=Host, __name__=SEAM)
    place = replacing.Place(sys.modules[SEAM], "Host", Ours, imported=True)
    replacing.replace(place)()
    Wrong.__module__ = Wrong.step.__module__ = "chunkwise.wrong"
    with pytest.raises(
        TypeError, match=r"Host.step takes \(self, q, k\) in this version of the host; got \(self, k, q\)"
    ):
        replacing.replace(place._replace(value=Wrong))
    with pytest.raises(TypeError, match=r"Host.step takes"):
        replacing.replace(replacing.Place(Host, "step", Wrong.step))


# MaxText


def maxtext_inputs(B=2, S=40, H=2, K=16, V=16):
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, B, S, H, K), normal(rng, B, S, H, K), normal(rng, B, S, H, V)
    return q, k, v, -jnp.abs(normal(rng, B, S, H)), jax.nn.sigmoid(normal(rng, B, S, H)), normal(rng, B, H, K, V)


def maxtext_reference(q, k, v, g, beta, state, begins=()):
    """Return o and the states; a row forgets its state before every token of `begins`."""
    q, k, v, g, beta, states = doubles(q, k, v, g, beta, state)
    q, k, o, states = unit(q) * q.shape[-1] ** -0.5, unit(k), np.zeros_like(v), states.copy()
    for row, t in np.ndindex(*v.shape[:2]):
        start = np.zeros_like(states[row]) if t in begins else states[row]
        states[row], o[row, t] = advance(start, q[row, t], k[row, t], v[row, t], g[row, t], beta[row, t])
    return o, states


def test_maxtext_operators():
    *arrays, state = maxtext_inputs()
    options = dict(use_qk_norm_in_gdn=True, compute_dtype=jnp.float32)
    want, states = maxtext_reference(*arrays, state)
    o, after = maxtext.jax_chunk_gated_delta_rule(*arrays, initial_state=state, chunk_size=32, **options)
    assert_close("o", o, want, 1e-6)
    assert_close("state", after, states, 1e-6)
    assert maxtext.jax_chunk_gated_delta_rule(*arrays)[1] is None
    token = [x[:, :1] for x in arrays]
    o, after = maxtext.jax_ar_gated_delta_rule(*token, state, **options)
    want, states = maxtext_reference(*token, state)
    assert_close("o of a token", o, want, 1e-6)
    assert_close("state of a token", after, states, 1e-6)


def test_maxtext_rounds_to_the_type_that_it_is_told():
    *arrays, state = maxtext_inputs()
    o, after = maxtext.jax_chunk_gated_delta_rule(*arrays, initial_state=state, use_qk_norm_in_gdn=True)
    assert (o.dtype, after.dtype) == (jnp.float32, jnp.bfloat16)
    q, k, v, g, beta = arrays
    rounded = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (q, k, v)]
    want, _ = maxtext_reference(*rounded, g, beta.astype(jnp.bfloat16).astype(jnp.float32), state)
    assert_close("o", o, want, 5e-3)


def test_maxtext_documents_do_not_see_one_another():
    """MaxText counts segments from 1, and 0 is padding."""
    *arrays, state = maxtext_inputs(B=1)
    ids = jnp.asarray([[1] * 15 + [2] * 20 + [0] * 5])
    o, _ = maxtext.jax_chunk_gated_delta_rule(
        *arrays, use_qk_norm_in_gdn=True, compute_dtype=jnp.float32, segment_ids=ids
    )
    want, _ = maxtext_reference(*arrays, 0 * state, begins=(0, 15))
    assert_close("o", o[:, :35], want[:, :35], 1e-6)
    assert not np.any(o[:, 35:])


CONFIG = GatedDeltaNetConfig(D=12, H=2, HV=4, K=8, V=8)


def test_maxtext_weights_go_both_ways():
    """The names and the order of channels are those of Qwen3-Next, whose loader reads the same arrays."""
    weights = init_gated_delta_net(jax.random.key(0), CONFIG)
    params = maxtext.save_qwen3_next(weights, CONFIG)
    again = maxtext.load_qwen3_next(params, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, weights, again)
    named = {
        "in_proj_qkvz.weight": params["in_proj_qkvz"]["kernel"].T,
        "in_proj_ba.weight": params["in_proj_ba"]["kernel"].T,
        "conv1d.weight": params["conv1d"]["kernel"].transpose(2, 1, 0),
        "A_log": params["A_log"],
        "dt_bias": params["dt_bias"],
        "norm.weight": params["norm"]["rms_norm"]["scale"],
        "out_proj.weight": params["out_proj"]["kernel"].T,
    }
    jax.tree.map(np.testing.assert_array_equal, weights, load_gated_delta_net(named, CONFIG))


def test_maxtext_layer_does_not_leak():
    weights = maxtext.load_qwen3_next(
        maxtext.save_qwen3_next(init_gated_delta_net(jax.random.key(0), CONFIG), CONFIG), CONFIG
    )
    x = normal(np.random.default_rng(1), 1, 20, CONFIG.D)
    ids = jnp.asarray([[1] * 9 + [2] * 8 + [0] * 3])
    packed, _ = gated_delta_net(x, weights, CONFIG, segment_ids=ids, padding_id=0)
    alone, _ = gated_delta_net(x[:, 9:17], weights, CONFIG)
    assert_close("the second document", packed[:, 9:17], alone, 1e-6)


def test_maxtext_errors():
    params = maxtext.save_qwen3_next(init_gated_delta_net(jax.random.key(0), CONFIG), CONFIG)
    with pytest.raises(ValueError, match=r"`params` must have \['A_log', .*; got \['A_log', "):
        maxtext.load_qwen3_next({name: x for name, x in params.items() if name != "norm"}, CONFIG)
    with pytest.raises(ValueError, match=r"`params` must have dt_bias of shape \(4,\); got \(3,\)\."):
        maxtext.load_qwen3_next(params | {"dt_bias": jnp.ones(3)}, CONFIG)


# tpu-inference and SGLang-JAX

N_KQ, N_V, D, W, SLOTS = 2, 4, 8, 4, 12
SIZES = dict(n_kq=N_KQ, n_v=N_V, d_k=D, d_v=D)
DIM = (2 * N_KQ + N_V) * D


def serving_inputs(T, a_columns=N_V):
    rng = np.random.default_rng(2)
    return dict(
        qkv=normal(rng, T, DIM), b=normal(rng, T, N_V), a=normal(rng, T, a_columns),
        conv_state=normal(rng, SLOTS, W - 1, DIM), recurrent_state=normal(rng, SLOTS, N_V, D, D),
        conv_weight=normal(rng, DIM, 1, W), conv_bias=normal(rng, DIM), a_log=normal(rng, N_V),
        dt_bias=normal(rng, a_columns),
    )  # fmt: skip


def rates(a, a_log, dt_bias, law="gdn"):
    """Return the log decay of every token."""
    shape = (len(a), N_V, -1) if law == "kda" else (len(a), N_V)
    a = (a + dt_bias).reshape(shape)
    rate = np.exp(a_log)[:, None] if law == "kda" else np.exp(a_log)
    return -rate * np.logaddexp(0, a)


def convolved(x, before, weight, bias):
    """Return silu of the convolution of a request, and its inputs with those before it."""
    whole = np.concatenate([before, x])
    y = sum(whole[i : i + len(x)] * weight[:, 0, i] for i in range(W)) + bias
    return y * sigmoid(y), whole


def serve(x, requests, law="gdn", skip=None):
    """Return pools and output of a step. A request is (start, end, slot read or None, slots written by token)."""
    x = {name: np.asarray(y, np.float64) for name, y in x.items()}
    conv, state, out = x["conv_state"].copy(), x["recurrent_state"].copy(), np.zeros((len(x["qkv"]), N_V * D))
    for start, end, read, writes in requests:
        tokens = slice(start, end)
        before, S = (np.zeros_like(y[0]) if read is None else y[read] for y in (x["conv_state"], x["recurrent_state"]))
        y, inputs = convolved(x["qkv"][tokens], before, x["conv_weight"], x["conv_bias"])
        if law == "mamba2":
            v, k, q = (part.reshape(len(y), -1, D) for part in np.split(y, [N_V * D, (N_V + N_KQ) * D], axis=1))
            dt = np.logaddexp(0, x["b"][tokens] + x["dt_bias"])
            g, u, beta = -np.exp(x["a_log"]) * dt, dt[..., None] * v, [None] * len(y)
        else:
            q, k, u = (part.reshape(len(y), -1, D) for part in np.split(y, [N_KQ * D, 2 * N_KQ * D], axis=1))
            q, k = unit(q) * D**-0.5, unit(k)
            g, beta = rates(x["a"][tokens], x["a_log"], x["dt_bias"], law), sigmoid(x["b"][tokens])
        for t in range(len(y)):
            S, o = advance(S, q[t], k[t], u[t], g[t], beta[t])
            out[start + t] = (o if skip is None else o + skip[:, None] * v[t]).reshape(-1)
            if t in writes:
                conv[writes[t]], state[writes[t]] = inputs[t + 1 : t + W], S
    return conv, state, out


def assert_served(got, want):
    (conv, state), out = got
    for name, y, ref in zip(("conv_state", "recurrent_state", "out"), (conv, state, out), want, strict=True):
        assert_close(name, y, ref, 2e-6)


# Two decodes, a prompt that goes on from a slot of another, and a new one in a slot that holds something; the rest of
# the stream and of the requests is padding.
MIXED = dict(
    query_start_loc=jnp.asarray([0, 1, 2, 9, 20, 20], jnp.int32),
    state_indices=jnp.asarray([3, 7, 1, 5, 0], jnp.int32),
    distribution=jnp.asarray([2, 2, 4], jnp.int32),
    seq_lens=jnp.asarray([9, 4, 30, 11, 0], jnp.int32),
    read_state_indices=jnp.asarray([3, 7, 2, 5, 0], jnp.int32),
)
REQUESTS = [(0, 1, 3, {0: 3}), (1, 2, 7, {0: 7}), (2, 9, 2, {6: 1}), (9, 20, None, {10: 5})]
T = 23


def jitted(function, **static):
    return jax.jit(lambda arrays: function(**arrays, **static))


@pytest.mark.parametrize("law", ["gdn", "kda", "mamba2"])
def test_tpu_inference_step(law):
    x = serving_inputs(T, N_V * D if law == "kda" else N_V)
    if law == "mamba2":
        skip = normal(np.random.default_rng(3), N_V)
        names = dict(qkv="xbc", b="dt", recurrent_state="ssm_state")
        arrays = {names.get(name, name): y for name, y in x.items() if name != "a"} | dict(skip=skip)
        got = jitted(tpu_inference.fused_conv1d_mamba2, kernel_size=W, **SIZES)(arrays | MIXED)
        assert_served(got, serve(x, REQUESTS, law, np.asarray(skip, np.float64)))
        return
    function = {"gdn": tpu_inference.fused_conv1d_gdn, "kda": tpu_inference.fused_conv1d_kda}[law]
    want = serve(x, REQUESTS, law)
    assert_served(jitted(function, kernel_size=W, **SIZES)(x | MIXED), want)
    if law == "kda":
        activated = jitted(function, kernel_size=W, beta_is_activated=True, **SIZES)
        assert_served(activated(x | MIXED | dict(b=jax.nn.sigmoid(x["b"]))), want)


def test_tpu_inference_decodes_are_one_launch():
    sizes = dict(n_kq=2, n_v=4, d_k=128, d_v=128)
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    x = dict(qkv=of(8, 1024), b=of(8, 4), a=of(8, 4), conv_state=of(9, 3, 1024), recurrent_state=of(9, 4, 128, 128))
    x |= dict(conv_weight=of(1024, 1, 4), conv_bias=None, a_log=of(4), dt_bias=of(4))
    step = jax.tree.map(lambda y: of(*y.shape, dtype=y.dtype), MIXED)
    serve = lambda x, step, kind: tpu_inference.fused_conv1d_gdn(
        **x, **step, **sizes, kernel_size=4, implementation=kind
    )
    names = {
        kind: str(jax.make_jaxpr(lambda *args, kind=kind: serve(*args, kind))(x, step)) for kind in ("fused", "xla")
    }
    assert "decode_mixer_fwd" in names["fused"]
    assert "decode_mixer_fwd" not in names["xla"]


def test_tpu_inference_speculation():
    """A decode goes on from an accepted token and leaves a state for each of its own; a prompt has no offset."""
    at = dict(
        query_start_loc=jnp.asarray([0, 3, 5, 12], jnp.int32),
        state_indices=jnp.asarray([1, 4, 9], jnp.int32),
        distribution=jnp.asarray([2, 2, 3], jnp.int32),
        seq_lens=jnp.asarray([9, 4, 30], jnp.int32),
        read_state_indices=jnp.asarray([1, 4, 7], jnp.int32),
        read_offsets=jnp.asarray([2, 0, 1], jnp.int32),
    )
    x = serving_inputs(T)
    want = serve(x, [(0, 3, 3, {0: 1, 1: 2, 2: 3}), (3, 5, 4, {0: 4, 1: 5}), (5, 12, 7, {6: 9})])
    assert_served(jitted(tpu_inference.fused_conv1d_gdn, kernel_size=W, num_spec_tokens=2, **SIZES)(x | at), want)


def test_tpu_inference_errors():
    x = serving_inputs(T)
    with pytest.raises(ValueError, match=r"`conv_weight` must have shape \(64, 1, 3\); got \(64, 1, 4\)\."):
        tpu_inference.fused_conv1d_gdn(**x, **MIXED, kernel_size=3, **SIZES)
    with pytest.raises(ValueError, match=r"`qkv` must have 80 channels, as its heads have; got 64\."):
        tpu_inference.fused_conv1d_gdn(**x, **MIXED, kernel_size=W, **SIZES | dict(n_kq=3))


def test_tpu_inference_registers(monkeypatch):
    """vLLM calls the entry point, and tpu-inference gets a linear attention of its own kind and a class by its path."""
    (plugin,) = (x for x in metadata.entry_points(group="vllm.general_plugins") if x.name == "chunkwise")
    registered, rpa, base = {}, type("RPAAttentionBackend", (), {}), abc.ABCMeta("LinearAttentionBackend", (), {})
    stand_in(
        monkeypatch, "tpu_inference.layers.common.attention_backend", RPAAttentionBackend=rpa,
        LinearAttentionBackend=base,
        register_attention_backend=lambda name, **options: registered.setdefault(name, []).append(options),
    )  # fmt: skip
    found = importlib.machinery.ModuleSpec("tpu_inference", None)
    monkeypatch.setattr(importlib.util, "find_spec", {"tpu_inference": found}.get)
    for _ in range(2):
        plugin.load()()
    path = "chunkwise.integrations.tpu_inference.ChunkwiseAttentionBackend"
    linear = tpu_inference.ChunkwiseLinearAttention
    assert registered == {"chunkwise": [dict(attention=rpa, vllm_backend=path, linear_attention=linear)] * 2}
    assert isinstance(linear(), base)
    assert linear().conv1d_gdn_kernel() is tpu_inference.fused_conv1d_gdn
    impl, backend = type("PallasAttentionBackendImpl", (), {}), type("PallasAttentionBackend", (), {})
    stand_in(
        monkeypatch, "tpu_inference.layers.vllm.backends.flash_attn", PallasAttentionBackendImpl=impl,
        PallasAttentionBackend=backend,
    )  # fmt: skip
    made = tpu_inference.ChunkwiseAttentionBackend
    assert issubclass(made, backend)
    assert made.get_name() == "CHUNKWISE"
    assert issubclass(made.get_impl_cls(), impl)
    assert made.get_impl_cls().attention_backend == "chunkwise"
    del tpu_inference.ChunkwiseAttentionBackend


def test_tpu_inference_install(monkeypatch):
    """The backend that is the default gives ours, until it is put back."""
    default = type("GDNLinearAttentionBackend", (), {"conv1d_gdn_kernel": lambda self: None})
    path = "tpu_inference.layers.common.attention_backend"
    stand_in(monkeypatch, path, GDNLinearAttentionBackend=default)
    put_back = tpu_inference.install()
    assert default().conv1d_gdn_kernel() is tpu_inference.fused_conv1d_gdn
    put_back()
    assert default().conv1d_gdn_kernel() is None


def test_tpu_inference_without_the_host(monkeypatch):
    """On a GPU vLLM calls the entry point too."""
    monkeypatch.setitem(sys.modules, "tpu_inference", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    tpu_inference.register()
    with pytest.raises(AttributeError):
        tpu_inference.nothing  # noqa: B018


def tracked(x, requests):
    """Return the same step without a convolution, as SGLang-JAX calls it: pool and output."""
    identity = {"conv_weight": np.zeros((DIM, 1, W)), "conv_bias": np.zeros(DIM)}
    identity["conv_weight"][:, 0, -1] = 1
    return serve(x | identity, requests)[1:]


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_sglang_jax(form):
    """A request has a second slot for its state; slot 0 keeps what it holds."""
    x = serving_inputs(T if form == "prefill" else 3)
    ends = [0, 4, 20, 20] if form == "prefill" else [0, 1, 2, 3]
    slots, second, mask = jnp.asarray([4, 2, 0]), jnp.asarray([8, 9, 10]), jnp.asarray([1, 0, 1])
    has = jnp.asarray([True, False, False])
    silu = jax.nn.silu(x["qkv"])
    arguments = (silu, x["b"], x["a"], x["recurrent_state"], x["a_log"], x["dt_bias"])
    options = dict(has_initial_state=has, track_indices=second, track_mask=mask, **SIZES)
    if form == "prefill":
        call = lambda *y: sglang_jax.prefill_gated_delta_rule(*y, jnp.asarray(ends, jnp.int32), slots, **options)
    else:
        call = lambda *y: sglang_jax.decode_gated_delta_rule(*y, slots, **options)
    pool, out = jax.jit(call)(*arguments)
    (a, b, c, _), n = ends, x["recurrent_state"]
    want, o = tracked(x, [(a, b, 4, {b - a - 1: 4}), (b, c, None, {c - b - 1: 2})])
    want[8] = want[4]
    assert_close("pool", pool, want, 2e-6)
    assert_close("out", out[:c].reshape(c, -1), o[:c], 2e-6)
    np.testing.assert_array_equal(pool[0], n[0])


def test_sglang_jax_kda_and_lightning():
    """Three requests of one token each, by the pool and by the recurrence. The model has made step sizes of b."""
    rng = np.random.default_rng(4)
    q, k, v = normal(rng, 3, N_V, D), normal(rng, 3, N_V, D), normal(rng, 3, N_V, D)
    a, A_log, dt_bias = normal(rng, 3, N_V, D), normal(rng, N_V), normal(rng, N_V * D)
    b = jnp.asarray(rng.uniform(size=(3, N_V)), jnp.float32)
    pool, slots, slope = normal(rng, SLOTS, N_V, D, D), jnp.asarray([4, 2, 6]), -jnp.abs(normal(rng, N_V))
    track = dict(track_indices=jnp.asarray([8, 0, 9]))
    kda, o = jax.jit(lambda *y: sglang_jax.kda(*y, None, slots, **track))(q, k, v, a, b, pool, A_log, dt_bias)
    plain, p = jax.jit(lambda *y: sglang_jax.lightning(*y, None, slots, **track, scale=1.0))(q, k, v, slope, pool)
    q, k, v, a, b, A_log, dt_bias, S, slope = doubles(q, k, v, a, b, A_log, dt_bias, pool, slope)
    g = rates(a.reshape(3, -1), A_log, dt_bias, "kda")
    for n, (slot, second) in enumerate(((4, 8), (2, None), (6, 9))):
        state, out = advance(S[slot], unit(q[n]) * D**-0.5, unit(k[n]), v[n], g[n], b[n])
        assert_close("kda", o[n], out, 1e-6)
        states, outs = advance(S[slot], q[n], k[n], v[n], slope)
        assert_close("lightning", p[n], outs, 1e-6)
        for place in (slot, second) if second else (slot,):
            assert_close("state", kda[place], state, 1e-6)
            assert_close("state", plain[place], states, 1e-6)


@pytest.mark.parametrize("replaced", [sglang_jax], indirect=True, ids=["sglang_jax"])
@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_sglang_jax_backends_pass_the_pool_on(replaced, form):
    """What SGLang-JAX's backends would gather, compute and scatter is one call over the pool."""
    sglang_jax.install()
    rng, T, H = np.random.default_rng(5), 9 if form == "prefill" else 3, N_V
    q, k, v, a = (normal(rng, T, H, D) for _ in range(4))
    b, pool = jnp.asarray(rng.uniform(size=(T, H)), jnp.float32), normal(rng, SLOTS, H, D, D)
    A_log, dt_bias, slope = normal(rng, 1, 1, H, 1), normal(rng, H * D), -jnp.abs(normal(rng, H))
    cu_seqlens = jnp.asarray([0, 2, 7, 9], jnp.int32) if form == "prefill" else None
    slots, has, second = jnp.asarray([4, 2, 6]), jnp.asarray([True, False, True]), jnp.asarray([8, 0, 9])
    variable = lambda x: types.SimpleNamespace(value=x)
    layer = types.SimpleNamespace(A_log=variable(A_log), dt_bias=variable(dt_bias), scale=0.5)
    about = dict(cu_q_lens=cu_seqlens, recurrent_indices=slots, has_initial_state=has)
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def backend(path, name, **tracked):
        made = getattr(sys.modules[path], name)()
        made.mesh, made.forward_metadata = mesh, types.SimpleNamespace(**about, **tracked)
        return made

    kda = backend(KDA_BACKEND, "KDAAttnBackend", recurrent_track_indices=second, recurrent_track_mask=None)
    lightning = backend(LIGHTNING_BACKEND, "LightningAttnBackend")
    if form == "prefill":
        o, new = jax.jit(lambda *x: kda._forward_extend(*x, cu_seqlens, layer, scale=0.5))(q, k, v, a, b, pool)
        p, plain = jax.jit(lightning._forward_extend)(q, k, v, pool, slots, has, slope)
    else:
        o, new = jax.jit(lambda *x: kda._forward_decode(*x, layer, scale=0.5))(q, k, v, a, b, pool)
        p, plain = jax.jit(lightning._forward_decode)(q, k, v, pool, slots, has, slope)
    assert kda.set_ssm_track_state(kda.set_ssm_state(None, 0, slots, new), second, None, None) is new
    kda.get_layer_cache = lambda pools, layer: pools[layer]
    type(kda).__bases__[0].get_state = lambda self, pools, layer, indices: (None, "inputs")
    assert kda.get_state([(pool, None)], 0, slots) == (pool, "inputs")
    whole = dict(has_initial_state=has, track_indices=second, scale=0.5)
    want = jax.jit(lambda *x: sglang_jax.kda(*x, A_log, dt_bias, cu_seqlens, slots, **whole))(q, k, v, a, b, pool)
    wanted = jax.jit(lambda *x: sglang_jax.lightning(*x, cu_seqlens, slots, has))(q, k, v, slope, pool)
    for ours, theirs in zip((new, o, plain, p), (*want, *wanted), strict=True):
        assert_close("pool or output", ours, np.asarray(theirs, np.float64), 1e-6)


# levanter


class Named:
    """What the adapter uses of a haliax.NamedArray, which is in no session that runs by default."""

    def __init__(self, array, axes):
        self.array, self.axes = array, tuple(axes)

    def rearrange(self, axes):
        return Named(self.array.transpose([self.axes.index(axis) for axis in axes]), axes)


def test_levanter_takes_axes_in_any_order(monkeypatch):
    haliax = type(sys)("haliax")
    haliax.named = Named
    monkeypatch.setitem(sys.modules, "haliax", haliax)
    *arrays, state = maxtext_inputs()
    want, states = maxtext_reference(*arrays, state)
    axes = ("batch", "position", "heads")
    last = (("k_head_dim",), ("k_head_dim",), ("v_head_dim",), (), ())
    turned = [Named(x, (*axes, *name)) for x, name in zip(arrays, last, strict=True)]
    turned[0] = turned[0].rearrange(("k_head_dim", "heads", "position", "batch"))
    turned[4] = turned[4].rearrange(("heads", "batch", "position"))
    for function in (levanter.chunk_gated_delta_rule, levanter.recurrent_gated_delta_rule):
        o, after = function(*turned, initial_state=state, output_final_state=True)
        assert o.axes == (*axes, "v_head_dim")
        assert_close("o", o.array, want, 1e-6)
        assert_close("state", after, states, 1e-6)
