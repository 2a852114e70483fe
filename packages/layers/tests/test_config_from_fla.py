"""The config of a layer out of the settings of flash-linear-attention's models, and of the arrays of RWKV-7's files."""

import numpy as np
import pytest

from chunkwise.layers import (
    CombaConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    GatedDeltaProductConfig,
    GatedLinearAttentionConfig,
    KimiDeltaAttentionConfig,
    Mamba2Config,
    Rwkv7AttentionConfig,
    config_from,
    open_checkpoint,
    save_checkpoint,
)
from tests.hostile_settings import assert_sound
from tests.shown import Shown

PRODUCT = dict(
    model_type="gated_deltaproduct", attn_mode="chunk", hidden_size=64, num_heads=2, head_dim=16, expand_v=1.5,
    conv_size=3, conv_bias=False, norm_eps=1e-3, use_output_gate=True, use_short_conv=True, use_forget_gate=True,
    num_householder=3, allow_neg_eigval=True, hidden_act="swish", num_hidden_layers=4, attn=None, fuse_norm=True,
    attnres_block_size=None,
)  # fmt: skip
# As one file has it: its number of heads is not that of its sizes, and no program reads it.
RWKV7 = dict(
    model_type="rwkv7", attn=None, attn_mode="chunk", hidden_size=768, num_heads=32, head_dim=64,
    decay_low_rank_dim=96, a_low_rank_dim=64, gate_low_rank_dim=128, v_low_rank_dim=32, norm_eps=1e-5, norm_bias=True,
    norm_first=True, fuse_norm=False, hidden_act="sqrelu", hidden_ratio=4.0, intermediate_size=3072,
    num_hidden_layers=12, vocab_size=8192, value_dim=[768] * 11 + [1536],
)  # fmt: skip
SHARED = dict(
    attn_mode="chunk", hidden_size=64, num_heads=2, conv_size=3, norm_eps=1e-3, use_short_conv=True, attn=None,
    allow_neg_eigval=True, hidden_act="swish", num_hidden_layers=4, fuse_norm=True, attnres_block_size=None,
)  # fmt: skip
GROUPED = SHARED | dict(num_v_heads=4, head_dim=16, expand_v=1.5)
DELTA_NET = SHARED | dict(
    model_type="delta_net", expand_k=0.5, expand_v=1.0, use_gate=True, use_beta=True, qk_norm="l2",
    use_output_norm=True, qk_activation="silu",
)  # fmt: skip
GATED_DELTANET = GROUPED | dict(model_type="gated_deltanet", use_gate=True, output_gate_activation="sigmoid")
KDA = GROUPED | dict(model_type="kda", safe_gate=True, lower_bound=-4.0)
GLA = SHARED | dict(model_type="gla", expand_k=0.5, expand_v=1.0, num_kv_heads=None, feature_map=None, clamp_min=None)
del GLA["allow_neg_eigval"]
GLA |= dict(use_short_conv=False, use_output_gate=True, elementwise_affine=True, use_gk=True, use_gv=False)
COMBA = GROUPED | dict(
    model_type="comba", use_output_gate=False, use_output_correction=True, use_inner_decay=True, correction_factor=0.02
)
del COMBA["allow_neg_eigval"]
GDN2 = GROUPED | dict(model_type="gdn2", conv_bias=False)
# Its names are those of transformers, but for some.
MAMBA2 = dict(
    model_type="mamba2", hidden_size=64, head_dim=16, state_size=32, expand=2, num_heads=8, conv_kernel=3, n_groups=2,
    use_bias=True, use_conv_bias=False, norm_eps=1e-3, dt_limit=[0.01, {"__float__": "Infinity"}], rmsnorm=True,
    norm_before_gate=True, D_has_hdim=False, hidden_act="silu", chunk_size=256, dt_min=0.001, dt_max=0.1,
    dt_init_floor=1e-4, A_init_range=[1, 16], conv_init=None, residual_in_fp32=True, rescale_prenorm_residual=True,
    fuse_norm=True, fuse_cross_entropy=True,
)  # fmt: skip
RANKS = dict(R_decay=96, R_rate=64, R_gate=128)
LATER = Rwkv7AttentionConfig(768, 12, 12, 64, 64, **RANKS, R_first=32)
SHOWS = dict(
    test_gated_delta_product=[Shown("gated_delta_product", "config", "gated_deltaproduct")],
    test_layers_with_delta_rules=[
        Shown("gated_delta_net", "config", "gated_deltanet"), Shown("kimi_delta_attention", "config", "kda"),
        Shown("gated_delta_product", "config", "delta_net"),
    ],
    test_gated_linear_attention=[Shown("gated_linear_attention", "config", "gla")],
    test_comba_gdn2_and_mamba2=[
        Shown("comba", "config", "comba"), Shown("gated_delta_net2", "config", "gdn2"),
    ],
    test_rwkv7=[Shown("rwkv7_attention", "config", name) for name in ("rwkv7", "rwkv7_fla")],
    test_released_files=[Shown("rwkv7_attention", "config", "rwkv_x070")],
)  # fmt: skip


