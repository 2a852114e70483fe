"""Every setting of a model of transformers: what changes its layer changes ours alike, or `config_from` refuses it."""

import contextlib
import functools
import importlib
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.layers import config_from, empty_cache
from chunkwise.shared.testing.compare import TOLERANCE, error
from tests_e2e.layers.hybrids import MODELS
from tests_e2e.layers.recording import SMALL, torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

TOKENS = 6
# Settings that say how a model is run, or that every config has, and no layer of transformers reads.
COMMON = ("architectures", "dtype", "id2label", "label2id", "model_type", "return_dict", "transformers_version")
ACTIVATIONS = ("silu", "gelu", "sigmoid")
# Hundreds of programs for each model.
THOROUGH = dict(test_every_setting=True)


def others(value) -> list[list]:
    """Return other values for a setting, in lists of which the first that the model takes will do."""
    if value is None:
        return [[True], [3, -0.5, 0.5], ["sigmoid"], [[0.1, 0.5]]]
    if isinstance(value, bool):
        return [[not value], [None]]
    if isinstance(value, int | float):
        return [[other for other in (value * 2, value + 1, -value, 0.5) if other != value], [None]]
    if isinstance(value, str):
        return [[other] for other in ACTIVATIONS if value in ACTIVATIONS and other != value] + [[None]]
    if isinstance(value, list | tuple):
        put = lambda i, other: type(value)((*value[:i], other, *value[i + 1 :]))
        tries = [(i, each) for i, entry in enumerate(value) for each in others(entry) if each != [None]]
        return [[put(i, other) for other in each] for i, each in tries]
    return []


def taken(ours, setting, values):
    """Return what `run` returns for the first of some values that the model takes; None if it refuses them all."""
    for value in values:
        # transformers has many ways of refusing a value.
        with contextlib.suppress(Exception):
            found = run(ours, **{setting: value})
            if np.isfinite(found[2]).all():
                return value, *found
    return None


def run(ours, **change):
    """Return the config of a model, the hidden states that its layer reads, what it writes and its weights."""
    model, layer = ours.build(**change)
    seen = []

    def see(module, args, kwargs, y):
        seen.append((next(iter((*args, *kwargs.values()))), y[0] if isinstance(y, tuple) else y))

    layer.register_forward_hook(see, with_kwargs=True)
    torch.manual_seed(1)
    with torch.no_grad():
        model(torch.randint(50, (1, TOKENS)), use_cache=False)
    x, y = (array.numpy() for array in seen[0])
    return model.config, x, y, {name: w.numpy() for name, w in layer.state_dict().items()}


@functools.cache
def compiled(function, config):
    return jax.jit(lambda x, weights, cache: function(x, weights, config, cache, True, implementation="xla"))


def token_by_token(function, config, x, weights):
    """Return what our layer makes of hidden states, by the program that compiles soonest."""
    cache, outputs = empty_cache(config, 1), []
    for t in range(TOKENS):
        y, cache = compiled(function, config)(jnp.asarray(x[:, t : t + 1]), weights, cache)
        outputs.append(y)
    return jnp.concatenate(outputs, axis=1)


@pytest.mark.parametrize("name", MODELS)
def test_every_setting(name):
    ours = MODELS[name]
    function, load = ours.functions
    settings, wrong, read = run(ours)[0].to_dict(), [], set()
    tries = [(setting, each) for setting, value in settings.items() if setting not in COMMON for each in others(value)]
    for setting, values in tries:
        found = taken(ours, setting, values)
        if found is None:
            continue
        value, config, x, y, named = found
        try:
            made = config_from(config, layer=0)
            weights = load(named, made)
        except ValueError:
            continue
        # As the file of a checkpoint has it.
        assert made == config_from(json.loads(config.to_json_string()), layer=0)
        if made != ours.config:
            read.add(setting)
        if (distance := error(token_by_token(function, made, x, weights), y)) > TOLERANCE["float32"]:
            wrong.append((setting, value, distance))
    assert read, "no setting was seen to matter"
    assert not wrong


PUBLISHED = json.loads((Path(__file__).parents[2] / "packages/layers/tests/published.json").read_text())
# What transformers has no class for, or cannot read: a first version, and kernels of a package that is not here.
ELSEWHERE = ("Kimi-K3", "MiniCPM-SALA", "MiniMax-Text-01", "Ring-mini-linear-2.0", "Zamba2-7B, at first", "xLSTM-7B")


