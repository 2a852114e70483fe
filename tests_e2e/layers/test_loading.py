"""Checkpoints that transformers saves, read layer by layer and laid on a mesh."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from chunkwise import layers
from chunkwise.layers import config_from, load_gated_delta_net, open_checkpoint, place, save_checkpoint, shardings
from tests.shown import Shown, layer_of
from tests_e2e.layers.hybrids import MODELS
from tests_e2e.layers.recording import build

pytestmark = pytest.mark.torch

# Reads a checkpoint over 4 devices of the CPU, in a process of its own: prints its size and the most memory that was
# taken meanwhile, without the pages of the file, which the system has back whenever it wants them. The C library gives
# back what is free.
PROGRAM = """
import sys, threading, time
import jax
from chunkwise.layers import Mamba2Config, load_mamba2_mixer, open_checkpoint, place, shardings
from safetensors.numpy import load_file
directory, eager = sys.argv[1], sys.argv[2] == "whole"
config = Mamba2Config(1024, 8, 32, 64, 64)
mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
specs = shardings(config, {"heads": "model"}, mesh).weights
anonymous = lambda: int(next(x for x in open("/proc/self/status") if x.startswith("RssAnon")).split()[1]) * 1024
read = lambda named, i: jax.block_until_ready(
    place(load_mamba2_mixer(named, config, f"backbone.layers.{i}.mixer."), mesh, specs)
)
# The programs that this compiles stay in memory, and are no part of the file.
read(open_checkpoint(directory), 0)
start, most, done = anonymous(), [0], threading.Event()
def watch():
    while not done.is_set():
        most[0] = max(most[0], anonymous())
        time.sleep(1e-3)
thread = threading.Thread(target=watch)
thread.start()
named = load_file(directory + "/model.safetensors") if eager else open_checkpoint(directory)
layers = [read(named, i) for i in range(LAYERS)]
done.set()
thread.join()
size = sum(x.nbytes for x in jax.tree.leaves(layers))
assert all(x.addressable_shards[0].data.shape[1] * 4 == x.shape[1] for x in (layers[0].v, layers[0].z))
print(size, most[0] - start)
"""
LAYERS = 8
THOROUGH = dict(test_peak=True)
SHOWS = dict(test_the_way_back=lambda name: Shown(layer_of(MODELS[name].config), "load save", MODELS[name].module))


@pytest.mark.parametrize("shards", [None, "100KB"])
def test_layer_by_layer(tmp_path, shards):
    """Lara-mini saves what it fuses, and has names of its own for it."""
    model, layer = MODELS["lara_mini"].build()
    model.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    config, prefix = config_from(json.loads((tmp_path / "config.json").read_text())), "layers.0.linear_attn."
    named = open_checkpoint(tmp_path)
    assert {prefix + "in_proj.weight", prefix + "out_norm.weight"} <= set(named)
    mesh = jax.make_mesh((1,), ("model",))
    weights = load_gated_delta_net(named, config, prefix)
    laid = place(weights, mesh, shardings(config, {"heads": "model"}, mesh).weights)
    assert tuple(laid.out.sharding.spec) == ("model", None)
    whole = load_gated_delta_net({name: x.numpy() for name, x in layer.state_dict().items()}, config)
    jax.tree.map(np.testing.assert_array_equal, laid, whole)


# Fused matrices of xLSTM are read, and written apart.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "xlstm, fused"])
def test_the_way_back(tmp_path, name):
    """What we write is what transformers wrote, to the bit; and it reads the same model from it."""
    import torch

    ours = MODELS[name]
    model, layer = ours.build()
    before, after = tmp_path / "before", tmp_path / "after"
    model.save_pretrained(before)
    named = open_checkpoint(before)
    function, load = ours.functions
    kind = json.loads((before / "config.json").read_text())["model_type"]
    key, end = next(
        (key, end)
        for key in named
        for end in ("A_log", "output_gate.weight", "ogate_preact.weight")
        if ".0." in key and key.endswith(end)
    )
    prefix = key.removesuffix(end)
    weights = load(named, ours.config, prefix)
    written = getattr(layers, f"save_{function.__name__}")(weights, ours.config, prefix, kind)
    # The class of MiniMax saves what follows from its config; that of OLMo-hybrid cuts convolutions in equal parts.
    own = {key for key in named if key.startswith(prefix) and not key.endswith(("_decay", "slope_rate"))}
    assert written.keys() == own
    for key in own:
        assert written[key].dtype == named[key].dtype
        if name != "olmo_hybrid" or "conv1d" not in key:
            np.testing.assert_array_equal(written[key], named[key], key)
    save_checkpoint(after, dict(named) | written, shard_bytes=10**5)
    (after / "config.json").write_bytes((before / "config.json").read_bytes())
    again = type(model).from_pretrained(after).eval()
    expected = model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for key, x in again.state_dict().items():
        torch.testing.assert_close(x, expected[key], rtol=0, atol=0)


def test_tensors_of_torch():
    """Those of a module in bfloat16, a parameter, and one of float8 with its scale."""
    import torch

    ours = MODELS["qwen3_5"]
    _, layer = ours.build()
    named = dict(layer.to(torch.bfloat16).named_parameters())
    named["out_proj.weight"] = named["out_proj.weight"].detach().to(torch.float8_e4m3fn)
    plain = {name: x.detach().float().numpy() for name, x in named.items()}
    named["out_proj.weight_scale"] = torch.tensor(0.5)
    plain["out_proj.weight"] *= 0.5
    weights = load_gated_delta_net(named, ours.config)
    assert weights.q.dtype == "bfloat16"
    jax.tree.map(np.testing.assert_array_equal, weights, load_gated_delta_net(plain, ours.config))


def test_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"`directory` must have model.safetensors or .*index.json, and what they"):
        open_checkpoint(tmp_path)


def test_peak(tmp_path):
    """The model and two of its layers are in memory; read as a whole first, the model is there twice."""
    sizes = dict(hidden_size=1024, num_heads=32, head_dim=64, state_size=64, n_groups=8, num_hidden_layers=LAYERS)
    build("mamba2", "Mamba2Config", "Mamba2ForCausalLM", **sizes).save_pretrained(tmp_path)
    peaks = {}
    for way in ("layer by layer", "whole"):
        environment = os.environ | dict(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4", MALLOC_MMAP_THRESHOLD_="65536")
        code = PROGRAM.replace("LAYERS", str(LAYERS))
        run = [sys.executable, "-c", code, tmp_path, way]
        size, peaks[way] = map(int, subprocess.check_output(run, env=environment, text=True).split())
    print(f"\nweights {size / 2**20:.0f} MiB", {way: f"{peak / 2**20:.0f} MiB" for way, peak in peaks.items()})
    assert peaks["layer by layer"] < size * (1 + 2 / LAYERS) < peaks["whole"]
