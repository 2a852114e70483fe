"""Weights of Gated DeltaNet 2 by the names of flash-linear-attention's layer, and how they are divided."""

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.layers import GatedDeltaNet2Config, init_gated_delta_net2, load_gated_delta_net2

D, H, HV, K, V, W = 10, 2, 4, 3, 5, 4
CONFIG, PREFIX = GatedDeltaNet2Config(D, H, HV, K, V, W), "model.layers.0.attn."
# torch has a projection as [out, in], and a convolution as [channels, 1, W].
SHAPES = {
    "q_proj.weight": (H * K, D), "k_proj.weight": (H * K, D), "v_proj.weight": (HV * V, D),
    "q_conv1d.weight": (H * K, 1, W), "k_conv1d.weight": (H * K, 1, W), "v_conv1d.weight": (HV * V, 1, W),
    "f_proj.0.weight": (V, D), "f_proj.1.weight": (H * K, V), "A_log": (H,), "dt_bias": (H * K,),
    "b_proj.weight": (H * K, D), "w_proj.weight": (HV * V, D), "g_proj.0.weight": (V, D),
    "g_proj.1.weight": (HV * V, V), "g_proj.1.bias": (HV * V,), "o_norm.weight": (V,), "o_proj.weight": (D, HV * V),
}  # fmt: skip


def checkpoint(dtype=np.float32) -> dict:
    rng = np.random.default_rng(0)
    return {PREFIX + name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def load(named: dict):
    return load_gated_delta_net2(named, CONFIG, PREFIX)


def test_checkpoint():
    """Every array goes to its place, in the types of `init_gated_delta_net2`, and other layers are left alone."""
    named = checkpoint()
    weights = load(named | {"model.layers.1.attn.A_log": np.zeros(7)})
    of = lambda name: named[PREFIX + name]
    matrix = lambda name: of(f"{name}.weight").T
    want = dict(
        q=matrix("q_proj"), k=matrix("k_proj"), v=matrix("v_proj"), f=(matrix("f_proj.0"), matrix("f_proj.1")),
        z=(matrix("g_proj.0"), matrix("g_proj.1")), z_bias=of("g_proj.1.bias"), b=matrix("b_proj"), w=matrix("w_proj"),
        conv=tuple(of(f"{name}_conv1d.weight")[:, 0] for name in "qkv"), A_log=of("A_log"),
        dt_bias=of("dt_bias").reshape(H, K), norm=of("o_norm.weight"), out=matrix("o_proj"),
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, weights._asdict(), want)
    made = jax.eval_shape(lambda: init_gated_delta_net2(jax.random.key(0), CONFIG, jnp.bfloat16))
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert kinds(load(checkpoint(jnp.bfloat16))) == kinds(made)
