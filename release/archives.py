"""The wheels and sdists of a release: the files from which they are built, and checks of the results."""

import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from release import metadata
from release.packages import FOLDERS, ROOT, SIBLING


def copy_sources(folder: Path, release: Path, about: metadata.Metadata) -> None:
    """Copy the files of a distribution to a new folder, with versions of siblings in the place of their folders."""
    if folder == ROOT:
        release.mkdir()
        shutil.copy(ROOT / "pyproject.toml", release)
    else:
        shutil.copytree(folder, release, ignore=shutil.ignore_patterns("__pycache__", ".*", "dist"))
    shutil.copy(ROOT / "LICENSE", release)
    manifest = release / "pyproject.toml"
    manifest.write_text(SIBLING.sub(lambda match: f"{match[1]}{match[2] or ''}=={about.version}", manifest.read_text()))
    readme = (folder / "README.md").read_text()
    (release / "README.md").write_text(metadata.with_addresses(readme, str(folder.relative_to(ROOT)), about))


def problems(archives: list[Path]) -> Iterator[str]:
    """Yield a sentence for every missing or unexpected archive, and for every sibling without a version."""
    if len(archives) != 2 * len(FOLDERS) + 2:
        yield f"dist/ must hold a wheel and an sdist of each package; got {[x.name for x in archives]}."
    for path in archives:
        for member, text in metadata_texts(path):
            for line in text.splitlines():
                if "file://" in line or "{root" in line or re.search(r"chunkwise-[a-z0-9-]+(\[.*\])? *@", line):
                    yield f"{path.name}: {member} must name its siblings by version; got {line!r}."


def metadata_texts(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the files of a wheel or sdist that state its dependencies."""
    wanted = ("/METADATA", "/PKG-INFO", "/pyproject.toml")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name).decode()) for name in wheel.namelist() if name.endswith(wanted))
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist:
                if member.name.endswith(wanted) and (file := sdist.extractfile(member)):
                    yield member.name, file.read().decode()
