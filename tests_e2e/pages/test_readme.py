"""Everything that the READMEs and the pages tell a reader to type is run, or at least exists, and so do all links.

The Python blocks of a page run in one go, and print what the block after them promises. Commands that take seconds
run. Commands that install something or take minutes cannot run inside a test session, so for them the session, folder
or option that they name must exist.
"""

import contextlib
import functools
import importlib.util
import io
import itertools
import re
import shlex
import sys
import types
import warnings
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from chunkwise.command import cli
from chunkwise.shared.testing import tpu

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGE_PAGES = [ROOT / "shared/README.md", *sorted(ROOT.glob("packages/*/README.md"))]
# Those that take long, or whose code is mostly that of other pages.
REPEATS = """
    distribution fine-tuning flax hardware integrations maintain/adding-a-kernel numerics serving serving-layers
    serving-pools stages training tutorial two-keys
""".split()  # noqa: SIM905
# The session `build` runs the page of the pipeline.
LONG = [ROOT / f"packages/{name}/README.md" for name in ("layers", "pipeline")]
LONG += [ROOT / f"docs/{name}.md" for name in REPEATS]
THOROUGH = dict(test_python=lambda page: page in LONG)
NEEDS_TORCH = re.compile(r"^(?:import|from) torch\b|transformers|\btorch\.(?:\w+\(|autograd)", re.MULTILINE)
ALL_AFTER_TORCH = ("fine-tuning",)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


# What a page calls of a library that is not here, with the arguments of fla-core 0.5. A call that it would refuse fails
# here too.
ELSEWHERE = {
    "fla.ops.gated_delta_rule": """chunk_gated_delta_rule(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        cu_seqlens=None
    )"""
}
# Words of other libraries between backticks, and a name of which a page says that it does not exist.
OTHERS = """
    context_parallel_load_balance deserialize flywheel jax_compilation_cache_dir multihost_utils process_allgather
    jax_persistent_cache_min_compile_time_secs ragged_mlstm serialize
""".split()  # noqa: SIM905
# The tests of signatures and of settings hold what these pages say of other libraries.
OF_OTHERS = "models", "moving-here"


