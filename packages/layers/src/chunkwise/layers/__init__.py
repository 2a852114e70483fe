"""Layers of linear attention, as pure functions of hidden states and of plain trees of weights."""

from chunkwise.layers import comba, delta_net, delta_net2, delta_product, gla, kimi, lightning, mamba2, mlstm, rwkv7
from chunkwise.layers.caches import Cache, empty_cache, empty_pool, read_cache, write_cache
from chunkwise.layers.checkpoint.files import open_checkpoint
from chunkwise.layers.checkpoint.from_transformers import config_from
from chunkwise.layers.checkpoint.saving import save_checkpoint
from chunkwise.layers.comba import CombaWeights
from chunkwise.layers.config import (
    CombaConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    GatedDeltaProductConfig,
    GatedLinearAttentionConfig,
    KimiDeltaAttentionConfig,
    LayerConfig,
    LightningAttentionConfig,
    Mamba2Config,
    MlstmLayerConfig,
    Rwkv7AttentionConfig,
)
from chunkwise.layers.decay import decayed
from chunkwise.layers.delta_net import GatedDeltaNetWeights
from chunkwise.layers.delta_net2 import GatedDeltaNet2Weights
from chunkwise.layers.delta_product import GatedDeltaProductWeights
from chunkwise.layers.devices.moving import cache_from_bytes, cache_to_bytes
from chunkwise.layers.devices.sharding import Shardings, place, shardings
from chunkwise.layers.gla import GatedLinearAttentionWeights
from chunkwise.layers.kimi import KimiDeltaAttentionWeights
from chunkwise.layers.lightning import LightningAttentionWeights
from chunkwise.layers.mamba2 import Mamba2Weights
from chunkwise.layers.mixer.running import Step, offload_policy, remat_policy
from chunkwise.layers.mlstm import MlstmLayerWeights
from chunkwise.layers.rwkv7 import (
    Rwkv7AttentionWeights,
    ragged_rwkv7_attention,
    rwkv7_attention,
)
from chunkwise.shared import version

__version__ = version.of(__name__)

# Every function for users: a property of the record of its layer.
comba_layer = comba.LAYER.over_sequences
ragged_comba_layer = comba.LAYER.over_step
init_comba_layer = comba.LAYER.random_weights
load_comba_layer = comba.LAYER.loaded_weights
save_comba_layer = comba.LAYER.saved_weights

gated_delta_net = delta_net.LAYER.over_sequences
ragged_gated_delta_net = delta_net.LAYER.over_step
init_gated_delta_net = delta_net.LAYER.random_weights
load_gated_delta_net = delta_net.LAYER.loaded_weights
save_gated_delta_net = delta_net.LAYER.saved_weights

gated_delta_net2 = delta_net2.LAYER.over_sequences
ragged_gated_delta_net2 = delta_net2.LAYER.over_step
init_gated_delta_net2 = delta_net2.LAYER.random_weights
load_gated_delta_net2 = delta_net2.LAYER.loaded_weights
save_gated_delta_net2 = delta_net2.LAYER.saved_weights

gated_delta_product = delta_product.LAYER.over_sequences
ragged_gated_delta_product = delta_product.LAYER.over_step
init_gated_delta_product = delta_product.LAYER.random_weights
load_gated_delta_product = delta_product.LAYER.loaded_weights
save_gated_delta_product = delta_product.LAYER.saved_weights

gated_linear_attention = gla.LAYER.over_sequences
ragged_gated_linear_attention = gla.LAYER.over_step
init_gated_linear_attention = gla.LAYER.random_weights
load_gated_linear_attention = gla.LAYER.loaded_weights
save_gated_linear_attention = gla.LAYER.saved_weights

kimi_delta_attention = kimi.LAYER.over_sequences
ragged_kimi_delta_attention = kimi.LAYER.over_step
init_kimi_delta_attention = kimi.LAYER.random_weights
load_kimi_delta_attention = kimi.LAYER.loaded_weights
save_kimi_delta_attention = kimi.LAYER.saved_weights

