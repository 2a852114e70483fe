"""SGLang-JAX's backends of Kimi delta attention and lightning attention, which leave states in the pool.

This module imports SGLang-JAX; `sglang_jax.install` imports this module. Dims: T tokens, H heads, K and V sizes of a
head. The axis "data" of SGLang-JAX's mesh divides requests, tokens and slots, and "tensor" divides heads.
"""

import jax
from jax.sharding import PartitionSpec
from sgl_jax.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from sgl_jax.srt.layers.attention.linear.lightning_backend import LightningAttnBackend

from chunkwise.integrations.sglang_jax.operators import kda, lightning

# The specs of tokens [T, H, ...] and of the pool [slots, H, K, V]; of weights [H, ...]; and of numbers of requests.
_HEADS, _WEIGHTS, _REQUESTS = PartitionSpec("data", "tensor"), PartitionSpec("tensor"), PartitionSpec("data")


class ChunkwiseKDA(KDAAttnBackend):
    """Kimi delta attention that reads and writes the pool itself; SGLang-JAX's convolutions are before it.

    SGLang-JAX's backend gathers the states of the requests, computes, and scatters them into the pool twice. Here its
    methods that gather and scatter pass the pool on.
    """

    def get_state(self, recurrent_state_pool, layer_id, recurrent_indices):
        """Return the pool, and the last inputs of the convolutions of each request."""
        # XLA drops the gather of the states, which nobody reads.
        _, conv = super().get_state(recurrent_state_pool, layer_id, recurrent_indices)
        return self.get_layer_cache(recurrent_state_pool, layer_id)[0], conv

    def set_ssm_state(self, recurrent_state_pool, layer_id, recurrent_indices, new_recurrent):
        """Return the pool, which has the new states already."""
        return new_recurrent

    def set_ssm_track_state(self, full_recurrent, track_indices, track_mask, new_recurrent):
        """Return the pool, which has the states for prefixes already."""
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
    """Lightning attention that reads and writes the pool itself."""

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
    """Check nothing: unlike SGLang-JAX's fused prefill, chunkwise's has no conditions on sizes, types and devices."""


def _over_devices(run, mesh, arrays, weights, step):
    """Run a function on every device with the device's heads and requests; return the pool and the output."""
    return jax.shard_map(
        run, mesh=mesh, in_specs=(_HEADS, _WEIGHTS, _REQUESTS), out_specs=_HEADS, check_vma=False
    )(arrays, weights, step)  # fmt: skip
