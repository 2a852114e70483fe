"""The sessions, found from the tree: `nox -l` lists them, and `nox` alone runs those that every change must pass.

They run under the newest supported Python of this machine, and `oldest` runs a sample under the oldest one.

Sessions install the versions of release/lock.txt, which `nox -s lock` renews. With NEWEST=1 in the environment they
install the newest versions that the groups of pyproject.toml allow.
"""

import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from release import archives, hosts, locks, packages, pythons  # noqa: E402
from release import metadata as common  # noqa: E402

PACKAGES = packages.FOLDERS
GROUPS = nox.project.load_toml("pyproject.toml")
ABOUT = common.read()

NEWEST = bool(os.environ.get("NEWEST"))

# The tests that run under every pair: of a stage all, and what an operator computes, also under the oldest Python.
KDA = [PACKAGES["kda"] / f"tests/test_{name}.py" for name in ("reference", "gates", "tpu_compile")]

# The Pythons of this machine by version, oldest first. Without a supported one, sessions run under that of nox.
PYTHONS = pythons.find(ABOUT.pythons)
OLDEST, *_, LATEST = [*PYTHONS.values()] * 2 or [None, None]

# The files of the forge by their schema.
FORGE = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "dependabot": ".github/dependabot.yml",
    "citation-file-format": "CITATION.cff",
}

# One worker for each core. A file stays with one worker, so that what its tests share is compiled once.
WORKERS = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder", "--durations", "10")

# The packages that every change installs alone: a kernel, and the one that needs all others.
SOLO = ("kkt", "pipeline")
# The tests of operators as a user calls them, and of pages; those of eight devices have a process of their own.
END_TO_END = [f"tests_e2e/{name}" for name in ("examples", "layers", "operators", "pages", "repository")]
# The tests that every change must pass; the session `thorough` runs the others.
QUICK = ("-m", "not thorough")
# The tag of the sessions that every change must pass, which `nox` alone runs.
CHANGE = ["change"]

# Collectives of simulated devices wait for threads of all of them: more than a small machine has cores.
MANY_THREADS = {"NPROC": "16"}

# Workers and sessions share the programs that they compile for the CPU, and the next run finds them.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".nox/programs")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# pip compiles every module of jax, torch and transformers to bytecode, which takes longer than a session's own work.
# Python keeps the bytecode of what the first process imports: without it jax takes 3 s more in each of the others.
os.environ["PIP_COMPILE"] = "0"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.options.tags = CHANGE
nox.options.error_on_external_run = True
# Where uv is installed beside nox, it fills an environment in a second, and pip in a quarter of a minute.
nox.options.default_venv_backend = "uv|virtualenv"
# torch has a build for a machine without a GPU where pip is told to look, and nowhere else.
WITH_TORCH = {"python": OLDEST, "venv_backend": "virtualenv"}


def install(session: nox.Session, *groups: str) -> None:
    """Install dependency groups: what the lock file has by its hashes, and the rest by its version."""
    wanted = nox.project.dependency_groups(GROUPS, *groups)
    if NEWEST:
        session.install(*wanted)
        return
    locked = Path(session.create_tmp(), "locked.txt")
    locked.write_text(locks.of_groups(groups))
    session.install("--no-deps", "--require-hashes", "-r", locked)
    if rest := [x for x in wanted if not locks.is_hashed(x)]:
        session.install(*versions(session), *rest)


