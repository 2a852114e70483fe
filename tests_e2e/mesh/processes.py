"""Programs of two processes with devices of their own, which compute together."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax


class Ended(NamedTuple):
    """A process that has ended: its exit code, and what it printed."""

    code: int
    out: str
    errors: str


def join(rank: int, port: int, devices: int, **options) -> None:
    """Make this process one of two, with so many devices of a CPU."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=60, **options)


def run_two(program: str, *arguments: str, seconds: float, **environment: str) -> list[Ended]:
    """Run a file twice, with a rank, a port and arguments, and return both processes when they have ended."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = os.environ | {"NPROC": "16", "JAX_PLATFORMS": "cpu"} | environment
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    children = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(port), *arguments], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [child.communicate(timeout=seconds) for child in children]
    finally:
        # Whatever failed, nobody waits for the other for ever.
        for child in children:
            child.kill()
    return [Ended(child.returncode, *output) for child, output in zip(children, outputs, strict=True)]
