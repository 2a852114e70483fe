"""What a release rests on: the copies of metadata.toml, the lock file, the versions, and the pages of the forge."""

import importlib
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from release import locks, metadata, pythons

ROOT = Path(__file__).parents[2]
MANIFESTS = [ROOT / "pyproject.toml", ROOT / "shared/pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]


def normal(name: str) -> str:
    """Return the name of a distribution as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_copies_agree(capsys):
    assert metadata.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", ["pyproject.toml", "README.md", "CITATION.cff"])
def test_an_address_reaches_every_copy(name):
    """While there is none, nothing speaks of one."""
    about = metadata.read()
    address = "https://localhost/repository"
    for now, expected in ((about._replace(repository=""), False), (about._replace(repository=address), True)):
        text = dict(metadata.copies(now))[ROOT / name]
        assert (address in text) is expected
        assert ("git+" in text) is (expected and name == "README.md")


def test_links_of_a_release():
    about, page = metadata.read()._replace(repository="https://localhost/x"), "[a](../../docs/kda.md#x) [b](#y)"
    assert metadata.with_addresses(page, "packages/kda", about._replace(repository="")) == page
    expected = f"[a](https://localhost/x/blob/v{about.version}/docs/kda.md#x) [b](#y)"
    assert metadata.with_addresses(page, "packages/kda", about) == expected


def test_requirements_agree():
    """Every distribution asks for the same releases of JAX and numpy."""
    for name in ("jax", "numpy"):
        asked = [line for path in MANIFESTS for line in re.findall(rf'"{name}>=[^"]*"', path.read_text())]
        assert len(set(asked)) == 1, asked


def test_a_release_of_jax_reaches_every_copy():
    """It is one line of metadata.toml, and no other file but generated ones names the releases."""
    about = metadata.read()
    assert about.pythons == [f"3.{minor}" for minor in range(11, 15)]
    assert about.pairs[:2] == [("3.11", "0.10"), ("3.12", "0.10")]
    changed = dict(metadata.copies(about._replace(jax=about.jax | {"0.13": "3.14"})))
    for path in MANIFESTS:
        assert '"jax>=0.10,<0.14"' in changed[path]
        assert '<0.13"' not in changed[path]
    for name in ("README.md", "docs/which-library.md"):
        assert "JAX 0.10 to 0.13" in changed[ROOT / name]
    assert "| 0.1 | 0.10, 0.11, 0.12, 0.13 | 3.11, 3.12, 3.13, 3.14 |" in changed[ROOT / "docs/stability.md"]
    for name in ("test", "release"):
        workflow = changed[ROOT / f".github/workflows/{name}.yml"]
        assert re.findall(r'python: "(.*)", jax: "0.13"', workflow) == ["3.14"]


def names_of(group: str) -> set[str]:
    """Return the names of what a group requires itself, or through a group that it includes."""
    found = set()
    for line in GROUPS[group]:
        found |= names_of(line["include-group"]) if isinstance(line, dict) else {normal(re.match(r"[\w.-]+", line)[0])}
    return found


def test_the_lock_has_versions_and_hashes():
    entries = locks.read()
    assert len(entries) > 100
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*( ; [^@/]+)?", entry.requirement)
        assert entry.hashes, entry
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", x) for x in entry.hashes), entry
    assert locks.LOCK.read_text() == locks.HEAD + "".join(map(str, entries))


@pytest.mark.parametrize("group", GROUPS)
def test_the_lock_has_all_that_sessions_install(group):
    """With all that this needs: of a group that needs the packages of another one the lock has these too."""
    wanted, text = names_of(group), locks.of_groups([group])
    locked = {entry.name for entry in locks.read(text)}
    assert {name for name in wanted if locks.is_hashed(name)} <= locked
    assert "jaxlib" in locked or "jax" not in locked
    assert not locked.intersection(locks.UNHASHED)


def test_what_the_lock_has_no_hashes_of_has_one_version():
    lines = [line for group in GROUPS.values() for line in group if isinstance(line, str)]
    wanted = [line for line in lines if not locks.is_hashed(line)]
    assert [re.match(r"[\w.-]+==[\d.]+", line)[0].partition("==")[0] for line in wanted] == [*locks.UNHASHED]


def test_groups_of_the_lock():
    found = "a==1 ; python_version < '3' \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
    found += "b==2 \\\n    --hash=sha256:cc\n"
    text = locks.with_groups(found, {"x": "a==1\nb==2\n", "y": "b==2\n"})
    entries = [
        locks.Entry("a==1 ; python_version < '3'", ("sha256:aa", "sha256:bb"), ("x",)),
        locks.Entry("b==2", ("sha256:cc",), ("x", "y")),
    ]
    assert locks.read(text) == entries


def test_tools_have_one_version():
    """pre-commit, the group `lint` and the lock agree."""
    pinned = set(re.findall(r"[\w-]+==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert pinned <= {entry.requirement for entry in locks.read()}
    assert pinned <= set(GROUPS["lint"])


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda path: path.stem)
def test_workflows_name_sessions_and_releases(path):
    text = path.read_text()
    # The commit is what runs, and the comment is what people and Dependabot read.
    assert all(re.fullmatch(r"[0-9a-f]{40}  # v\d+\.\d+\.\d+", x) for x in re.findall(r"uses: \S+@(.*)", text))
    sessions = set(re.findall(r"^def (\w+)\(session\b", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    for line in re.findall(r"nox -s (.*)", text):
        named = re.findall(r"(?<!\S)\"?([a-z]+)", line.replace("${{ matrix.session }}", ""))
        assert set(named) <= sessions, line


def test_every_folder_of_tests_has_a_session():
    """noxfile.py names the folders that pytest leaves out of tests_e2e."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    left_out = [folder for folder in options["norecursedirs"] if "/" in folder]
    assert left_out
    for folder in left_out:
        assert (ROOT / folder).is_dir()
        assert f'"{folder}' in (ROOT / "noxfile.py").read_text(), folder


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests_e2e/*/test_*.py")), ids=lambda path: path.stem)
def test_what_needs_torch_is_marked(path):
    """The session `oldest` selects it by its mark; elsewhere it is skipped."""
    text = path.read_text()
    if re.search(r"^from tests_e2e\.layers\.|importorskip\(.torch|find_spec\(.torch", text, re.MULTILINE):
        assert "pytest.mark.torch" in text


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(os.name == "nt", reason="it writes programs of sh")
def test_pythons_that_run_are_found(tmp_path, monkeypatch):
    """A command of PATH that fails, another version by that name and a free-threaded one are none."""
    monkeypatch.setattr(sys, "executable", script(tmp_path / "nox/python", "echo 3.11 final cpython True True"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:{tmp_path / 'usr'}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    for version in ("3.12", "3.13"):
        script(tmp_path / f"shims/python{version}", "echo command not found; exit 127")
    script(tmp_path / "usr/python3.12", "echo 3.12 final cpython True False")
    script(tmp_path / "usr/python3.14", "echo 3.14 candidate cpython True True")
    there = {
        "3.12": script(tmp_path / "pyenv/versions/3.12.1/bin/python3.12", "echo 3.12 final cpython True True"),
        "3.13": script(tmp_path / "uv/cpython-3.13.0/bin/python3.13", "echo 3.13 final cpython True True"),
    }
    assert pythons.find(["3.11", "3.12", "3.13", "3.14"]) == {"3.11": sys.executable} | there


def test_this_python_is_found():
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert pythons.find([version]) == {version: sys.executable}


@pytest.mark.parametrize("path", MANIFESTS[1:], ids=lambda path: path.parent.name)
def test_versions(path):
    module = importlib.import_module(f"chunkwise.{path.parent.name}")
    assert module.__version__ == metadata.read().version