def test_gated_delta_product():
    assert config_from(PRODUCT, layer=3) == GatedDeltaProductConfig(
        64, 2, 2, 16, 24, W=3, eps=1e-3, num_householder=3, forget_gate=True, allow_neg_eigval=True
    )
    least = dict(model_type="gated_deltaproduct")
    assert config_from(least) == GatedDeltaProductConfig(2048, 6, 6, 256, 512, num_householder=1, forget_gate=False)


def test_layers_with_delta_rules():
    sizes, more = (64, 2, 4, 16, 24), dict(W=3, eps=1e-3, allow_neg_eigval=True)
    assert config_from(GATED_DELTANET, layer=1) == GatedDeltaNetConfig(*sizes, **more, activation="sigmoid")
    assert config_from(KDA) == KimiDeltaAttentionConfig(*sizes, **more, R=24, lower_bound=-4.0, gate_bias=True)
    product = dict(num_householder=1, forget_gate=False)
    assert config_from(DELTA_NET) == GatedDeltaProductConfig(64, 2, 2, 16, 32, **more, **product)
    least = lambda name: config_from(dict(model_type=name))
    assert least("gated_deltanet") == GatedDeltaNetConfig(2048, 6, 6, 256, 512)
    assert least("kda") == KimiDeltaAttentionConfig(2048, 16, 16, 128, 128, eps=1e-6, R=128, gate_bias=True)
    assert least("delta_net") == GatedDeltaProductConfig(2048, 16, 16, 128, 128, **product, output_gate=False)


def test_gated_linear_attention():
    assert config_from(GLA, layer=1) == GatedLinearAttentionConfig(64, 2, 2, 16, 32, eps=1e-3)
    assert config_from(dict(model_type="gla")) == GatedLinearAttentionConfig(2048, 4, 4, 256, 512)


def test_comba_gdn2_and_mamba2():
    assert config_from(COMBA, layer=1) == CombaConfig(64, 2, 4, 16, 24, W=3, eps=1e-3, output_gate=False)
    assert config_from(GDN2) == GatedDeltaNet2Config(64, 2, 4, 16, 24, W=3, eps=1e-3, allow_neg_eigval=True)
    more = dict(conv_bias=False, dt_limit=(0.01, np.inf), in_bias=True, out_bias=True)
    assert config_from(MAMBA2) == Mamba2Config(64, 2, 8, 32, 16, W=3, eps=1e-3, norm="before", **more)
    assert config_from(MAMBA2 | dict(rmsnorm=False)).norm is None
    least = lambda name, **more: config_from(dict(model_type=name, **more))
    assert least("comba") == CombaConfig(2048, 6, 6, 256, 512)
    assert least("gdn2") == GatedDeltaNet2Config(2048, 16, 16, 128, 128)
    assert least("mamba2", fuse_cross_entropy=True) == Mamba2Config(2048, 1, 64, 128, 64)
    # A file of transformers has other names and defaults.
    assert least("mamba2", rms_norm=True) == Mamba2Config(4096, 8, 128, 128, 64)


