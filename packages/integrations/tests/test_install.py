"""What `install` puts into the place of a host's functions and classes, and which hosts it refuses."""

import abc
import functools
import importlib.machinery
import importlib.util
import inspect
import re
import subprocess
import sys
from importlib import metadata

import jax
import pytest

from chunkwise.integrations import keras_hub, levanter, maxtext, replacing, sglang_jax, tpu_inference
from tests.hosts import REPLACED, stand_in, with_functions

HOSTS = ("flax", "haliax", "jla", "keras", "keras_hub", "levanter", "maxtext", "sgl_jax", "tpu_inference", "vllm")
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
    (keras_hub, "chunk_gated_delta_rule"): "query key value g beta chunk_size=64 initial_state=None "
    "output_final_state=False padding_mask=None",
    (keras_hub, "recurrent_gated_delta_rule"): "query key value g beta initial_state=None output_final_state=False "
    "padding_mask=None",
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
    modules = ", ".join(
        f"chunkwise.integrations.{x}"
        for x in ("jax_linear_attention", "keras_hub", "levanter", "maxtext", "sglang_jax", "tpu_inference")
    )
    code = f"import sys, {modules}; assert not set({HOSTS}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


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


@pytest.mark.parametrize("replaced", [maxtext], indirect=True)
def test_maxtext_refuses_another_way(replaced):
    """A setting with which MaxText's layer passes by our functions is an error, whatever its name; vLLM is none."""
    (path, name), *_ = replaced[1]
    layer, ours = sys.modules[path].Qwen3NextGatedDeltaNet(), lambda: getattr(sys.modules[path], name)()
    put_back = maxtext.install()
    with pytest.raises(ValueError, match="layer must call chunkwise; got another way, as by `use_gdn_kernel`"):
        layer(lambda: 1)
    with pytest.raises(TypeError, match=r"jax_chunk_gated_delta_rule\(\) missing"):
        layer(ours)
    assert layer(lambda: 1, attention_metadata=()) == 1
    put_back()
    assert layer(lambda: 1) == 1


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


@pytest.mark.parametrize("read", [True, False])
def test_install_refuses_a_host_with_a_copy(monkeypatch, read):
    """Another module that has imported a name calls the old function; one that only passes it on does not."""
    with_functions(monkeypatch, SEAM, FUNCTIONS)
    elsewhere = "levanter.models.hybrid"
    with_functions(monkeypatch, elsewhere, FUNCTIONS[:1] if read else ("other",))
    setattr(sys.modules[elsewhere], FUNCTIONS[0], getattr(sys.modules[SEAM], FUNCTIONS[0]))
    if read:
        assert_refused(
            AttributeError, f"{FUNCTIONS[0]} must be replaced before other modules import it; {elsewhere} has"
        )
    else:
        levanter.install()()


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
        assert_refused(TypeError, rf"{SEAM}.chunk_gated_delta_rule takes \({re.escape(theirs)}\) in this version of")


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
    with pytest.raises(TypeError, match=r"Host.step takes \(self, q, k\) in this version of the host; got \(self, k"):
        replacing.replace(place._replace(value=Wrong))
    exec("def run(host): host.step()", vars(sys.modules[SEAM]))
    with pytest.raises(TypeError, match=r"Host.step takes"):
        replacing.replace(replacing.Place(Host, "step", Wrong.step))


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
    """The backend that is the default gives ours, until it is put back, if the host's attention asks the backend."""
    path = "tpu_inference.layers.common."
    default = type("GDNLinearAttentionBackend", (), {"conv1d_gdn_kernel": lambda self: None})
    default.__module__ = f"{path}attention_backend"
    stand_in(monkeypatch, f"{path}attention_backend", GDNLinearAttentionBackend=default)
    stand_in(monkeypatch, f"{path}gdn_attention")
    with pytest.raises(AttributeError, match="conv1d_gdn_kernel must be read where it is replaced; nothing reads it"):
        tpu_inference.install()
    exec("def run(backend): backend.conv1d_gdn_kernel()", vars(sys.modules[f"{path}gdn_attention"]))
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