def configuration(ours, **settings):
    """Return a configuration of transformers for a model."""
    found = importlib.import_module(f"transformers.models.{ours.module}.configuration_{ours.module}")
    return getattr(found, f"{ours.name}Config")(**settings)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("bailing_hybrid")])
def test_a_file_without_settings_has_those_of_transformers(name):
    """But for Ling 3.0, whose file must tell it from Ling 2.6."""
    made = configuration(MODELS[name])
    # The first layer of MiniMax is attention, unless a file says more.
    layer = 1 if name == "minimax" else 0
    assert config_from({"model_type": made.model_type}, layer) == config_from(made, layer)


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in ELSEWHERE])
def test_published_files_through_transformers(name):
    """The config that transformers makes of a file is read as the file."""
    settings = json.loads(json.dumps(PUBLISHED[name]), object_hook=lambda x: x.get("__float__", x))
    if "time_step_limit" in settings:
        settings["time_step_limit"] = [float(x) for x in settings["time_step_limit"]]
    if "kda_lower_bound" in settings:
        settings["kda_lower_bound"] = float(settings["kda_lower_bound"])
    made = transformers.AutoConfig.for_model(**settings)
    # The third layer of the shortened file of Nemotron-3.5 is attention.
    layer = 0 if name.startswith("Nemotron-3.5") else 2
    expected = config_from(PUBLISHED[name], layer)
    assert config_from(made, layer) == config_from(json.loads(made.to_json_string()), layer) == expected


# Small models, by the names of published ones.
CASES = {
    "Qwen3-Next-80B-A3B": "qwen3_next", "Qwen3.8-27B": "qwen3_5", "Qwen4-Exp": "qwen4_exp, sigmoid",
    "Olmo-Hybrid-7B": "olmo_hybrid", "Kimi-Linear-48B-A3B": "kimi_linear", "GLM-5.3-Flash": "glm5_next, lower bound",
    "Ling-3.0-tiny": "bailing_hybrid", "Mamba-Codestral-7B": "mamba2", "Bamba-9B": "bamba",
    "Granite-4.0-H-350M, of 4 bits": "granitemoehybrid", "Nemotron-H-8B": "nemotron_h",
    "Falcon-H1-0.5B": "falcon_h1, no norm", "MiniMax-Text-01-hf": "minimax",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_small_models_of_published_files(name):
    """What a file says besides sizes makes the layer of transformers, and ours out of the file itself."""
    ours, file = MODELS[CASES[name]], PUBLISHED[name].get("text_config", PUBLISHED[name])
    kept = {key: x for key, x in file.items() if isinstance(x, bool | float | None) or key.endswith(("act", "type"))}
    kept = {key: x for key, x in kept.items() if key not in ("model_type", *SMALL, *ours.settings)}
    if table := file.get("linear_attn_config"):
        sizes = dict(num_heads=2, head_dim=16, full_attn_layers=[1], kda_layers=[0, 2])
        kept["linear_attn_config"] = table | sizes
    if "kda_lower_bound" in file:
        kept["kda_lower_bound"] = float(file["kda_lower_bound"])
    _, x, y, named = run(ours, **kept)
    function, load = ours.functions
    made = config_from(dict(model_type=file["model_type"]) | SMALL | ours.settings | kept, layer=0)
    assert error(token_by_token(function, made, x, load(named, made)), y) < TOLERANCE["float32"]


def rows_of(text: str, heading: str) -> dict[str, list[str]]:
    """Return the cells of a table of the page, by the names of models in the first one."""
    rows = re.findall(r"^\| (`[^|]*)\|(.*)\|$", text.split(f"## {heading}\n")[1].split("\n## ")[0], re.MULTILINE)
    cells_of = {name: cells for names, cells in rows for name in re.findall(r"`(\w+)`", names)}
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in cells_of.items()}


def test_the_page_lists_every_model():
    """A module of transformers that has linear attention, or a state of its tokens, says so."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    served, refused = rows_of(page, "Served"), rows_of(page, "Not served")
    kinds = re.compile("linear_attention|recurrent_state|mlstm", re.IGNORECASE)
    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    found = {file.parent.name for file in files if file.parent.name != "auto" and kinds.search(file.read_text())}
    assert found == served.keys() | refused.keys()
    assert served.keys() == {model.module for model in MODELS.values()}
    for name, (layer, *_) in served.items():
        assert layer == f"`{next(m for m in MODELS.values() if m.module == name).functions[0].__name__}`"
    for name in refused:
        with pytest.raises(ValueError, match=r"`hf_config.model_type` must be one of"):
            config_from({"model_type": name})