def test_rwkv7():
    """The first layer takes no values; values may be wider in some layers; ranks may follow from the sizes."""
    assert config_from(RWKV7, layer=0) == Rwkv7AttentionConfig(768, 12, 12, 64, 64, **RANKS)
    assert config_from(RWKV7, layer=1) == LATER
    assert config_from(RWKV7, layer=11).V == config_from(RWKV7 | dict(value_dim=1536), layer=1).V == 128
    assert config_from(RWKV7 | dict(head_dim=None), layer=1).H == 32
    least = config_from(dict(model_type="rwkv7"), layer=1)
    assert least == Rwkv7AttentionConfig(2048, 32, 32, 64, 64, R_first=16)
    theirs = config_from(dict(model_type="rwkv7", architectures=["Rwkv7ForCausalLM"]), layer=1)
    assert theirs == Rwkv7AttentionConfig(768, 12, 12, 64, 64, R_first=32)
    nulls = dict.fromkeys(("decay_low_rank_dim", "a_low_rank_dim", "gate_low_rank_dim", "v_low_rank_dim"))
    ranks = dict(R_decay=128, R_rate=128, R_gate=224, R_first=64)
    assert config_from(dict(model_type="rwkv7") | nulls, layer=1) == Rwkv7AttentionConfig(2048, 32, 32, 64, 64, **ranks)


@pytest.mark.parametrize(
    ("settings", "layer", "message"),
    [
        (PRODUCT | dict(use_short_conv=False), 1, r"`hf_config.use_short_conv` must be one of \(True,\) for this"),
        (PRODUCT | dict(conv_bias=True), 1, r"`hf_config.conv_bias` must be one of \(False,\)"),
        (GATED_DELTANET | dict(use_gate=False), 1, r"`hf_config.use_gate` must be one of \(True,\)"),
        (GATED_DELTANET | dict(num_v_heads=3), 1, "`HV` must be a multiple of `H`; got 3 and 2"),
        (COMBA | dict(use_inner_decay=False), 1, r"`hf_config.use_inner_decay` must be one of \(True,\)"),
        (COMBA | dict(allow_neg_eigval=True), 1, r"`hf_config.allow_neg_eigval` must be one of \(False,\)"),
        (GDN2 | dict(lower_bound=-5.0), 1, r"no settings that `config_from` does not know; got \['lower_bound'\]"),
        (MAMBA2 | dict(D_has_hdim=True), 1, r"`hf_config.D_has_hdim` must be one of \(False,\)"),
        (MAMBA2 | dict(head_dim=24), 1, "`hf_config.head_dim` must divide 128 channels; got 24"),
        (MAMBA2 | dict(num_heads=9), 1, r"`hf_config.num_heads` must be one of \(8,\) for this layer; got 9"),
        (GLA | dict(num_kv_heads=1), 1, r"`hf_config.num_kv_heads` must be one of \(2,\) for this layer; got 1"),
        (GLA | dict(feature_map="relu"), 1, r"`hf_config.feature_map` must be one of \(\) for this layer; got 'relu'"),
        (KDA | dict(lower_bound=None), 1, r"`hf_config.safe_gate` must be one of \(False, False\)"),
        (DELTA_NET | dict(qk_norm="sum"), 1, r"`hf_config.qk_norm` must be one of \('l2',\) for this layer; got 'sum'"),
        (DELTA_NET | dict(expand_k=0.7), 1, "`hf_config.expand_k` must make whole channels of 64 for 2 heads; got 0.7"),
        (PRODUCT | dict(expand_v=1.3), 1, "`hf_config.expand_v` must make whole channels of 16; got 1.3"),
        (PRODUCT | dict(num_householder=True), 1, "`hf_config.num_householder` must be a whole number above 0"),
        (PRODUCT | dict(attn=dict(layers=[1])), 1, "must be the number of a layer with linear attention; got 1"),
        (RWKV7 | dict(attn=[dict(layers=[0]), dict(layers=[5])]), 5, "a layer with linear attention; got 5"),
        (RWKV7 | dict(attn=[3]), 5, r"`hf_config.attn` must be a table with a list `layers`, .*; got \[3\]"),
        (RWKV7 | dict(attn=dict(layers=3)), 5, "`hf_config.attn` must be a table with a list `layers`"),
        (RWKV7, None, "`layer` must be the number of the layer, because the first one takes no values .*; got None"),
        (RWKV7, 12, "`layer` must be below 12, the layers of the model; got 12"),
        (RWKV7 | dict(head_dim=50), 1, "`hf_config.hidden_size` must be a multiple of the heads' size 50; got 768"),
        (RWKV7 | dict(value_dim=[768]), 1, r"`hf_config.value_dim` must be a whole number .*; got \[768\]"),
        (RWKV7 | dict(value_dim=770), 1, "`hf_config.value_dim` must be a multiple of 12 heads; got 770"),
        (RWKV7 | dict(time_decay=1), 1, r"no settings that `config_from` does not know; got \['time_decay'\]"),
        (PRODUCT | dict(use_short_conv=1), 1, r"`hf_config.use_short_conv` must be one of \(True,\) .*; got 1"),
    ],
)
def test_what_no_layer_can_do(settings, layer, message):
    with pytest.raises(ValueError, match=message):
        config_from(settings, layer)


