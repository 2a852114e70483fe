"""Two processes with two devices each train a layer for three steps and agree with one process."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from chunkwise.pipeline import chunk_gated_delta_rule
from tests_e2e.mesh import processes

P = PartitionSpec
B, T, D, H, HV, K, V = 2, 32, 16, 2, 4, 8, 8
STEPS, SECONDS = 3, 240


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = dict(q=H * K, k=H * K, v=HV * V, g=HV, beta=HV)
    weights = {name: rng.standard_normal((D, size)) / D**0.5 for name, size in sizes.items()}
    return {name: w.astype(np.float32) for name, w in (weights | {"o": rng.standard_normal((HV * V, D)) / 8}).items()}


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return tuple(rng.standard_normal((B, T, D)).astype(np.float32) for _ in range(2))


def layer(w: dict, x: jax.Array, sharding) -> jax.Array:
    """Return projections, the operator and the projection back; T and the heads are divided by the operator."""
    heads = lambda y, n: y.reshape(B, T, n, -1)
    o, _ = chunk_gated_delta_rule(
        heads(x @ w["q"], H), heads(x @ w["k"], H), heads(x @ w["v"], HV), -jax.nn.softplus(x @ w["g"]),
        jax.nn.sigmoid(x @ w["beta"]), use_qk_l2norm_in_kernel=True, implementation="xla", sharding=sharding,
    )  # fmt: skip
    return o.reshape(B, T, -1) @ w["o"]


def train(mesh=None) -> list[float]:
    """Return the losses of a few steps of gradient descent, over a mesh ("tokens", "heads") or on one device."""
    sharding = None if mesh is None else NamedSharding(mesh, P(None, "tokens", "heads"))

    def put(x, spec):
        if mesh is None:
            return jnp.asarray(x)
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])

    @jax.jit
    def step(w, x, y):
        loss, dw = jax.value_and_grad(lambda w: jnp.mean((layer(w, x, sharding) - y) ** 2))(w)
        return loss, jax.tree.map(lambda p, d: p - 0.5 * d, w, dw)

    w = {name: put(x, P()) for name, x in parameters().items()}
    x, y = (put(z, P(None, "tokens")) for z in data())
    losses = []
    for _ in range(STEPS):
        loss, w = step(w, x, y)
        losses.append(float(loss))
    return losses


def worker(rank: int, port: int) -> None:
    processes.join(rank, port, devices=2)
    assert (jax.process_count(), jax.device_count()) == (2, 4)
    # Tokens cross processes, heads do not.
    kinds = (jax.sharding.AxisType.Auto,) * 2
    print(json.dumps(train(jax.make_mesh((2, 2), ("tokens", "heads"), axis_types=kinds))), flush=True)
    jax.distributed.shutdown()


def test_two_processes_agree_with_one():
    ended = processes.run_two(__file__, seconds=SECONDS)
    want = train()
    assert want[0] > want[1] > want[2]
    for child in ended:
        assert child.code == 0, child.errors[-2000:]
        np.testing.assert_allclose(json.loads(child.out.splitlines()[-1]), want, rtol=1e-5)


if __name__ == "__main__":
    worker(*map(int, sys.argv[1:]))
