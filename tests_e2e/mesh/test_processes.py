"""Two processes with two devices each train a layer for three steps and agree with one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from chunkwise.pipeline import chunk_gated_delta_rule

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


def worker(rank: int, processes: int, port: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank, initialization_timeout=60)
    assert (jax.process_count(), jax.device_count()) == (processes, 2 * processes)
    # Tokens cross processes, heads do not.
    kinds = (jax.sharding.AxisType.Auto,) * 2
    print(json.dumps(train(jax.make_mesh((processes, 2), ("tokens", "heads"), axis_types=kinds))), flush=True)
    jax.distributed.shutdown()


def test_two_processes_agree_with_one():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, str(Path(__file__))]
    environment = os.environ | {"NPROC": "16", "JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen(
            [*command, str(rank), "2", str(port)], env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [child.communicate(timeout=SECONDS) for child in children]
    finally:
        # Whatever failed, nobody waits for the other for ever.
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, outputs, strict=True):
        assert child.returncode == 0, errors[-2000:]
    losses = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    want = train()
    assert want[0] > want[1] > want[2]
    for got in losses:
        np.testing.assert_allclose(got, want, rtol=1e-5)


if __name__ == "__main__":
    worker(*map(int, sys.argv[1:]))
