"""A training over two processes with orbax: one process dies, and the runs after it come to the losses of one run."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from chunkwise.layers import GatedDeltaNetConfig, decayed, gated_delta_net, init_gated_delta_net, shardings
from tests_e2e.mesh import processes

STEPS, SAVED, SECONDS, HEARTBEAT = 6, 2, 200, 10
CONFIG = GatedDeltaNetConfig(D=8, H=2, HV=2, K=4, V=4)
# Two runs of two processes for each case.
THOROUGH = dict(test_a_process_that_dies=True)


def first_weights():
    """Return the weights before the first step."""
    embedding, head = (jax.random.normal(jax.random.key(i), shape) / 3 for i, shape in enumerate([(16, 8), (8, 16)]))
    return dict(embedding=embedding, mixer=init_gated_delta_net(jax.random.key(2), CONFIG), head=head)


def loss_of(weights, tokens, sharding):
    """Return the mean of -log p(next token) over two documents in each row."""
    ids = jnp.broadcast_to((jnp.arange(tokens.shape[1]) > 5).astype(jnp.int32), tokens.shape)
    x = weights["embedding"][tokens]
    x = x + gated_delta_net(
        x, weights["mixer"], CONFIG, segment_ids=ids, sharding=sharding, implementation="xla"
    )[0]  # fmt: skip
    log_p = jax.nn.log_softmax((x @ weights["head"])[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=2))


def train(folder: Path, dies: str, rank: int) -> list[float]:
    """Return the losses of all steps; the second process kills itself before a step, or while it saves."""
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    on = shardings(CONFIG, {"batch": "data"}, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    optimizer = optax.adamw(1e-2, mask=dict(embedding=True, head=True, mixer=decayed(CONFIG)))

    @jax.jit
    def step(weights, moments, tokens):
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens, NamedSharding(mesh, on.values))
        updates, moments = optimizer.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments, loss

    def batch(n):
        rows = np.random.default_rng(n).integers(0, 16, (2, 12)).astype(np.int32)
        return jax.make_array_from_callback(rows.shape, NamedSharding(mesh, on.x), lambda index: rows[index[0]])

    weights = jax.jit(first_weights, out_shardings=everywhere)()
    # Without `out_shardings` the state lies on one device, because its zeros are made of no array.
    moments = jax.jit(optimizer.init, out_shardings=everywhere)(weights)
    state = dict(weights=weights, moments=moments, losses=np.zeros(STEPS))
    with ocp.CheckpointManager(folder) as checkpoints:
        last = checkpoints.latest_step() or 0
        if last:
            at_place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
            state = checkpoints.restore(last, args=ocp.args.StandardRestore(jax.tree.map(at_place, state)))
        print("from", last, flush=True)
        for n in range(last, STEPS):
            if (dies, n, rank) == ("step", 3, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            weights, moments, loss = step(state["weights"], state["moments"], batch(n))
            losses = np.array(state["losses"])
            losses[n] = loss
            state = dict(weights=weights, moments=moments, losses=losses)
            if (n + 1) % SAVED == 0:
                checkpoints.save(n + 1, args=ocp.args.StandardSave(state))
                if n + 1 == SAVED:
                    # The first checkpoint is whole before anything happens to the processes.
                    checkpoints.wait_until_finished()
                if (dies, n + 1, rank) == ("save", 4, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.wait_until_finished()
    return state["losses"].tolist()


def worker(rank: int, port: int, folder: str, dies: str) -> None:
    processes.join(rank, port, devices=1, heartbeat_timeout_seconds=HEARTBEAT)
    print(json.dumps(train(Path(folder), dies, rank)), flush=True)
    jax.distributed.shutdown()


def run(folder: Path, dies: str = "never") -> list[processes.Ended]:
    """Run two processes to their ends."""
    quick = dict(JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    return processes.run_two(__file__, str(folder), dies, seconds=SECONDS, **quick)


def losses_of(ended: list[processes.Ended]) -> list[float]:
    """Return the losses that both processes have, which must have ended without an error."""
    for child in ended:
        assert child.code == 0, child.errors[-3000:]
    first, second = (json.loads(child.out.splitlines()[-1]) for child in ended)
    assert first == second
    return first


@pytest.mark.parametrize("when", ["step", "save"])
def test_a_process_that_dies(tmp_path, when):
    """The other process ends with an error, and does not wait for ever; then both go on after a whole checkpoint."""
    start = time.perf_counter()
    first, second = run(tmp_path / "shared", when)
    assert second.code == -signal.SIGKILL
    assert first.code != 0
    assert time.perf_counter() - start < SECONDS
    again = run(tmp_path / "shared")
    assert all(re.search(r"from [24]\b", child.out) for child in again), again
    undisturbed = train(tmp_path / "alone", "never", 0)
    np.testing.assert_allclose(losses_of(again), undisturbed, rtol=1e-5)


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
