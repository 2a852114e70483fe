"""Every ValueError about the arguments of one operator, by its text, of both of its forms.

The arguments are shapes only, so nothing can have been computed.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import fused_gdn, fused_gla, kda
from chunkwise.pipeline import MlstmState, chunk_kda
from chunkwise.pipeline.operators import COMPOSED, OPERATORS
from chunkwise.shared.testing.inputs import spec

ENTRIES = OPERATORS | COMPOSED
# B, T, H, HV, K and V; a recipe has as many heads of keys as of values.
SIZES = 1, 64, 2, 4, 8, 6
STATE = MlstmState._make(spec(1, 4, *tail) for tail in ((8, 6), (8,), ()))
GDN, KDA, SIMPLE, GLA, GDN2, COMBA = "gated_delta_rule", "kda", "simple_gla", "gla", "gdn2", "comba"
MLSTM, MAMBA2, MAMBA3, DPLR, PRODUCT = "mlstm", "mamba2", "mamba3", "dplr_delta_rule", "gated_delta_product"
PRECOND, BY_CHANNEL = "precond_gated_delta_rule", "precond_kda"
BUILT = ", known when the program is built; got an array float32 ()."
WRONG = [
    (GDN, dict(k=spec(1, 64, 2)), "`k` must have shape [B, T, H, K]; got (1, 64, 2)."),
    (GDN, dict(v=spec(1, 64, 3, 6)), "`v` must have a multiple of the heads of `k`; got 3 value heads for 2"),
    (GDN, dict(g=spec(1, 64, 2)), "`g` must have shape [B, T, HV] = (1, 64, 4); got (1, 64, 2)."),
    (GDN, dict(beta=spec(1, 64, 4, dtype=jnp.int32)), "`beta` must be float32, bfloat16 or float16; got int32."),
    (GDN, dict(initial_state=spec(2, 4, 8, 6)), "`initial_state` must have shape [N, HV, K, V] = (1, 4, 8, 6)"),
    (GDN, dict(cu_seqlens=jnp.array([0, 65])), "`cu_seqlens` must rise from 0 to at most T = 64; got [0, 65]."),
    (GDN, dict(implementation="cuda"), "`implementation` must be None or one of ('fused', "),
    (KDA, dict(g=spec(1, 64, 4)), "`g` must have shape [B, T, HV, K]; got (1, 64, 4)."),
    (KDA, dict(g=spec(1, 64, 2, 8)), "`g` must have shape [B, T, HV, K] = (1, 64, 4, 8); got (1, 64, 2, 8)."),
    *((KDA, dict(min_gate=x), f"`min_gate` must be None or a number <= 0; got {x!r}.")
      for x in (1.0, np.float32(0.5), math.nan, True, "-5")),
    (KDA, dict(min_gate=jnp.float32(-5.0)), f"`min_gate` must be None or a number <= 0{BUILT}"),
    (SIMPLE, dict(q=spec(1, 64, 1, 8)), "`q` must have shape [B, T, H, K] = (1, 64, 2, 8); got (1, 64, 1, 8)."),
    (SIMPLE, dict(g=spec(1, 64, 1)), "`g` must have shape [B, T, HV] = (1, 64, 4); got (1, 64, 1)."),
    (SIMPLE, dict(g=spec(1, 64, 4, 8)), "`g` must have shape [B, T, HV]; got (1, 64, 4, 8)."),
    (SIMPLE, dict(g_gamma=spec(3)), "`g_gamma` must have shape [HV] = (4); got (3,)."),
    (GLA, dict(g=spec(1, 64, 4)), "`g` must have shape [B, T, HV, K]; got (1, 64, 4)."),
    (GLA, dict(g=spec(1, 64, 4, 4)), "`g` must have shape [B, T, HV, K] = (1, 64, 4, 8); got (1, 64, 4, 4)."),
    (GLA, dict(initial_state=spec(2, 4, 8, 6)), "`initial_state` must have shape [N, HV, K, V] = (1, 4, 8, 6); got (2"),
    (GDN2, dict(b=spec(1, 64, 2, 8)), "`b` must have shape [B, T, HV, K] = (1, 64, 4, 8); got (1, 64, 2, 8)."),
    (GDN2, dict(w=spec(1, 64, 4, 8)), "`w` must have shape [B, T, HV, V] = (1, 64, 4, 6); got (1, 64, 4, 8)."),
    (GDN2, dict(g=spec(1, 64, 4)), "`g` must have shape [B, T, HV, K]; got (1, 64, 4)."),
    (GDN2, dict(allow_neg_eigval=True),
     "`allow_neg_eigval` must be False without `use_erase_sigmoid_in_kernel`; got True."),
    (GDN2, dict(use_write_sigmoid_in_kernel=1),
     "`use_write_sigmoid_in_kernel` must be True or False, known when the program is built; got 1."),
    (COMBA, dict(p=spec(1, 64, 4, 8)), "`p` must have shape [B, T, H, K] = (1, 64, 2, 8); got (1, 64, 4, 8)."),
    (COMBA, dict(g=spec(1, 64, 4, 8)), "`g` must have shape [B, T, HV]; got (1, 64, 4, 8)."),
    (COMBA, dict(allow_neg_eigval=True),
     "`allow_neg_eigval` must be False without `use_beta_sigmoid_in_kernel`; got True."),
    (MLSTM, dict(q=spec(1, 64, 1, 8)), "`q` must have shape [B, T, H, K] = (1, 64, 2, 8); got (1, 64, 1, 8)."),
    (MLSTM, dict(i=spec(1, 64, 1)), "`i` must have shape [B, T, HV] = (1, 64, 4); got (1, 64, 1)."),
    (MLSTM, dict(f=spec(1, 4, 64)), "`f` must have shape [B, T, HV] = (1, 64, 4); got (1, 4, 64)."),
    (MLSTM, dict(f=None), "`f` must be an array [B, T, HV]; got NoneType."),
    (MLSTM, dict(initial_state=STATE.C),
     "`initial_state` must be None or a tuple MlstmState (C, n, m); got an array float32 (1, 4, 8, 6)."),
    (MLSTM, dict(initial_state=[*STATE]),
     "`initial_state` must be None or a tuple MlstmState (C, n, m); got a list with arrays."),
    (MLSTM, dict(initial_state=STATE._replace(n=spec(1, 4, 4))),
     "`initial_state.n` must have shape [N, HV, K] = (1, 4, 8); got (1, 4, 4)."),
    (MLSTM, dict(initial_state=STATE._replace(m=spec(1, 4, 1))),
     "`initial_state.m` must have shape [N, HV]; got (1, 4, 1)."),
    (MLSTM, dict(eps=-1.0), "`eps` must be a finite number of at least 0; got -1.0."),
    (MLSTM, dict(eps=jnp.ones(())), f"`eps` must be a finite number of at least 0{BUILT}"),
    (MLSTM, dict(sharding="x"), "`sharding` must be None, a NamedSharding or a PartitionSpec; got str."),
    (MLSTM, dict(context_axis="x"), "`context_axis` must name axes of the `shard_map` around the call, which has ()"),
    (MAMBA2, dict(B=spec(1, 64, 2, 3)), "`C` must have shape [B, T, H, K] = (1, 64, 2, 3); got (1, 64, 2, 8)."),
    (MAMBA2, dict(x=spec(1, 64, 3, 6)), "`x` must have a multiple of the heads of `B`; got 3 heads for 2."),
    (MAMBA2, dict(A=spec(2)), "`A` must have shape [HV] = (4); got (2,)."),
    (MAMBA2, dict(D=spec(4, 2)), "`D` must have shape [HV, V] = (4, 6); got (4, 2)."),
    (MAMBA2, dict(dt_limit=(1.0, 0.5)), "`dt_limit` must be two numbers, 0 <= least <= most; got (1.0, 0.5)."),
    (DPLR, dict(a=spec(1, 8, 2, 8)), "`a` must have shape [B, T, H, K] = (1, 64, 2, 8); got (1, 8, 2, 8)."),
    (DPLR, dict(b=spec(1, 64, 4, 8)), "`b` must have shape [B, T, H, K] = (1, 64, 2, 8); got (1, 64, 4, 8)."),
    (DPLR, dict(gk=spec(1, 64, 4)), "`gk` must have shape [B, T, HV, K]; got (1, 64, 4)."),
    (DPLR, dict(v=spec(1, 8, 4, 6)), "`v` must have shape [B, T, HV, V] = (1, 64, any, any); got (1, 8, 4, 6)."),
    (PRODUCT, dict(num_householder=3), "`k` must have shape [B, T*n, H, K] = (1, 192, 2, 8); got (1, 128, 2, 8)."),
    (PRODUCT, dict(num_householder=0), "`num_householder` must be a whole number above 0; got 0."),
    (PRODUCT, dict(num_householder=jnp.int32(2)),
     "`num_householder` must be a whole number above 0, known when the program"),
    (PRODUCT, dict(v=spec(1, 64, 4, 6)),
     "`v` must have shape [B, T*n, HV, V] = (1, 128, any, any); got (1, 64, 4, 6)."),
    (PRODUCT, dict(beta=spec(1, 64, 4)), "`beta` must have shape [B, T*n, HV] = (1, 128, 4); got (1, 64, 4)."),
    (PRODUCT, dict(g=spec(1, 128, 4)), "`g` must have shape [B, T, HV] = (1, 64, 4); got (1, 128, 4)."),
    (PRODUCT, dict(g=None, use_gate_in_kernel=True), "`use_gate_in_kernel` must be False without `g`; got True."),
    (PRODUCT, dict(cu_seqlens=jnp.array([0, 65])), "`cu_seqlens` must rise from 0 to at most T = 64; got [0, 65]."),
    ("hgrn2", dict(g=spec(1, 64, 4)), "`g` must have shape [B, T, H, K]; got (1, 64, 4)."),
    ("rwkv6", dict(u=spec(2, 4)), "`u` must have shape [H, K] = (4, 8); got (2, 4)."),
    ("rwkv6", dict(cu_seqlens=jnp.array([0, 65])), "`cu_seqlens` must rise from 0 to at most T = 64; got [0, 65]."),
    (MAMBA3, dict(angles=spec(1, 64, 4, 5)), "`angles` must have at most K / 2 channels; got 5 for K = 8."),
    (MAMBA3, dict(initial_state=spec(1, 4, 8, 6)),
     "`initial_state` must be None or a tuple Mamba3State (S, angle, k, v); got"),
    (PRECOND, dict(g=spec(1, 64, 4, 8)), "`g` must have shape [B, T, HV]; got (1, 64, 4, 8)."),
    (PRECOND, dict(x=1.0), "`x` must be a number above 1; got 1.0."),
    (BY_CHANNEL, dict(initial_state=(spec(1, 4, 8, 6), spec(1, 4, 4))),
     "`initial_state.A` must have shape [N, H, K] = (1, 4, 8); got (1, 4, 4)."),
]  # fmt: skip
BLOCKS = "in whole groups of 2 or inside of one, and with K = 16 and V = 16 in multiples of 128 channels or all heads"
WHOLE = "`config.heads_bwd` must be all 4 value heads, or so many that those of K = 16 and of V = 16 channels each "
# Of kernels of chunks.
WRONG_OF_CHUNKS = [
    (GDN, fused_gdn.Config(3, 4), "`config.heads` must divide 4 value heads; got 3."),
    (GDN, fused_gdn.Config(4, 2), f"{WHOLE}fill whole registers of 128; got 2."),
    (GDN, fused_gdn.Config(4, 4, turns=0), "`config.turns` must be a whole number above 0; got 0."),
    (GDN, fused_gdn.Config(4, 4.0), "`config.heads_bwd` must be a whole number above 0; got 4.0."),
    (GDN, dict(heads=4), "`config` must be None or a chunkwise.fused_gdn.Config; got {'heads': 4}."),
    (KDA, kda.Config(3, 4), f"`config.heads` must divide 4 value heads {BLOCKS}; got 3."),
    (KDA, kda.Config(4, 3), "`config.heads_bwd` must divide 4 value heads in whole groups of 2 or inside of one, and"),
    (KDA, kda.Config(0, 2), "`config.heads` must be a whole number above 0; got 0."),
    (SIMPLE, fused_gla.Config(3, 1, 1), f"`config.heads` must divide 4 value heads {BLOCKS}; got 3."),
]


def refused(function, entry, wrong: dict, message: str) -> None:
    """Fail unless a function refuses what is wrong before it reads an array."""
    x = jax.tree.map(lambda y: spec(*y.shape, dtype=y.dtype), entry.source.inputs(*SIZES)) | dict(entry.static) | wrong
    is_shape = lambda y: (leaves := jax.tree.leaves(y)) and all(isinstance(z, jax.ShapeDtypeStruct) for z in leaves)
    arrays = {name: y for name, y in x.items() if is_shape(y)}
    rest = {name: y for name, y in x.items() if name not in arrays}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        jax.eval_shape(lambda arrays: function(**arrays, **rest), arrays)


@pytest.mark.parametrize(("name", "wrong", "message"), WRONG)
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_value_error(form, name, wrong, message):
    entry = ENTRIES[f"{form}_{name}"]
    refused(entry.function, entry, wrong, message)


@pytest.mark.parametrize(("name", "config", "message"), WRONG_OF_CHUNKS)
def test_config(name, config, message):
    entry = OPERATORS[f"chunk_{name}"]
    refused(entry.function, entry, dict(config=config, implementation="fused"), message)


def test_ids_are_of_the_tokens_of_queries():
    """A token of Gated DeltaProduct has several keys."""
    entry, ids = COMPOSED[f"chunk_{PRODUCT}"], spec(1, 128, dtype=jnp.int32)
    message = "`segment_ids` must be int32 of shape (1, 64); got int32 (1, 128)."
    refused(entry.function, entry, dict(segment_ids=ids), message)


BOUNDS = [None, 0, -5, -5.0, -math.inf, np.float32(-5.0), np.int64(-5), np.float16(-5.0)]


@pytest.mark.parametrize("bound", BOUNDS, ids=repr)
def test_any_number_is_a_least_gate(bound):
    x = jax.eval_shape(lambda: OPERATORS["chunk_kda"].source.inputs(*SIZES))
    o, _ = jax.eval_shape(lambda x: chunk_kda(**x, min_gate=bound), x)
    assert o.shape == x["v"].shape