def stand_in(monkeypatch, module: str):
    """Put a module that takes the calls of a library into place where the library is missing."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    exec(f"def {ELSEWHERE[module]}: return None, None", vars(sys.modules[module]))


def marks_of(page: Path) -> list:
    """Return the marks of a page by what its blocks need."""
    text = page.read_text()
    needs_torch = any(NEEDS_TORCH.search(code) for kind, code in BLOCK.findall(text) if kind == "python")
    return [pytest.mark.tpu] * ("compile_for(" in text) + [pytest.mark.torch] * needs_torch


def without_libraries(monkeypatch, code: str) -> bool:
    """Return whether a block can run: libraries of ELSEWHERE get a stand-in, and a block that uses torch needs it."""
    for module in re.findall(r"^from (fla\.[\w.]+)", code, re.MULTILINE):
        stand_in(monkeypatch, module)
    return not NEEDS_TORCH.search(code) or all(map(importlib.util.find_spec, ("torch", "transformers")))


MARKED = [pytest.param(x, id=str(x.relative_to(ROOT)), marks=marks_of(x)) for x in [*PAGES, *PACKAGE_PAGES]]


@pytest.mark.parametrize("page", MARKED)
def test_python(page, monkeypatch):
    text = page.read_text()
    if "tpu.compile_for" in text and not tpu.has_libtpu():
        pytest.skip("the page compiles for a TPU, which needs libtpu")
    names = {}
    blocks = [match.groups() for match in BLOCK.finditer(text)]
    if page.stem in ALL_AFTER_TORCH and not without_libraries(monkeypatch, text):
        pytest.skip("the first block needs torch, and all blocks after it use what it makes")
    for (kind, code), (next_kind, promised) in itertools.pairwise([*blocks, ("python", "")]):
        if kind != "python" or not without_libraries(monkeypatch, code):
            continue
        given, printed = dict(names), io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            if NEEDS_TORCH.search(code):
                warnings.simplefilter("ignore")
            exec(compile(code, str(page), "exec"), given)
        names |= given
        if printed.getvalue() or "print(" in code:
            assert next_kind == "", f"{page}: the output of a block must follow it"
            assert printed.getvalue() == promised


def test_the_block_of_the_call_runs_alone():
    """Who moves here copies it, and the page has it first."""
    (_, ours), *_ = BLOCK.findall((ROOT / "docs/moving-here.md").read_text())
    exec(compile(ours, "block", "exec"), {})


def commands() -> list:
    """Return (page, command) of every line of every ```sh block."""
    found = []
    for page in PAGES:
        for kind, block in BLOCK.findall(page.read_text()):
            for line in block.splitlines() if kind == "sh" else ():
                parts = re.split(r"(?:^|\s)#", line)[0].split("&&")
                found += [(page.name, part.strip()) for part in parts if part.strip()]
    return found


def test_first_screen():
    """The README begins with models and devices, with what sets everything up and tests it, and with a call."""
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:46])
    install, tests = "python -m pip install . && chunkwise demo", "python -m pip install nox uv && python -m nox"
    kinds = [kind for kind, _ in BLOCK.findall(screen)]
    assert kinds == ["sh", "python", ""]
    assert BLOCK.findall(screen)[0][1] == f"{install}\n{tests}\n"
    for page in ("which-library", "moving-here", "flax", "tutorial"):
        assert f"](docs/{page}.md)" in screen
    assert "<!-- figures: first-screen -->" in screen
    assert all(name in screen for name in ("your model?", "Qwen3-Next", "your device?", "TPU v5e", "CPU", "GPU"))
    assert tests.replace("python ", "python3 ") in (ROOT / ".ci/run").read_text()


def test_counts_of_tests_of_other_projects():
    """The README repeats them from the page that says how they were run."""
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/evidence.md"))
    engine, other = re.search(r"all (\d+) of tpu-inference, all (\d+) of SGLang-JAX", readme).groups()
    more = int(re.search(r"\[(\d+) of five more\]", readme)[1])
    rows = re.findall(r"^\| (\S+) \S+ \| (\d+) of (\d+) \|", page, re.MULTILINE)
    counts = {project: int(passed) for project, passed, tests in rows if passed == tests}
    assert len(counts) == len(rows) == 7
    assert (counts["tpu-inference"], counts["SGLang-JAX"]) == (int(engine), int(other))
    assert sum(counts.values()) == int(engine) + int(other) + more


def check_nox(arguments: list[str]) -> None:
    """A session installs an environment of its own, which takes minutes: it must exist."""
    noxfile = (ROOT / "noxfile.py").read_text()
    packages = {path.parent.name for path in ROOT.glob("*/*/pyproject.toml")} | {"shared"}
    sessions = set(re.findall(r"^def (\w+)\(session\b", noxfile, re.MULTILINE))
    sessions |= {f"{kind}-{name}" for kind in ("test", "solo") for name in packages}
    assert arguments[:1] in ([], ["-s"], ["-l"])
    assert set(arguments[1:]) <= sessions | {"--", "--changed"}


def check_pip(arguments: list[str]) -> None:
    """Tests install nothing: a folder must be a distribution, another name one that the project declares."""
    assert arguments[0] == "install"
    files = (ROOT / name for name in ("pyproject.toml", "noxfile.py", "release/hosts.py"))
    declared = "".join(path.read_text() for path in (*files, *ROOT.glob("packages/*/pyproject.toml")))
    for name in arguments[1:]:
        if name.startswith("git+"):
            name = name.partition("#subdirectory=")[2] or "."
        if name.startswith((".", "packages/")):
            assert (ROOT / name.split("[")[0] / "pyproject.toml").exists(), name
        elif not name.startswith("-"):
            assert re.match(r"\w+", name)[0] in declared, name


def check_chunkwise(arguments: list[str]) -> None:
    """Every kernel takes a minute and is what `chunkwise check` is tested for in its package: one kernel here.

    The demo and the report take a minute too, and have tests in their package.
    """
    if arguments[0] in ("demo", "report"):
        assert cli.make_parser().parse_args(arguments)
        return
    only = ["--kernel", "chunk_local_cumsum"] if arguments[0] == "check" and "--kernel" not in arguments else []
    assert cli.main([*arguments, *only]) == 0


def check_pytest(arguments: list[str]) -> None:
    """The tests of a package have sessions of their own: its folder must exist."""
    assert (ROOT / arguments[0] / "tests").is_dir(), arguments[0]


def check_benchmarks(arguments: list[str], tmp_path) -> None:
    """Minutes each: the options must be known. A plot takes a second and is drawn."""
    options = benchmarks.parse(arguments)
    if options.command == "plot":
        picture = tmp_path / options.output.name
        assert benchmarks.main(["plot", str(ROOT / options.result), str(picture)]) == 0
        assert picture.stat().st_size > 1000


@pytest.mark.parametrize(("page", "command"), commands(), ids=[command for _, command in commands()])
def test_command(page, command, tmp_path, capsys):
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    program, arguments = words[0], words[1:]
    if program == "nox":
        check_nox(arguments)
    elif program == "pip":
        check_pip(arguments)
    elif program == "chunkwise":
        check_chunkwise(arguments)
    elif program == "pytest":
        check_pytest(arguments)
    elif program == "benchmarks":
        check_benchmarks(arguments, tmp_path)
    elif program == "python":
        # Minutes each: the program must exist. That of the training has tests of its own.
        assert (ROOT / arguments[0]).exists()
    elif program == "http.server":
        # For ever.
        assert importlib.util.find_spec(program)
    else:
        pytest.fail(f"{page}: nothing here knows how to check {command!r}")


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings, as links write them."""
    headings = re.findall(r"^#+ (.*)", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *PACKAGE_PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    """Links to pages, their headings and pictures lead somewhere."""
    for target in re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", page.read_text())):
        if not target.startswith("http"):
            path, _, heading = target.partition("#")
            other = page.parent / path if path else page
            assert other.exists(), target
            assert not heading or heading in anchors(other), target


@functools.cache
def words() -> set[str]:
    """Return the words of all code, without comments, of all examples on pages, and the names of files."""
    folders = ("shared", "packages", "tests", "tests_e2e", "benchmarks", "examples", "release", "docs/site")
    sources = [*ROOT.glob("*.py"), *ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob(".github/**/*.yml")]
    sources += [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    texts = [re.sub(r"#.*", "", path.read_text()) for path in sources]
    texts += [code for page in PAGES for _, code in BLOCK.findall(page.read_text())]
    return {word for text in texts for word in re.findall(r"\w+", text)} | {path.stem for path in sources}


NAMING = [page for page in [*PAGES, *PACKAGE_PAGES] if page.stem not in OF_OTHERS]


@pytest.mark.parametrize("page", NAMING, ids=lambda page: str(page.relative_to(ROOT)))
def test_names(page):
    """A name of code between backticks exists."""
    codes = re.findall(r"`([^`\n]+)`", BLOCK.sub("", page.read_text()))
    named = {name for code in codes for name in re.findall(r"[A-Za-z_]\w*", code)}
    assert named - words() - {*OTHERS} == set()


MAINTAIN = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs/maintain").glob("*.md")]


@pytest.mark.parametrize("page", MAINTAIN, ids=lambda page: page.name)
def test_paths(page):
    """The files and folders that pages for maintainers name by their path from the root exist."""
    named = r"`((?:packages|shared|tests(?:_e2e)?|benchmarks|docs|release)/[\w./-]+)`"
    for path in re.findall(named, page.read_text()):
        assert (ROOT / path).exists() or (ROOT / "shared/src/chunkwise" / path).exists(), path


@pytest.mark.parametrize("page", PACKAGE_PAGES, ids=lambda page: page.parent.name)
def test_commands_of_a_package(page):
    """The sessions and folders that a README of a package names exist."""
    for line in re.findall(r"`((?:nox|pip) [^`]+)`", page.read_text()):
        program, *arguments = line.split()
        {"nox": check_nox, "pip": check_pip}[program](arguments)