lightning_attention = lightning.LAYER.over_sequences
ragged_lightning_attention = lightning.LAYER.over_step
init_lightning_attention = lightning.LAYER.random_weights
load_lightning_attention = lightning.LAYER.loaded_weights
save_lightning_attention = lightning.LAYER.saved_weights

mamba2_mixer = mamba2.LAYER.over_sequences
ragged_mamba2_mixer = mamba2.LAYER.over_step
init_mamba2_mixer = mamba2.LAYER.random_weights
load_mamba2_mixer = mamba2.LAYER.loaded_weights
save_mamba2_mixer = mamba2.LAYER.saved_weights

mlstm_layer = mlstm.LAYER.over_sequences
init_mlstm_layer = mlstm.LAYER.random_weights
load_mlstm_layer = mlstm.LAYER.loaded_weights
save_mlstm_layer = mlstm.LAYER.saved_weights

init_rwkv7_attention = rwkv7.LAYER.random_weights
load_rwkv7_attention = rwkv7.LAYER.loaded_weights
save_rwkv7_attention = rwkv7.LAYER.saved_weights

__all__ = [
    "Cache",
    "CombaConfig",
    "CombaWeights",
    "GatedDeltaNet2Config",
    "GatedDeltaNet2Weights",
    "GatedDeltaNetConfig",
    "GatedDeltaNetWeights",
    "GatedDeltaProductConfig",
    "GatedDeltaProductWeights",
    "GatedLinearAttentionConfig",
    "GatedLinearAttentionWeights",
    "KimiDeltaAttentionConfig",
    "KimiDeltaAttentionWeights",
    "LayerConfig",
    "LightningAttentionConfig",
    "LightningAttentionWeights",
    "Mamba2Config",
    "Mamba2Weights",
    "MlstmLayerConfig",
    "MlstmLayerWeights",
    "Rwkv7AttentionConfig",
    "Rwkv7AttentionWeights",
    "Shardings",
    "Step",
    "cache_from_bytes",
    "cache_to_bytes",
    "comba_layer",
    "config_from",
    "decayed",
    "empty_cache",
    "empty_pool",
    "gated_delta_net",
    "gated_delta_net2",
    "gated_delta_product",
    "gated_linear_attention",
    "init_comba_layer",
    "init_gated_delta_net",
    "init_gated_delta_net2",
    "init_gated_delta_product",
    "init_gated_linear_attention",
    "init_kimi_delta_attention",
    "init_lightning_attention",
    "init_mamba2_mixer",
    "init_mlstm_layer",
    "init_rwkv7_attention",
    "kimi_delta_attention",
    "lightning_attention",
    "load_comba_layer",
    "load_gated_delta_net",
    "load_gated_delta_net2",
    "load_gated_delta_product",
    "load_gated_linear_attention",
    "load_kimi_delta_attention",
    "load_lightning_attention",
    "load_mamba2_mixer",
    "load_mlstm_layer",
    "load_rwkv7_attention",
    "mamba2_mixer",
    "mlstm_layer",
    "offload_policy",
    "open_checkpoint",
    "place",
    "ragged_comba_layer",
    "ragged_gated_delta_net",
    "ragged_gated_delta_net2",
    "ragged_gated_delta_product",
    "ragged_gated_linear_attention",
    "ragged_kimi_delta_attention",
    "ragged_lightning_attention",
    "ragged_mamba2_mixer",
    "ragged_rwkv7_attention",
    "read_cache",
    "remat_policy",
    "rwkv7_attention",
    "save_checkpoint",
    "save_comba_layer",
    "save_gated_delta_net",
    "save_gated_delta_net2",
    "save_gated_delta_product",
    "save_gated_linear_attention",
    "save_kimi_delta_attention",
    "save_lightning_attention",
    "save_mamba2_mixer",
    "save_mlstm_layer",
    "save_rwkv7_attention",
    "shardings",
    "write_cache",
]
