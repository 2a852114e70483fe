"""The modules of flax, and the sizes of each in the tests."""

from chunkwise import layers
from chunkwise.integrations.nnx import (
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    KimiDeltaAttention,
    LightningAttention,
    Mamba2Mixer,
    MlstmLayer,
    Rwkv7Attention,
)

SIZES = dict(D=16, H=4, HV=4, K=8, V=8)
CONFIGS = {
    GatedDeltaNet: layers.GatedDeltaNetConfig(**SIZES),
    GatedDeltaNet2: layers.GatedDeltaNet2Config(**SIZES),
    KimiDeltaAttention: layers.KimiDeltaAttentionConfig(**SIZES, R=4),
    Mamba2Mixer: layers.Mamba2Config(**SIZES),
    LightningAttention: layers.LightningAttentionConfig(**SIZES),
    MlstmLayer: layers.MlstmLayerConfig(**SIZES),
    GatedDeltaProduct: layers.GatedDeltaProductConfig(**SIZES),
    Rwkv7Attention: layers.Rwkv7AttentionConfig(**SIZES, R_decay=4, R_rate=4, R_gate=4),
}
