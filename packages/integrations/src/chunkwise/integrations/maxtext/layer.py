"""MaxText's layer of Qwen3-Next in training, computed by `chunkwise.layers.gated_delta_net` with MaxText's parameters.

This module imports MaxText; `maxtext.install` imports this module when documents are to be kept apart.
"""

from flax import nnx
from jax.sharding import NamedSharding
from maxtext.models import qwen3
from maxtext.utils import sharding

from chunkwise.integrations.maxtext.called import must_call
from chunkwise.integrations.maxtext.weights import load_qwen3_next
from chunkwise.layers import GatedDeltaNetConfig, gated_delta_net
from chunkwise.shared.call import checks

Layer = qwen3.Qwen3NextGatedDeltaNet
_MAXTEXTS = must_call(Layer.__call__)


def over_documents(
    self, hidden_states, model_mode=qwen3.MODEL_MODE_TRAIN, kv_cache=None, decoder_segment_ids=None, **options
):
    """Return the layer's output for hidden states; each document of a packed row is computed as if it were alone.

    The arguments are the arguments of MaxText's `Qwen3NextGatedDeltaNet`, which runs itself except in training.
    """
    if model_mode != qwen3.MODEL_MODE_TRAIN:
        return _MAXTEXTS(self, hidden_states, model_mode, kv_cache, decoder_segment_ids, **options)
    c = self.config
    checks.check(self.quant is None, "MaxText's layer must have no quantization, which chunkwise's has not.")
    checks.check(c.use_qk_norm_in_gdn, "`use_qk_norm_in_gdn` must be True: chunkwise's layer has the norms.")
    config = GatedDeltaNetConfig(
        D=c.emb_dim, H=self.num_k_heads, HV=self.num_v_heads, K=self.head_k_dim, V=self.head_v_dim,
        W=c.gdn_conv_kernel_dim, eps=c.normalization_layer_epsilon,
    )  # fmt: skip
    y, _ = gated_delta_net(
        hidden_states, load_qwen3_next(nnx.to_pure_dict(nnx.state(self, nnx.Param)), config), config,
        segment_ids=decoder_segment_ids, padding_id=0, sharding=_of_values(self, len(hidden_states)),
    )  # fmt: skip
    return y, None


def _of_values(layer, B: int):
    """Return how MaxText divides values [B, T, HV, V] over a mesh with automatic axes, None for one device."""
    if layer.mesh is None or layer.mesh.size == 1 or layer.config.shard_mode == qwen3.ShardMode.EXPLICIT:
        return None
    tokens = qwen3.LENGTH if qwen3.gdn_context_axes(layer.config) else None
    names, rules = (qwen3.KV_BATCH, tokens, qwen3.KV_HEAD, None), sharding.get_logical_axis_rules()
    spec = sharding.remove_incompatible_mesh_axes_from_partition_spec(
        sharding.logical_to_mesh_axes(names, mesh=layer.mesh, rules=rules), (B, 1, 1, 1), layer.mesh, dims=(0,),
        allow_remove_axes=True,
    )  # fmt: skip
    return NamedSharding(layer.mesh, spec)
