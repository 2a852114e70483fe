"""The modules of flax, and the sizes of each in the tests."""

from chunkwise import layers
from chunkwise.integrations import nnx

SIZES = dict(D=16, H=4, HV=4, K=8, V=8)
CONFIGS = {
    nnx.Comba: layers.CombaConfig(**SIZES),
    nnx.GatedDeltaNet: layers.GatedDeltaNetConfig(**SIZES),
    nnx.GatedDeltaNet2: layers.GatedDeltaNet2Config(**SIZES),
    nnx.KimiDeltaAttention: layers.KimiDeltaAttentionConfig(**SIZES, R=4),
    nnx.Mamba2Mixer: layers.Mamba2Config(**SIZES),
    nnx.GatedLinearAttention: layers.GatedLinearAttentionConfig(**SIZES, R=4),
    nnx.LightningAttention: layers.LightningAttentionConfig(**SIZES, qk_norm=True, frequencies=(1.0, 0.1)),
    nnx.MlstmLayer: layers.MlstmLayerConfig(**SIZES),
    nnx.GatedDeltaProduct: layers.GatedDeltaProductConfig(**SIZES),
    nnx.Rwkv7Attention: layers.Rwkv7AttentionConfig(**SIZES, R_decay=4, R_rate=4, R_gate=4),
}
