"""MaxText and levanter, which train: what they call, and the recurrence in float64 token by token."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.integrations import levanter, maxtext
from chunkwise.layers import GatedDeltaNetConfig, init_gated_delta_net, load_gated_delta_net
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.oracle import reference
from tests.hosts import normal

THOROUGH = dict(
    test_levanter_takes_axes_in_any_order=True,
    # Packs of the operators have documents.
    test_maxtext_documents_do_not_see_one_another=True,
)


def maxtext_inputs(B=2, S=40, H=2, K=16, V=16):
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, B, S, H, K), normal(rng, B, S, H, K), normal(rng, B, S, H, V)
    return q, k, v, -jnp.abs(normal(rng, B, S, H)), jax.nn.sigmoid(normal(rng, B, S, H)), normal(rng, B, H, K, V)


FLOAT32 = dict(use_qk_norm_in_gdn=True, compute_dtype=jnp.float32)
maxtext_reference = functools.partial(reference, use_qk_l2norm_in_kernel=True)


def test_maxtext_operators():
    *arrays, state = maxtext_inputs()
    want, states = maxtext_reference(*arrays, initial_state=state)
    o, after = maxtext.jax_chunk_gated_delta_rule(*arrays, initial_state=state, chunk_size=32, **FLOAT32)
    assert_close("o", o, want, 1e-6)
    assert_close("state", after, states, 1e-6)
    assert maxtext.jax_chunk_gated_delta_rule(*arrays)[1] is None
    token = [x[:, :1] for x in arrays]
    o, after = maxtext.jax_ar_gated_delta_rule(*token, state, **FLOAT32)
    want, states = maxtext_reference(*token, initial_state=state)
    assert_close("o of a token", o, want, 1e-6)
    assert_close("state of a token", after, states, 1e-6)


def test_maxtext_rounds_to_the_type_that_it_is_told():
    *arrays, state = maxtext_inputs()
    o, after = maxtext.jax_chunk_gated_delta_rule(*arrays, initial_state=state, use_qk_norm_in_gdn=True)
    assert (o.dtype, after.dtype) == (jnp.float32, jnp.bfloat16)
    q, k, v, g, beta = arrays
    rounded = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (q, k, v)]
    want, _ = maxtext_reference(*rounded, g, beta.astype(jnp.bfloat16).astype(jnp.float32), initial_state=state)
    assert_close("o", o, want, 5e-3)


def test_maxtext_documents_do_not_see_one_another():
    """MaxText counts segments from 1, and 0 is padding."""
    *arrays, _ = maxtext_inputs(B=1)
    ids = jnp.asarray([[1] * 15 + [2] * 20 + [0] * 5])
    o, _ = maxtext.jax_chunk_gated_delta_rule(*arrays, **FLOAT32, segment_ids=ids)
    want, _ = maxtext_reference(*arrays, segment_ids=ids - 1)
    assert_close("o", o[:, :35], want[:, :35], 1e-6)
    assert not np.any(o[:, 35:])


CONFIG = GatedDeltaNetConfig(D=12, H=2, HV=4, K=8, V=8)


def test_maxtext_weights_go_both_ways():
    """The names and the order of channels are those of Qwen3-Next, whose loader reads the same arrays."""
    weights = init_gated_delta_net(jax.random.key(0), CONFIG)
    params = maxtext.save_qwen3_next(weights, CONFIG)
    again = maxtext.load_qwen3_next(params, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, weights, again)
    named = {
        "in_proj_qkvz.weight": params["in_proj_qkvz"]["kernel"].T,
        "in_proj_ba.weight": params["in_proj_ba"]["kernel"].T,
        "conv1d.weight": params["conv1d"]["kernel"].transpose(2, 1, 0),
        "A_log": params["A_log"],
        "dt_bias": params["dt_bias"],
        "norm.weight": params["norm"]["rms_norm"]["scale"],
        "out_proj.weight": params["out_proj"]["kernel"].T,
    }
    jax.tree.map(np.testing.assert_array_equal, weights, load_gated_delta_net(named, CONFIG))


def test_maxtext_errors():
    params = maxtext.save_qwen3_next(init_gated_delta_net(jax.random.key(0), CONFIG), CONFIG)
    with pytest.raises(ValueError, match=r"`params` must have \['A_log', .*; got \['A_log', "):
        maxtext.load_qwen3_next({name: x for name, x in params.items() if name != "norm"}, CONFIG)
    with pytest.raises(ValueError, match=r"`params` must have dt_bias of shape \(4,\); got \(3,\)\."):
        maxtext.load_qwen3_next(params | {"dt_bias": jnp.ones(3)}, CONFIG)


class Named:
    """What the adapter uses of a haliax.NamedArray, which is in no session that runs by default."""

    def __init__(self, array, axes):
        self.array, self.axes = array, tuple(axes)

    def rearrange(self, axes):
        return Named(self.array.transpose([self.axes.index(axis) for axis in axes]), axes)


def test_levanter_takes_axes_in_any_order(monkeypatch):
    haliax = type(sys)("haliax")
    haliax.named = Named
    monkeypatch.setitem(sys.modules, "haliax", haliax)
    *arrays, state = maxtext_inputs()
    want, states = maxtext_reference(*arrays, initial_state=state)
    axes = ("batch", "position", "heads")
    last = (("k_head_dim",), ("k_head_dim",), ("v_head_dim",), (), ())
    turned = [Named(x, (*axes, *name)) for x, name in zip(arrays, last, strict=True)]
    turned[0] = turned[0].rearrange(("k_head_dim", "heads", "position", "batch"))
    turned[4] = turned[4].rearrange(("heads", "batch", "position"))
    for function in (levanter.chunk_gated_delta_rule, levanter.recurrent_gated_delta_rule):
        o, after = function(*turned, initial_state=state, output_final_state=True)
        assert o.axes == (*axes, "v_head_dim")
        assert_close("o", o.array, want, 1e-6)
        assert_close("state", after, states, 1e-6)
