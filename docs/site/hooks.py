"""What the documentation site adds to MkDocs: pages that lie outside of docs/, links to them, and mathematics.

- The README is the first page. CONTRIBUTING.md, CHANGELOG.md, SECURITY.md, the READMEs and the examples are pages, as
  is a file of code to which a page has a link.
- The page of a package ends with its reference: what `__all__` names, out of the docstrings. The operators of the
  pipeline have a page each.
- A link in a page is written for the repository, where it leads to a file. Here it leads to the page of that file.
- $...$ and $$...$$ become MathML, which browsers draw without a script or a font of ours.
- The title says the version, and the navigation ends with the repository once metadata.toml has its address.
"""

import ast
import posixpath
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from release import metadata  # noqa: E402

# Code is what no rule here touches: blocks between fences, indented blocks, and words between backticks.
CODE = re.compile(r"(^```.*?^```$|(?<=\n\n)(?: {4}[^\n]*\n)+|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
# A picture with a form for dark pages, as GitHub shows it.
PICTURE = re.compile(
    r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">(!\[[^\]]*\]\()([^)]+)\)</picture>'
)
COMMENT = re.compile(r"^<!--.*-->\n", re.MULTILINE)
MATHS = re.compile(r"\$\$(.+?)\$\$|\$(\S(?:[^$\n]*\S)?)\$", re.DOTALL)
MATHML = "http://www.w3.org/1998/Math/MathML"
# The height and depth of what carries a script. Without a font for mathematics browsers put superscripts on its top and
# subscripts at its bottom; with such a font they come to about the same places.
HEIGHT, DEPTH = {"height": "0.42em"}, {"depth": "0.2em"}
SCRIPTS = {"msup": HEIGHT, "msub": DEPTH, "msubsup": HEIGHT | DEPTH}
# Pages for those who change the project; a search shows the pages for users first.
REFERENCE = {
    "Layers": ["packages/layers.md"],
    "Flax": ["packages/integrations.nnx.md", "packages/integrations.md"],
    "Operators": [
        f"packages/{name}.md"
        for name in ("fused_gdn", "kda", "two_keys", "fused_gla", "delta_product", "dplr", "mlstm", "recipes")
    ],
    "Stages": [f"packages/{name}.md" for name in ("cumsum", "kkt", "solve_tril", "wy_fast", "chunk_h", "chunk_o")],
}
"""The pages of the menu's part API, by group; the pages of the pipeline come first in the group of operators, and the
pages of other packages make a last group."""
# The module with the layers as modules of flax.
FLAX = "nnx"
# The methods of the modules of flax, which a class has from a class that is not public.
METHODS = ("__call__", "init_cache")
BEHIND = ("packages/shared", "changelog", "contributing", "examples/", "maintain/", "sources/")
# The package whose operators have a page each; the functions of an operator begin so.
PIPELINE = "chunkwise.pipeline"
FORMS = ("chunk_", "recurrent_", "ragged_")


def outside_code(markdown: str, change) -> str:
    """Return a page with `change` applied to everything that is not code."""
    parts = CODE.split(markdown)
    return "".join(part if odd else change(part) for odd, part in zip([0, 1] * len(parts), parts, strict=False))


def exported(init: Path) -> list[str]:
    """Return what the `__all__` of a package names."""
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def reference(init: Path) -> str:
    """Return the Markdown from which mkdocstrings makes the reference of a package, or of a module of flax's."""
    path = init.parent if init.stem == "__init__" else init.with_suffix("")
    module = ".".join(path.parts[path.parts.index("src") + 1 :])
    members = f"\n    options:\n      inherited_members: [{', '.join(METHODS)}]\n      members: [{', '.join(METHODS)}]"
    options = members if init.stem == FLAX else ""
    names, links = exported(init), ""
    if module == PIPELINE:
        found = operators(names)
        links = "".join(f"- [{operator}]({operator}): {', '.join(found[operator])}\n" for operator in sorted(found))
        names = [name for name in names if not name.startswith(FORMS)]
    # The module of flax has a page of its own.
    return f"{links}\n" + "\n\n".join(f"::: {module}.{name}{options}" for name in names if name != FLAX)


def operators(names: list[str]) -> dict[str, list[str]]:
    """Return the functions of each operator by its name, which follows the form in the name of a function."""
    found: dict[str, list[str]] = {}
    for form in FORMS:
        for name in names:
            if name.startswith(form):
                found.setdefault(name.removeprefix(form), []).append(name)
    return found


def operator_pages(init: Path) -> dict[str, tuple[str, str]]:
    """Return the pages of the operators of the pipeline, each under a path beside its README that no file has."""
    pages = {}
    for operator, functions in sorted(operators(exported(init)).items()):
        title = f"---\ntitle: {operator}\nsearch: {{boost: 4}}\n---\n# {operator}\n\n"
        text = "\n\n".join(f"::: {PIPELINE}.{name}" for name in functions)
        pages[f"packages/pipeline/{operator}"] = (f"packages/pipeline.{operator}.md", f"{title}{text}\n")
    return pages


def linked_sources(pages: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return the pages of files of code to which pages have a link, and which have no page yet."""
    texts = [(path, text) for path, (_, text) in pages.items()]
    texts += [(str(path.relative_to(ROOT)), path.read_text()) for path in sorted(ROOT.glob("docs/**/*.md"))]
    found = {}
    for here, text in texts:
        for match in (match for part in CODE.split(text)[::2] for match in LINK.finditer(part)):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
            if path.endswith(".py") and path not in pages and (ROOT / path).is_file():
                found[path] = (f"sources/{path.removesuffix('.py')}.md", source_page(ROOT / path))
    return found


def source_page(path: Path) -> str:
    """Return a page that shows a file of code."""
    return f"# {path.relative_to(ROOT)}\n\n```python\n{path.read_text()}```\n"


def pages_elsewhere() -> dict[str, tuple[str, str]]:
    """Return the page and its text of every file outside of docs/ that has one, by its path in the repository."""
    pages = {"README.md": ("index.md", (ROOT / "README.md").read_text())}
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        pages[name] = (name.lower(), (ROOT / name).read_text())
    for folder in package_folders():
        text = (folder / "README.md").read_text()
        first, *groups = sorted(folder.glob("src/chunkwise/**/__init__.py"))
        if exported(first):
            text += f"\n## Reference\n\n{reference(first)}\n"
        pages[f"{folder.relative_to(ROOT)}/README.md"] = (f"packages/{folder.name}.md", text)
        for init in filter(exported, [*groups, *folder.glob(f"src/chunkwise/*/{FLAX}.py")]):
            name = f"{folder.name}.{init.parent.name if init.stem == '__init__' else init.stem}"
            title = f"# chunkwise.{name}\n\n{ast.get_docstring(ast.parse(init.read_text()))}\n\n"
            pages[str(init.relative_to(ROOT))] = (f"packages/{name}.md", title + reference(init))
    pages |= operator_pages(ROOT / "packages/pipeline/src/chunkwise/pipeline/__init__.py")
    for path in sorted(ROOT.glob("examples/[!_]*.py")):
        pages[str(path.relative_to(ROOT))] = (f"examples/{path.stem}.md", source_page(path))
    return pages | linked_sources(pages)


def package_folders() -> list[Path]:
    """Return the folders of all packages: shared, which users call least, is the last."""
    folders = sorted((path.parent for path in ROOT.glob("packages/*/pyproject.toml")), key=lambda path: path.name)
    return [*folders, ROOT / "shared"]


def on_config(config):
    """Append the pages of packages and examples to the navigation, and tell mkdocstrings where the sources are."""
    introduce(config, metadata.read())
    config.extra["elsewhere"] = elsewhere = pages_elsewhere()
    found = lambda folder: [page for page, _ in elsewhere.values() if page.startswith(f"{folder}/")]
    groups = REFERENCE | {"Operators": [page for page in found("packages") if page.startswith("packages/pipeline.")]}
    groups["Operators"].sort(key=lambda page: page != "packages/pipeline.md")
    groups["Operators"] += REFERENCE["Operators"]
    named = {page for pages in groups.values() for page in pages}
    parts = [{title: pages} for title, pages in groups.items()]
    parts.append({"Packages": ["packages.md", *(page for page in found("packages") if page not in named)]})
    # Before the part for maintainers, which is the last one.
    config.nav.insert(-1, {"API": parts})
    (tutorial,) = (part["Tutorial"] for part in config.nav if "Tutorial" in part)
    tutorial.append({"Examples": ["examples.md", *found("examples")]})
    options = config.plugins["mkdocstrings"].config["handlers"]["python"]
    options["paths"] = [str(path / "src") for path in package_folders()]
    return config


def introduce(config, about: metadata.Metadata) -> None:
    """Say the version in the title, and add a link to the repository to the navigation if it has an address.

    The theme's own link to a repository asks its forge for figures, from every reader's browser.
    """
    config.site_name = f"{config.site_name} {about.version}"
    if about.repository:
        config.nav.append({"Repository": about.repository})


def on_files(files, config):
    """Add the pages that lie outside of docs/."""
    for page, text in config.extra["elsewhere"].values():
        there = InclusionLevel.NOT_IN_NAV if page.startswith("sources/") else InclusionLevel.UNDEFINED
        files.append(File.generated(config, page, content=text, inclusion=there))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links between files into links between pages, and mathematics into MathML."""
    elsewhere = {path: there for path, (there, _) in config.extra["elsewhere"].items()}
    here = next((path for path, there in elsewhere.items() if there == page.file.src_uri), f"docs/{page.file.src_uri}")

    def link(match):
        path, heading = match[1], match[2] or ""
        if not path:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        target = elsewhere.get(path) or path.removeprefix("docs/")
        if files.get_file_from_path(target) is None:
            raise PluginError(f"{here}: no page shows {path}, to which there is a link.")
        return f"]({posixpath.relpath(target, posixpath.dirname(page.file.src_uri))}{heading})"

    if page.file.src_uri.startswith(BEHIND):
        page.meta["search"] = {"boost": 0.1}
    markdown = COMMENT.sub("", markdown)
    # The theme shows one of two pictures by the ends of their addresses.
    both = lambda text: PICTURE.sub(r"\2\3#only-light)\2\1#only-dark)", text)
    return outside_code(markdown, lambda text: LINK.sub(link, MATHS.sub(maths, both(text).replace("<", "&lt;"))))


def maths(match) -> str:
    """Return the MathML of one formula."""
    block, inline = match[1], match[2]
    drawn = convert((block or inline).replace("&lt;", "<"), display="block" if block else "inline")
    drawn = place_scripts(drawn)
    return f'<div class="formula">{drawn}</div>' if block else drawn


def place_scripts(drawn: str) -> str:
    """Return MathML in which all that carries a script is in a box of a fixed height and depth."""
    # Signs stay written as numbers, so that Markdown takes none of them for its own.
    formula = ET.fromstring(drawn.replace("&#x", "\ue000"))
    for element in list(formula.iter()):
        if box := SCRIPTS.get(element.tag.removeprefix(f"{{{MATHML}}}")):
            base = element[0]
            element[0] = ET.Element(f"{{{MATHML}}}mpadded", box)
            element[0].append(base)
    ET.register_namespace("", MATHML)
    return ET.tostring(formula, encoding="unicode").replace("\ue000", "&#x")
