"""SGLang-JAX's backends of Kimi delta attention and lightning attention, with their states left in the pool.

This module imports SGLang-JAX; `sglang_jax.install` imports this module. Dims: T tokens, H heads, K and V sizes of a
head. The axis "data" of SGLang-JAX's mesh divides requests, tokens and slots, and "tensor" divides heads.
"""

import jax
from jax.sharding import PartitionSpec
from sgl_jax.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from sgl_jax.srt.layers.attention.linear.lightning_backend import LightningAttnBackend

from chunkwise.integrations.sglang_jax import kda, lightning

# Arrays of tokens [T, H, ...] and the pool [slots, H, K, V]; weights [H, ...]; a number for each request.
_HEADS, _WEIGHTS, _REQUESTS = PartitionSpec("data", "tensor"), PartitionSpec("tensor"), PartitionSpec("data")


class ChunkwiseKDA(KDAAttnBackend):
    """Kimi delta attention over the pool itself, between SGLang-JAX's convolutions.

    SGLang-JAX's backend gathers the states of the requests, computes, and scatters them into the pool twice. Here its
    methods that gather and scatter pass the pool on.
    """

    def get_state(self, recurrent_state_pool, layer_id, recurrent_indices):
        """Return the pool, and the inputs of the convolutions that each request has left."""
        # XLA drops the gather of the states, which nobody reads.
        _, conv = super().get_state(recurrent_state_pool, layer_id, recurrent_indices)
        return self.get_layer_cache(recurrent_state_pool, layer_id)[0], conv

    def set_ssm_state(self, recurrent_state_pool, layer_id, recurrent_indices, new_recurrent):
        """Return the pool, in which the operator has left the states."""
        return new_recurrent

    def set_ssm_track_state(self, full_recurrent, track_indices, track_mask, new_recurrent):
        """Return the pool, in which the operator has left the states for prefixes too."""
        return full_recurrent

    def _forward_extend(self, q, k, v, g, beta, initial_state, cu_seqlens, layer, scale=None):
        return self._run(q, k, v, g, beta, initial_state, cu_seqlens, layer, scale)

    def _forward_decode(self, q, k, v, g, beta, initial_state, layer, scale=None):
        return self._run(q, k, v, g, beta, initial_state, None, layer, scale)

    def _run(self, q, k, v, a, b, pool, cu_seqlens, layer, scale):
        meta, H = self.forward_metadata, q.shape[1]
        weights = layer.A_log.value.reshape(H), layer.dt_bias.value.reshape(H, -1)
        step = dict(
            cu_seqlens=cu_seqlens, state_indices=meta.recurrent_indices, has_initial_state=meta.has_initial_state,
            track_indices=meta.recurrent_track_indices, track_mask=meta.recurrent_track_mask,
        )  # fmt: skip
        run = lambda arrays, weights, step: kda(*arrays, *weights, **step, scale=scale)
        pool, o = _over_devices(run, self.mesh, (q, k, v, a, b, pool), weights, step)
        return o, pool


class ChunkwiseLightning(LightningAttnBackend):
    """Lightning attention over the pool itself."""

    def _forward_decode(self, q, k, v, recurrent_buffer, recurrent_indices, has_initial_state, slope):
        return self._run(q, k, v, recurrent_buffer, None, recurrent_indices, has_initial_state, slope)

    def _forward_extend(self, q, k, v, recurrent_buffer, recurrent_indices, has_initial_state, slope):
        cu_seqlens = self.forward_metadata.cu_q_lens
        return self._run(q, k, v, recurrent_buffer, cu_seqlens, recurrent_indices, has_initial_state, slope)

    def _run(self, q, k, v, pool, cu_seqlens, state_indices, has_initial_state, slope):
        step = dict(cu_seqlens=cu_seqlens, state_indices=state_indices, has_initial_state=has_initial_state)
        run = lambda arrays, slope, step: lightning(*arrays[:3], slope, arrays[3], **step)
        pool, o = _over_devices(run, self.mesh, (q, k, v, pool), slope, step)
        return o, pool


def any_sizes(**sizes) -> None:
    """Refuse nothing: what SGLang-JAX's fused prefill asks of sizes, types and devices, chunkwise's does not."""


def _over_devices(run, mesh, arrays, weights, step):
    """Return the pool and the output of a function of a device's heads and requests. None in a step has no spec."""
    return jax.shard_map(
        run, mesh=mesh, in_specs=(_HEADS, _WEIGHTS, _REQUESTS), out_specs=_HEADS, check_vma=False
    )(arrays, weights, step)  # fmt: skip