@pytest.mark.parametrize(
    "own", [PRODUCT, RWKV7, GLA, DELTA_NET, GATED_DELTANET, KDA, COMBA, GDN2, MAMBA2], ids=lambda own: own["model_type"]
)
def test_hostile_settings(own):
    """Whatever a file has, the result is a config of right types or a ValueError."""
    assert_sound(own, config_from(own, layer=2))


def released() -> dict:
    """Return the arrays of a file of RWKV-7 that say its sizes, those of the model of 7.2B, and others."""
    ones = lambda *shape: np.ones(shape, np.int8)
    named = {"emb.weight": ones(50, 4096), "blocks.0.ln0.weight": ones(4096)}
    for layer in range(2):
        shapes = dict(r_k=(64, 64), w1=(4096, 128), a1=(4096, 128), g1=(4096, 480), v1=(4096, 96))
        named |= {f"blocks.{layer}.att.{name}": ones(*shape) for name, shape in shapes.items()}
    return named


def test_released_files(tmp_path):
    """They have no config; arrays of a folder are read as they are asked for."""
    sizes = dict(D=4096, H=64, HV=64, K=64, V=64, R_decay=128, R_rate=128, R_gate=480)
    assert config_from(released(), layer=0) == Rwkv7AttentionConfig(**sizes)
    save_checkpoint(tmp_path, released())
    assert config_from(open_checkpoint(tmp_path), layer=1) == Rwkv7AttentionConfig(**sizes, R_first=96)


@pytest.mark.parametrize(
    ("change", "layer", "message"),
    [
        ({}, None, "`layer` must be the number of the layer, because the first one takes no values .*; got None"),
        ({}, True, "`layer` must be a whole number from 0 on; got True"),
        ({}, -1, "`layer` must be a whole number from 0 on; got -1"),
        ({}, 2, "`hf_config` must have 'blocks.2.att.r_k' of two dimensions, as files of RWKV-7 have it; got no such"),
        ({"blocks.1.att.a1": np.ones(3)}, 1, r"must have 'blocks.1.att.a1' of two dimensions, .*; got \(3,\)"),
        ({"blocks.1.att.g1": np.ones((4096, 0))}, 1, "`R_gate` must be a whole number above 0; got 0"),
    ],
)
def test_released_files_of_another_kind(change, layer, message):
    with pytest.raises(ValueError, match=message):
        config_from(released() | change, layer)
