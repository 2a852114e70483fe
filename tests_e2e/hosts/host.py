"""Parts of a host, out of the files that pip installed, without what the rest of the host needs; and whole hosts."""

import __future__

import ast
import collections
import functools
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from chunkwise.integrations import replacing
from chunkwise.shared.testing import tpu


def path_of(distribution: str, ending: str) -> Path:
    """Return the file of an installed distribution whose path ends like this."""
    (found,) = (file for file in metadata.files(distribution) or () if str(file).endswith(ending))
    return Path(found.locate())


def parts_of(
    path: Path, names: tuple[str, ...], known: dict, module: types.ModuleType | None = None
) -> types.SimpleNamespace:
    """Return functions and classes of a file, which know only the names that they are given and one another.

    With a module, they and the names are its own.
    """
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    module = module or types.ModuleType(path.stem)
    vars(module).update(known)
    known = vars(module)
    # Annotations name types that are not called here.
    exec(compile(tree, str(path), "exec", __future__.annotations.compiler_flag), known)
    return types.SimpleNamespace(**{name: known[name] for name in names})


def put(modules: dict[str, types.ModuleType]) -> None:
    """Make modules be what their full names import, with empty packages around them."""
    for full, module in modules.items():
        parts = full.split(".")
        sys.modules[full] = module
        for end in range(len(parts) - 1, 0, -1):
            package = sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(parts[end - 1]))
            setattr(package, parts[end], sys.modules[".".join(parts[: end + 1])])


def module_of(path: Path, name: str, replaced: dict | None = None) -> types.ModuleType:
    """Return a file as a module, for which the modules of `replaced` are what it says."""
    put(replaced or {})
    module = types.ModuleType(name)
    module.__file__ = str(path)
    # Dataclasses look their module up.
    sys.modules[name] = module
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


def load(distribution: str, name: str, replaced: dict | None = None) -> types.ModuleType:
    """Return a module of an installed distribution by its full name, and let others import it, as by `module_of`."""
    module = module_of(path_of(distribution, name.replace(".", "/") + ".py"), name, replaced)
    put({name: module})
    return module


def on_v6e(theirs: Callable, ours: Callable, *shapes, auto_layout: bool = False) -> dict[str, int]:
    """Return the bytes that both functions need besides arguments and results, compiled for a v6e.

    With `auto_layout` the compiler chooses the layouts of arguments and results: for pools, those of the kernels.
    """
    size = lambda run: tpu.compile_for(run, *shapes, auto_layout=auto_layout).memory_analysis().temp_size_in_bytes
    found = {"theirs": size(theirs), "ours": size(ours)}
    print({name: f"{bytes_ / 2**20:.0f} MiB" for name, bytes_ in found.items()})
    return found


def result_of(
    arguments: list[str], result: Path, folder: Path, environment: dict[str, str], *, devices: int, flags: str = "",
    timeout: float = 3600,
) -> dict:  # fmt: skip
    """Return what a Python process on simulated devices writes as JSON, or show what it prints if it writes nothing.

    Args:
      arguments: of Python.
      result: the file that the process writes.
      folder: where it runs, which is not the root: that is on its path.
      environment: variables of the process.
      devices: that are simulated.
      flags: more of XLA.
      timeout: in seconds.
    """
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    flags = f"--xla_force_host_platform_device_count={devices} {flags}"
    environment = dict(JAX_PLATFORMS="cpu", XLA_FLAGS=flags, PYTHONPATH=paths) | environment
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=os.environ | environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=timeout, check=False,
    )  # fmt: skip
    assert result.exists(), done.stdout[-5000:]
    return json.loads(result.read_text())


def run_whole(host: str, options: dict, **environment: str) -> dict:
    """Return what the program of a whole host writes, which runs in a process of its own.

    Args:
      host: such as "maxtext_trainer", a program of this folder, which takes options as JSON and the path of its result.
      options: what the program calls `Options`; `devices` of them are simulated.
      environment: variables of the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        arguments = ["-m", f"tests_e2e.hosts.{host}", json.dumps(options), str(result)]
        # Trainers leave logs where they run.
        variables = {"HF_HUB_OFFLINE": "1"} | environment
        return result_of(arguments, result, Path(folder), variables, devices=options.get("devices", 1))


def losses_of(run: dict) -> list[float]:
    """Return the loss of every step of a trainer."""
    return [step["loss"] for step in run["steps"]]


def gap(theirs: dict, ours: dict) -> float:
    """Return the largest difference of the losses of a step of two trainers."""
    return max(abs(x - y) for x, y in zip(losses_of(theirs), losses_of(ours), strict=True))


def trained(theirs: dict, ours: dict) -> dict:
    """Return what docs/data keeps of two runs of a trainer: losses, and the least time of a step after the first."""
    runs = dict(theirs=theirs, ours=ours)
    return dict(
        steps=len(ours["steps"]), losses={who: losses_of(run) for who, run in runs.items()},
        difference=gap(theirs, ours),
        seconds={who: min(step["seconds"] for step in run["steps"][2:]) for who, run in runs.items()},
    )  # fmt: skip


def count_calls(
    where: types.ModuleType | type, name: str, calls: collections.Counter, key: Callable[[dict], str] | None = None
) -> None:
    """Count the calls of a function that a module or a class knows by a name, to see that a host comes to it.

    Args:
      where: of chunkwise, or of a host in which chunkwise is.
      name: of the function.
      calls: where they are counted.
      key: makes the text for them of the options of a call; the name unless it is there.
    """
    function = getattr(where, name)

    @functools.wraps(function)
    def counted(*arguments, **options):
        calls[key(options) if key else name] += 1
        return function(*arguments, **options)

    setattr(where, name, counted)


def count_places(put_back: replacing.PutBack, calls: collections.Counter) -> None:
    """Count the calls of all that an installation has replaced, by its whole names in the host."""
    for place in put_back.places:
        count_calls(place.where, place.name, calls, lambda options, place=place: place.label)