def versions(session: nox.Session, but: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return options of pip that take the versions of the lock file, without packages that begin with one of `but`."""
    if NEWEST:
        return ()
    constraints = Path(session.create_tmp(), "versions.txt")
    constraints.write_text(locks.versions(but))
    return ("--constraint", str(constraints))


def prepare(session: nox.Session, group: str, names=tuple(PACKAGES)) -> None:
    """Install a dependency group, and install packages in place."""
    install(session, group)
    # Without dependencies, because pip refuses a sibling that it gets both by folder and by reference.
    session.install("--no-deps", "--no-build-isolation", *(x for name in names for x in ("-e", PACKAGES[name])))


def run_example(session: nox.Session, name: str) -> None:
    """Run the Python blocks of a package's README in one go, with what is installed."""
    readme = (PACKAGES[name] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    if not blocks:
        session.error(f"The README of {name} must hold an example, a ```python block; got none.")
    script = Path(session.create_tmp(), "example.py")
    script.write_text("\n".join(blocks))
    session.run("python", "-W", "error", script, env={"JAX_PLATFORMS": "cpu"})


@nox.session(tags=CHANGE)
def lint(session):
    """Check style and format, that all copies of release/metadata.toml agree, and the files of the forge."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "release/metadata.py", "--check")
    for schema, files in FORGE.items():
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *sorted(ROOT.glob(files)))
    session.run("zizmor", "--offline", "--quiet", ".github")


@nox.session
def metadata(session):
    """Copy release/metadata.toml to all places that need it."""
    session.run("python", "release/metadata.py")


@nox.session
def lock(session):
    """Renew release/lock.txt: the newest versions of all that the sessions install, for every Python and platform."""
    session.install("uv")
    groups = {name: nox.project.dependency_groups(GROUPS, name) for name in GROUPS["dependency-groups"]}
    locks.renew(session, groups, ABOUT.requires_python.removeprefix(">="))


@nox.session(python=LATEST, tags=CHANGE)
def types(session):
    """Check the static types of everything that is shipped."""
    prepare(session, "types")
    session.run("pyrefly", "check")


@nox.session(python=LATEST, tags=CHANGE)
def tests(session):
    """Run all tests that every change must pass; with `-- --changed` those of packages that a change reaches."""
    needs, arguments = packages.needs_of_tests(), [*session.posargs]
    if "--changed" in arguments:
        arguments.remove("--changed")
        chosen = packages.reached(packages.changed_files(), needs)
        if not chosen:
            session.skip("The tests of packages read none of the files that differ from main.")
        prepare(session, "test")
        session.run("pytest", *WORKERS, *QUICK, *chosen, *arguments)
        return
    prepare(session, "e2e")
    times = run_tests(session, "--times", *QUICK, *(x for x in arguments if x != "--keep"))
    if {*arguments} <= {"--keep"}:
        session.run("python", "-m", "tests.measuring", "keep" if arguments else "check", *times)


def run_tests(session: nox.Session, measured: str, *arguments: str) -> list[Path]:
    """Run the tests of packages, of operators end to end and of eight devices; return what an option measured."""
    paths = [Path(session.create_tmp(), name) for name in ("tests.json", "mesh.json")]
    session.run("pytest", *WORKERS, measured, paths[0], *arguments, *packages.needs_of_tests(), *END_TO_END)
    session.run("pytest", *WORKERS, measured, paths[1], *arguments, "tests_e2e/mesh", env=MANY_THREADS)
    return paths


@nox.session(python=LATEST)
def cover(session):
    """Measure what tests cost and reach, choose those that every change must pass, and keep what these cost."""
    prepare(session, "e2e")
    measured = run_tests(session, "--lines", "-m", "not thorough or repeats")
    session.run("python", "-m", "tests.measuring", "choose", *measured)
    session.notify("tests", ["--keep"])


@nox.session(**WITH_TORCH, tags=CHANGE * (OLDEST != LATEST))
def oldest(session):
    """Do as the first line of the README under the oldest Python, and run a sample and what needs torch there."""
    install(session, "e2e")
    session.install(*versions(session), "--no-build-isolation", ".[integrations]")
    session.run("chunkwise", "demo", "--output", Path(session.create_tmp(), "demo"))
    session.run("pytest", *WORKERS, *QUICK, *KDA, *session.posargs)
    session.run("pytest", *WORKERS, "-m", "torch and not thorough", "tests_e2e", *session.posargs)


@nox.session(**WITH_TORCH)
def torch(session):
    """Run the thorough tests that need torch, under the oldest Python, for which it has builds."""
    prepare(session, "e2e")
    session.run("pytest", *WORKERS, "-m", "torch and thorough", "tests_e2e", *session.posargs)


@nox.session(python=LATEST)
def simulated(session):
    """Run all kernels on a simulated TPU, which finds races and memory that nobody wrote."""
    prepare(session, "test")
    session.run("pytest", *WORKERS, "tests_e2e/simulated", *session.posargs)


@nox.session(python=LATEST)
def thorough(session):
    """Run the tests that take long: more sizes and types, and the compilations for all TPU generations."""
    prepare(session, "e2e")
    session.run("pytest", *WORKERS, "-m", "thorough", *PACKAGES.values(), "tests_e2e", *session.posargs)
    session.run("pytest", *WORKERS, "-m", "thorough", "tests_e2e/mesh", *session.posargs, env=MANY_THREADS)


@nox.session(python=LATEST)
def random(session):
    """Search for mistakes: compare operators with float64 on random batches, other ones every time."""
    prepare(session, "test")
    session.run("pytest", *WORKERS[:4], "tests_e2e/random", *session.posargs)


@nox.session(python=LATEST)
def tpu(session):
    """Run only the compilations for real TPUs."""
    prepare(session, "test")
    session.run("pytest", *WORKERS, "-m", "tpu", *PACKAGES.values(), "tests_e2e", *session.posargs)
    session.run("pytest", *WORKERS, "-m", "tpu", "tests_e2e/mesh", *session.posargs, env=MANY_THREADS)


@nox.session(python=PYTHONS.get("3.12", "3.12"))
def gpu(session):
    """Compile for an H100 without one, hold launches and temporaries to limits, and run the forms for GPUs on a CPU."""
    wanted = (x for x in nox.project.dependency_groups(GROUPS, "test") if not x.startswith("jax["))
    session.install(*versions(session), *wanted)
    version = session.run("python", "-c", "import jax; print(jax.__version__)", silent=True).strip()
    # They would bring CUDA's libraries; a compilation needs the assembler alone.
    plugins = (f"jax-cuda13-{name}=={version}" for name in ("plugin", "pjrt"))
    session.install("--no-deps", *plugins, "nvidia-cuda-nvcc")
    session.install("--no-deps", "--no-build-isolation", *(x for path in PACKAGES.values() for x in ("-e", path)))
    session.run("python", "-m", "benchmarks", "gpu", "--json", Path(session.create_tmp(), "gpu-h100.json"))
    session.run("pytest", *WORKERS, PACKAGES["pipeline"] / "tests/test_gpu_form.py")
    files = ("fused_gdn/{}_reference", "fused_gdn/{}_isolation", "two_keys/{}_isolation", "fused_gla/{}_reference")
    paths = (ROOT / "packages" / f"{file.format('tests/test')}.py" for file in files)
    session.run("pytest", *WORKERS, "--gpu-forms", "-k", "xla", *paths)


def add_package_sessions(name: str) -> None:
    """Define test-<package>, which tests one package, and solo-<package>, which installs it alone."""

    def test(session):
        prepare(session, "test", packages.needed(name))
        session.run("pytest", *WORKERS, *QUICK, PACKAGES[name], *session.posargs)

    def solo(session):
        if NEWEST:
            session.install(PACKAGES[name])
        else:
            # pip would build the packages with the newest hatchling.
            session.install(*versions(session), "hatchling")
            session.install(*versions(session), "--no-build-isolation", PACKAGES[name])
        listed = "from importlib import metadata; print(*(x.name for x in metadata.distributions()))"
        installed = {x for x in session.run("python", "-c", listed, silent=True).split() if x.startswith("chunkwise-")}
        expected = {packages.PROJECTS[x]["name"] for x in packages.needed(name)}
        if installed != expected:
            session.error(f"Installing {name} must bring {sorted(expected)}; got {sorted(installed)}.")
        run_example(session, name)
        if name != "shared" and "pipeline" not in packages.needed(name):
            session.run("python", ROOT / "tests/alone_suite.py", name, env={"JAX_PLATFORMS": "cpu"})

    test.__doc__ = f"Run the tests of {name} with nothing installed but what it needs."
    solo.__doc__ = f"Install {name} alone, as a user would, run the example of its README, and use every argument."
    nox.session(test, name=f"test-{name}", python=LATEST)
    nox.session(solo, name=f"solo-{name}", python=LATEST, tags=CHANGE * (name in SOLO))


for package in PACKAGES:
    add_package_sessions(package)


def add_host_session(name: str, requirements: tuple[str, ...], alone: tuple[str, ...]) -> None:
    """Define host-<name>, which runs a host with ours in it: whole, its own tests, or its functions beside ours."""

    def host(session):
        session.install(*requirements, "pytest", "hypothesis", "numpy", "hatchling", "editables")
        if alone:
            session.install("--no-deps", *alone)
        session.install("--no-deps", "--no-build-isolation", *(x for path in PACKAGES.values() for x in ("-e", path)))
        # Hosts call JAX in old ways.
        quietly = ("-s", "-W", "ignore::DeprecationWarning")
        files = sorted(Path("tests_e2e/hosts").glob(f"test_{name.replace('-', '_')}*.py"))
        session.run("pytest", *quietly, *map(str, files), *session.posargs)

    host.__doc__ = f"Run {name} with ours in place, whole where a CPU can; `-- --json PATH` keeps what is measured."
    needs_torch = any(x.startswith("torch") for x in requirements)
    options = WITH_TORCH if needs_torch else {"python": PYTHONS.get("3.12", "3.12")}
    nox.session(host, name=f"host-{name}", **options)


for host, requirements in hosts.HOSTS.items():
    add_host_session(host, *requirements)


# The pairs of extras of packages/integrations that fit into one environment; docs/integrations.md has the others.
TOGETHER = {
    *(("keras-hub", other) for other in ("levanter", "maxtext", "nnx", "sglang-jax", "tpu-inference")),
    ("levanter", "nnx"), ("levanter", "tpu-inference"), ("maxtext", "nnx"), ("nnx", "tpu-inference"),
}  # fmt: skip


@nox.session
def extras(session):
    """Look for a set of versions for every extra of packages/integrations, and for every pair of them."""
    session.install("uv")
    known = packages.PROJECTS["integrations"]["optional-dependencies"]
    wanted, found = (Path(session.create_tmp(), name) for name in ("wanted.txt", "found.txt"))
    # libtpu has builds for newer systems than uv takes for granted.
    system = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_35")

    def fits(*names) -> bool:
        lines = [*nox.project.dependency_groups(GROUPS, "runtime"), *(x for name in names for x in known[name])]
        wanted.write_text("\n".join(lines))
        found.unlink(missing_ok=True)
        command = ("uv", "pip", "compile", "--quiet", *system, wanted, "-o", found)
        session.run(*command, success_codes=(0, 1), silent=True)
        return found.exists()

    alone = [name for name in known if not fits(name)]
    pairs = {pair for pair in itertools.combinations(sorted(known), 2) if fits(*pair)}
    if alone or pairs != TOGETHER:
        session.error(f"Extras must fit alone, and {sorted(TOGETHER)}; got not {alone}, and {sorted(pairs)}.")


@nox.session(python=LATEST, tags=CHANGE)
def build(session):
    """Build every wheel and sdist into dist/, check them, and install from there."""
    install(session, "build", "runtime")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder in (PACKAGES | {"chunkwise": ROOT}).items():
            release = Path(scratch, name)
            archives.copy_sources(folder, release, ABOUT)
            with session.chdir(release):
                session.run("python", "-m", "hatchling", "build", "-d", str(dist))
    built = sorted(dist.iterdir())
    for problem in archives.problems(built):
        session.error(problem)
    session.run("twine", "check", "--strict", *built)
    # The root has no file of its own.
    bare = dist / f"chunkwise-{ABOUT.version}-py3-none-any.whl"
    session.run("check-wheel-contents", *(path for path in built if path.suffix == ".whl" and path != bare))
    # One from its sdist, the others from their wheels; our own names come from dist/ and nowhere else. The cache of pip
    # would return the wheel of an older sdist that had the same path.
    kernel = packages.PROJECTS["kkt"]["name"]
    offline = ("--no-cache-dir", "--no-index", "--find-links", str(dist), "--no-build-isolation")
    session.install(*offline, "--no-binary", kernel, kernel, "chunkwise")
    session.run("chunkwise", "--version")
    session.run("chunkwise", "demo", "--output", Path(session.create_tmp(), "demo"))
    run_example(session, "kkt")
    run_example(session, "pipeline")


@nox.session(python=LATEST)
def sbom(session):
    """Install the wheels of dist/ alone, and list what this installs in build/sbom.json, in the form of CycloneDX."""
    install(session, "sbom")
    scratch, result = Path(session.create_tmp()), ROOT / "build/sbom.json"
    there = scratch / "release"
    locked = scratch / "runtime.txt"
    locked.write_text(locks.of_groups(["runtime"]))
    session.run("python", "-m", "venv", "--clear", there)
    pip = (there / "bin/python", "-m", "pip", "install")
    session.run(*pip, "--no-deps", "--require-hashes", "-r", locked, external=True)
    session.run(*pip, "--no-index", "--find-links", ROOT / "dist", "chunkwise[integrations]", external=True)
    session.run(there / "bin/python", "-m", "pip", "uninstall", "--yes", "pip", external=True)
    result.parent.mkdir(exist_ok=True)
    about = ("--pyproject", ROOT / "pyproject.toml", "--mc-type", "library", "--output-reproducible")
    session.run("cyclonedx-py", "environment", *about, "-o", result, there)


@nox.session
@nox.parametrize(
    "python,jax",
    [(PYTHONS.get(python, python), jax) for python, jax in ABOUT.pairs],
    ids=["-".join(pair) for pair in ABOUT.pairs],
)
def matrix(session, jax):
    """Install the wheels of dist/ under every pair of Python and JAX, and run a sample of the tests on them."""
    dist = ROOT / "dist"
    if not dist.exists():
        session.error("dist/ must hold the wheels: `nox -s build` makes them.")
    # The lock has one JAX for each Python.
    wanted = nox.project.dependency_groups(GROUPS, "test", "runtime")
    session.install(*versions(session, ("jax", "libtpu")), *wanted, f"jax=={jax}.*")
    session.install("--no-index", "--find-links", str(dist), "chunkwise")
    session.run("chunkwise", "--version")
    run_example(session, "layers")
    session.run("pytest", *WORKERS, *QUICK, PACKAGES["kkt"], *KDA, *session.posargs)


# The packages are imported where there may be an accelerator, which the site has no use for.
MKDOCS = dict(NO_MKDOCS_2_WARNING="1", JAX_PLATFORMS="cpu")


@nox.session(python=LATEST, tags=CHANGE)
def docs(session):
    """Build the documentation site into build/site; a link that leads nowhere is an error."""
    prepare(session, "docs")
    session.run("mkdocs", "build", "--strict", env=MKDOCS)


@nox.session(python=LATEST)
def site(session):
    """Build the documentation site, and look at it in a browser."""
    prepare(session, "site")
    session.run("mkdocs", "build", "--strict", env=MKDOCS)
    session.run("pytest", "tests_e2e/site", *session.posargs)


@nox.session(python=LATEST)
def train(session):
    """Train a small language model on Python's standard library, and measure it on files new to it."""
    prepare(session, "train")
    output = ROOT / "train_output"
    shutil.rmtree(output, ignore_errors=True)
    session.run("python", "examples/train.py", "--output", str(output), *session.posargs, env={"JAX_PLATFORMS": "cpu"})
    bits = json.loads((output / "results.json").read_text())["bits_per_byte"]
    if bits["this model"] > 0.75 * bits["order 0"]:
        session.error(f"The model must need far fewer bits per byte than order 0, {bits['order 0']:.2f}; got {bits}.")
