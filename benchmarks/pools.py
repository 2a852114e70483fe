"""The error of decodes over every pool of states: RMS of o against the float64 recurrence.

For the pools of the library, the serving step of the gated delta rule decodes token by token. Formats that the library
does not have are simulated: the state is rounded after every token, or after every 16 tokens as with a ring, whose
tokens are exact.

`measure_bits` measures the loss of a trained model, the model of examples/train.py, over every pool.
"""

import argparse
import functools
import math
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from chunkwise import layers, pipeline
from chunkwise.shared.plain import recurrence
from chunkwise.shared.testing.compare import error
from chunkwise.shared.testing.oracle import reference

# Mean gates in nats a token.
STRENGTHS = (0.5, 0.05, 0.005)
# Keys of a text: noisy copies of 64 keys, or the same key for half of the tokens.
KEYS = ("64 keys", "half repeated")
POOLS = {
    f"{dtype}{f', ring of {replay}' if replay else ''}": (dtype, replay)
    for dtype in ("float32", "bfloat16", "float16", "int8")
    for replay in (0, 16)
} | {f"int8, ring of {replay}": ("int8", replay) for replay in (8, 32)}
K = V = 64
RING = 16


def inputs(strength: float, keys: str, T: int) -> dict:
    """Return the tokens of two heads, in float32: unit keys, step sizes of about a half, gates of a mean strength."""
    rng, H = np.random.default_rng(4), 2
    normal = lambda *shape: rng.standard_normal((1, T, H, *shape))
    centres = rng.standard_normal((64, H, K))
    k = centres[rng.integers(64, size=T)][None] + 0.3 * normal(K)
    if keys == "half repeated":
        k = np.where(rng.random(T)[None, :, None, None] < 0.5, k[:, :1], k)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    x = dict(
        q=unit(normal(K)), k=unit(k), v=normal(V), g=-strength * rng.exponential(size=(1, T, H)),
        beta=1 / (1 + np.exp(-normal())),
    )  # fmt: skip
    return {name: jnp.asarray(y, jnp.float32) for name, y in x.items()}


@functools.partial(jax.jit, static_argnums=(1, 2))
def decode(x: dict, dtype: str, replay: int) -> jax.Array:
    """Return o of a text that is decoded token by token over a pool of one slot."""
    H = x["q"].shape[2]
    pool = pipeline.make_pool(1, H, K, V, dtype, replay=replay)

    def step(pool, token):
        token = {name: y[None, None] for name, y in token.items()}
        boundaries, slot = jnp.array([0, 1], jnp.int32), jnp.zeros(1, jnp.int32)
        o, pool = pipeline.ragged_gated_delta_rule(
            **token, states=pool, cu_seqlens=boundaries, state_indices=slot, num_decodes=jnp.int32(1),
            implementation="xla",
        )  # fmt: skip
        return pool, o[0, 0]

    return lax.scan(step, pool, {name: y[0] for name, y in x.items()})[1][None]


def to_float8(S: jax.Array, key: jax.Array) -> jax.Array:
    """Return states rounded to e4m3, every row scaled to its largest number, 448."""
    scale = jnp.max(jnp.abs(S), axis=-1, keepdims=True) / 448
    safe = jnp.where(scale > 0, scale, 1.0)
    return (S / safe).astype(jnp.float8_e4m3fn).astype(jnp.float32) * safe


def to_int8_stochastically(S: jax.Array, key: jax.Array) -> jax.Array:
    """Return states rounded to int8, up or down at random, so that the error is zero on average."""
    scale = jnp.max(jnp.abs(S), axis=-1, keepdims=True) / 127
    safe = jnp.where(scale > 0, scale, 1.0)
    return jnp.floor(S / safe + jax.random.uniform(key, S.shape)) * safe


SIMULATED = {"e4m3": to_float8, "int8, stochastic": to_int8_stochastically}


@functools.partial(jax.jit, static_argnums=(1, 2))
def simulate(x: dict, rounding: str, ring: int) -> jax.Array:
    """Return o of a text whose state is rounded after every `ring` tokens."""

    def step(S, token):
        i, token = token
        S, o, _ = recurrence.advance(S, *token, jnp.float32(K**-0.5))
        rounded = SIMULATED[rounding](S, jax.random.fold_in(jax.random.key(0), i))
        return jnp.where((i + 1) % ring == 0, rounded, S), o

    tokens = tuple(x[name][0] for name in ("q", "k", "v", "g", "beta"))
    T, H = tokens[0].shape[:2]
    return lax.scan(step, jnp.zeros((H, K, V)), (jnp.arange(T), tokens))[1][None]


def measure(strength: float, keys: str, T: int) -> list[dict]:
    """Return a row for every pool, and for every format that is simulated."""
    x = inputs(strength, keys, T)
    want = reference(**x)[0]
    runs = {name: functools.partial(decode, x, *pool) for name, pool in POOLS.items()}
    for name in SIMULATED:
        runs[f"{name}, simulated"] = functools.partial(simulate, x, name, 1)
        runs[f"{name}, ring of {RING}, simulated"] = functools.partial(simulate, x, name, RING)
    return [{"pool": name, "error": error(run(), want)} for name, run in runs.items()]


def decode_layer(replaced, x: jax.Array, segment_ids: jax.Array, dtype: str, replay: int) -> jax.Array:
    """Return the output of a DeltaNet of examples/train.py for rows [N, T, D], decoded token by token over a pool."""
    config, N = replaced.config, x.shape[0]
    pool = layers.empty_pool(config, N, x.dtype, dtype, replay=replay)
    before = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
    step = layers.Step(jnp.arange(N + 1, dtype=jnp.int32), jnp.arange(N, dtype=jnp.int32), num_decodes=jnp.int32(N))

    def decode_tokens(pool, token):
        x, goes_on = token
        y, pool = layers.ragged_gated_delta_net(
            x[None], replaced.weights.get_value(), config, pool, step._replace(has_initial_state=goes_on),
            implementation="xla",
        )  # fmt: skip
        return pool, y[0]

    tokens = jnp.swapaxes(x, 0, 1), (segment_ids == before).T
    return jnp.swapaxes(lax.scan(decode_tokens, pool, tokens)[1], 0, 1)


def measure_bits(output: Path, total: int = 8192) -> list[dict]:
    """Return bits per byte of text that the model of examples/train.py has not seen, decoded over every pool.

    Args:
      output: the folder of a finished run with default options.
      total: bytes of the text, in rows of the length that the model was trained with.
    """
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import train

    o = argparse.Namespace(**{name: default for name, (default, _) in train.OPTIONS.items()} | {"output": output})
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rows = [x[: total // o.length] for x in train.rows_of(train.read_library(o.held_out)[1], o.length)]
    with jax.set_mesh(mesh):
        # The run is finished, so this only loads the model.
        model = train.train(train.new_model(o.width, mesh), rows, rows, o)[0]
        bits = {"chunkwise, no pool": float(train.measure(model, rows, len(rows[0]))) / math.log(2)}
        for name, (dtype, replay) in POOLS.items():
            decoded = functools.partialmethod(decode_layer, dtype=dtype, replay=replay)
            with mock.patch.object(train.DeltaNet, "__call__", decoded):
                train.loss_of.clear_cache()
                bits[name] = float(train.measure(model, rows, len(rows[0]))) / math.log(2)
    train.loss_of.clear_cache()
    return [{"pool": name, "bits_per_byte": x, "over_float32": x / bits["float32"] - 1} for name, x in bits.items()]
