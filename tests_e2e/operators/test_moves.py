"""A request moves: another process goes on with the tokens that the first one would have made."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.layers import (
    GatedDeltaNetConfig,
    Step,
    cache_from_bytes,
    cache_to_bytes,
    empty_pool,
    init_gated_delta_net,
    ragged_gated_delta_net,
    read_cache,
    write_cache,
)

VOCABULARY, SLOTS, SECONDS = 32, 3, 240
CONFIG = GatedDeltaNetConfig(D=16, H=1, HV=2, K=8, V=8)


class Engine:
    """A model of one layer that takes the likeliest token, and serves one request from a slot of its pool."""

    def __init__(self, slot: int, replay: int, decode_tokens: int):
        self.embedding = jax.random.normal(jax.random.key(0), (VOCABULARY, CONFIG.D))
        self.weights = init_gated_delta_net(jax.random.key(1), CONFIG)
        self.slot, self.kept = np.array([slot], np.int32), 1
        self.pool = empty_pool(CONFIG, SLOTS, jnp.bfloat16, replay=replay, decode_tokens=decode_tokens)

        def step(tokens, pool, step):
            x = self.embedding[tokens][None].astype(jnp.bfloat16)
            y, pool = ragged_gated_delta_net(
                x, self.weights, CONFIG, pool, step, decode_tokens=decode_tokens, implementation="xla"
            )
            return jnp.argmax(y[0].astype(jnp.float32) @ self.embedding.T, axis=-1), pool

        self._step = jax.jit(step)

    def run(self, tokens: list[int], decodes: int) -> list[int]:
        """Run tokens, after those of the last run that are kept, and return the likeliest token after each of them."""
        padded = np.pad(np.array(tokens, np.int32), (0, 6 - len(tokens)))
        step = Step(
            np.array([0, len(tokens)], np.int32), self.slot, np.array([decodes > 0]), np.int32(decodes),
            num_accepted_tokens=np.array([self.kept], np.int32),
        )  # fmt: skip
        likely, self.pool = self._step(padded, self.pool, step)
        return [int(token) for token in likely[: len(tokens)]]

    def decode(self, token: int, count: int) -> list[int]:
        """Return the next tokens of the request. Each decode carries a guess, which is always wrong and taken back."""
        made = []
        for _ in range(count):
            right = self.run([token, 0], 1)[0]
            self.kept, token = 1, right
            made.append(token)
        return made


def worker(token: int, count: int) -> None:
    """Go on with the request that comes in: another slot of another pool, with a ring of another length."""
    engine = Engine(slot=0, replay=8, decode_tokens=4)
    engine.pool = write_cache(engine.pool, engine.slot, cache_from_bytes(sys.stdin.buffer.read(), CONFIG))
    print(*engine.decode(token, count))


def test_another_process_goes_on():
    """After a prompt and some tokens, each with a guess that was taken back."""
    engine = Engine(slot=2, replay=5, decode_tokens=2)
    first = engine.run([3, 1, 4, 1, 5, 9], 0)[-1]
    last = engine.decode(first, 4)[-1]
    cache = read_cache(engine.pool, engine.slot, np.array([engine.kept], np.int32))
    command = [sys.executable, str(Path(__file__)), str(last), "8"]
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    there = subprocess.run(
        command, input=cache_to_bytes(cache, CONFIG), env=environment, capture_output=True, timeout=SECONDS, check=False
    )
    assert there.returncode == 0, there.stderr.decode()[-2000:]
    got = [int(token) for token in there.stdout.split()]
    want = engine.decode(last, 8)
    assert len(set(want)) > 2
    assert got == want


if __name__ == "__main__":
    worker(*map(int, sys.argv[1:]))
