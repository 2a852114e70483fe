"""The documentation site, as `mkdocs build` left it in build/site, in a browser: `nox -s site` builds it and runs this.

Every page is opened once, at the width of a phone and then of a laptop, and says what the tests look at. The server is
on this machine.
"""

import ast
import functools
import http.server
import runpy
import statistics
import threading
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urldefrag

import pytest

from tests_e2e.site.browser import LAPTOP, Browser

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/site"
HOOKS = runpy.run_path(str(ROOT / "docs/site/hooks.py"))
ABOUT = HOOKS["metadata"].read()
PAGES = sorted(path.relative_to(SITE).as_posix().removesuffix("index.html") for path in SITE.rglob("index.html"))
INITS = [path for path in ROOT.glob("*/**/src/chunkwise/**/__init__.py") if "__all__" in path.read_text()]
PIPELINE = ROOT / "packages/pipeline/src/chunkwise/pipeline/__init__.py"
INITS += ROOT.glob(f"packages/*/src/chunkwise/*/{HOOKS['FLAX']}.py")
# Pages that a person looks at, in windows of these widths.
PICTURED = ["", "tutorial/", "serving/", "performance/", "packages/layers/", "packages/integrations.nnx/"]
WIDTHS = {390: 844, 1400: 900}
PICTURES = ROOT / "build/pictures"
# Letters that a line has room for, in each long paragraph: its width over the mean width of its letters.
LINE_LENGTHS = """[...document.querySelectorAll('article > p')].filter(x => x.textContent.length > 150).map(x => {
    const room = x.getBoundingClientRect().width
    x.style.cssText = 'white-space: nowrap; width: max-content; max-width: none'
    const length = x.getBoundingClientRect().width
    x.style.cssText = ''
    return room * x.textContent.length / length
})"""

# What the tests want to know of an open page.
LOOK = """({
    missing: [...document.images].filter(x => !x.naturalWidth).map(x => x.src),
    links: [...document.links].map(a => a.href),
    names: [...document.querySelectorAll('[id]')].map(x => x.id),
    unknown: [...document.querySelectorAll('*')].filter(x => x instanceof HTMLUnknownElement).map(x => x.outerHTML),
    width: document.scrollingElement.scrollWidth,
    wide: [...document.querySelectorAll('article :not(pre *, .md-typeset__scrollwrap *, .formula *)')]
        .filter(x => x.getBoundingClientRect().right > innerWidth + 1)
        .map(x => x.tagName + ': ' + x.textContent.slice(0, 60)),
    window: innerWidth,
    formulas: [...document.querySelectorAll('math')].map(x => x.getBoundingClientRect().width),
    undrawn: [...document.querySelectorAll('math')].map(x => x.textContent).filter(text => /[\\\\&]/.test(text)),
    raw: [...document.querySelectorAll('article p, article li, article td')]
        .map(x => [...x.childNodes].filter(n => n.nodeName === '#text').map(n => n.textContent).join(' '))
        .filter(text => /\\$|\\\\[a-z]+/.test(text)),
})"""
# And at the width of a laptop. A transpose floats if its T ends in the upper quarter of the capital or bracket that
# carries it, or above. Small letters are lower, and the T of one floats if it ends above the letter: TeX lets it end
# 0.02 em below.
LOOK_WIDE = """(transposes => ({
    title: document.querySelector('header .md-header__topic').textContent.trim(),
    scrolling: [...document.querySelectorAll('pre, pre > code')].filter(x => x.scrollWidth > x.clientWidth)
        .map(x => x.textContent.slice(0, 60)),
    transposes: transposes.length,
    floating: transposes.filter(x => {
        const base = x.firstElementChild.firstElementChild, {top, height} = base.getBoundingClientRect()
        const lowest = /^[a-z]$/.test(base.textContent) ? top : top + height / 4
        return x.lastElementChild.getBoundingClientRect().bottom < lowest
    }).map(x => x.textContent),
}))([...document.querySelectorAll('msup, msubsup')].filter(x => x.lastElementChild.textContent === 'T'))"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def address():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser():
    tab = Browser()
    yield tab
    tab.close()


@pytest.fixture(scope="session")
def look(browser, address):
    """Return a function that opens a page once and says what is on it."""

    @functools.cache
    def look(page: str) -> dict:
        assert browser.open(address + page)
        seen = browser.run(LOOK)
        browser.resize(LAPTOP)
        return seen | browser.run(LOOK_WIDE) | {"said": browser.said, "asked": browser.asked}

    return look


def test_site_is_built():
    assert PAGES, "there must be a site in build/site; `nox -s docs` builds one"


@pytest.mark.parametrize("page", PAGES)
def test_page_is_sound(look, address, page):
    seen = look(page)
    assert not seen["said"], "nothing must be said on the console"
    assert not seen["unknown"], "a page must hold elements of HTML only"
    assert not seen["missing"], "pictures must come"
    assert not [url for url in seen["asked"] if not url.startswith((address, "data:", "blob:"))], "all must be local"


@pytest.mark.parametrize("page", PAGES)
def test_page_fits_a_phone(look, page):
    seen = look(page)
    assert seen["window"] == 390
    assert seen["width"] <= seen["window"], seen["wide"]


@pytest.mark.parametrize("page", PAGES)
def test_formulas_are_drawn(look, page):
    seen = look(page)
    assert all(width > 0 for width in seen["formulas"])
    assert not seen["undrawn"], "a formula must hold no command that is not known"
    assert not seen["raw"], "a formula must not stay as it is typed"


@pytest.mark.parametrize("page", PAGES)
def test_transposes_are_in_place(look, page):
    """The transpose of a matrix stands beside it and not above, without a font for mathematics too."""
    assert not look(page)["floating"]
    assert page != "tutorial/" or look(page)["transposes"] == 3


@pytest.mark.parametrize("page", PAGES)
def test_code_does_not_scroll_on_a_laptop(look, page):
    assert not look(page)["scrolling"]


def test_lines_are_easy_to_read(browser, address):
    """On a wide window they have 80 to 90 letters."""
    assert browser.open(address + "using/", (1400, 900))
    lengths = browser.run(LINE_LENGTHS)
    assert len(lengths) > 3
    assert 80 <= statistics.median(lengths) <= 90, lengths


@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PICTURED)
def test_pictures(browser, address, page, width, scheme):
    """They are kept in build/pictures; a page in dark colours is drawn dark."""
    height = WIDTHS[width]
    assert browser.open(address + page, (width, height))
    assert browser.run(f"[document.body.setAttribute('data-md-color-scheme', '{scheme}')].length")
    is_drawn = lambda: (browser.lightness() < 128) == (scheme == "slate")
    for _ in range(20):
        if is_drawn():
            break
        # A window without a screen is drawn anew when its size changes.
        browser.resize((width, height - 1))
        browser.resize((width, height))
        browser.sleep(0.2)
    assert is_drawn()
    PICTURES.mkdir(parents=True, exist_ok=True)
    browser.picture(PICTURES / f"{page.strip('/').replace('/', '.') or 'index'}-{width}-{scheme}.png")


def test_pages_lead_to_their_neighbours(browser, address):
    assert browser.open(address + "tutorial/")
    directions = "[...document.querySelectorAll('.md-footer__link')].map(a => a.className.split('--')[1])"
    assert browser.run(directions) == ["prev", "next"]


def test_modules_of_flax_have_their_calls(look):
    names = look("packages/integrations.nnx/")["names"]
    modules = "GatedDeltaNet", "KimiDeltaAttention", "GatedDeltaNet2", "Mamba2Mixer", "LightningAttention", "MlstmLayer"
    modules += "GatedDeltaProduct", "Rwkv7Attention"
    for module in modules:
        assert {f"chunkwise.integrations.nnx.{module}.{name}" for name in HOOKS["METHODS"]} <= set(names)


def test_a_page_is_one_result_of_a_search(browser, address):
    """With its best section beside it."""
    assert browser.open(address)
    assert browser.wait_for(f"{SEARCH % 'state'}.length")
    browser.sleep(0.5)
    shown = """[...document.querySelectorAll('.md-search-result__item')]
        .map(x => [...x.querySelectorAll(':scope > a')].filter(a => getComputedStyle(a).display !== 'none').length)"""
    counts = browser.run(shown)
    assert len(counts) > 5
    assert max(counts) <= 2


def test_only_pages_are_published():
    assert not [*SITE.rglob("__pycache__"), *SITE.rglob("*.py")]


def test_title_says_the_version(look):
    assert look("")["title"] == f"chunkwise {ABOUT.version}"


def test_repository():
    """The navigation links to the repository as soon as it has an address, and nothing else asks it for anything."""
    for address, expected in (("", ["index.md"]), ("https://x.org/y", ["index.md", {"Repository": "https://x.org/y"}])):
        config = SimpleNamespace(site_name="chunkwise", nav=["index.md"])
        HOOKS["introduce"](config, ABOUT._replace(repository=address))
        assert config.nav == expected


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(look, address, page):
    for link in look(page)["links"]:
        url, name = urldefrag(link)
        if url.startswith(address):
            target = url.removeprefix(address)
            if target in PAGES:
                assert not name or name in look(target)["names"], f"{link}: the page must hold that heading"
            else:
                assert (SITE / target).is_file(), link


def functions(init: Path) -> list[str]:
    """Return the functions and classes that a package exports, by their full names."""
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    path = init.parent if init.stem == "__init__" else init.with_suffix("")
    module = ".".join(path.parts[path.parts.index("src") + 1 :])
    # The module of flax has a page of its own.
    return [f"{module}.{name}" for name in names if not name.isupper() and name != HOOKS["FLAX"]]


@pytest.mark.parametrize("init", INITS, ids=lambda init: "/".join(init.with_suffix("").parts[-2:]))
def test_search_finds_what_a_package_exports(browser, address, init):
    assert browser.open(address)
    for name in functions(init):
        word = name.rsplit(".", 1)[1]
        found = browser.wait_for(f"{SEARCH % word}.some(url => url.hash === '#{name}')")
        assert found, f"a search for {word} must find {name}"


@pytest.mark.parametrize("operator", HOOKS["operators"](HOOKS["exported"](PIPELINE)))
def test_search_shows_the_page_of_an_operator_first(browser, address, operator):
    """For its name, and for the names of its functions."""
    assert browser.open(address)
    for word in (operator, *HOOKS["operators"](HOOKS["exported"](PIPELINE))[operator]):
        assert browser.wait_for(
            f"(found => found.length && found[0].pathname)({SEARCH % word}) === '/packages/pipeline.{operator}/'"
        )


@pytest.mark.parametrize("word", ["inputs", "kernels", "tests", "compare", "packed", "oracle"])
def test_search_shows_pages_for_users_first(browser, address, word):
    """The package shared, the changelog and the examples come after all pages that say something of a word."""
    assert browser.open(address)
    assert browser.wait_for(f"{SEARCH % word}.length")
    browser.sleep(0.5)
    found = browser.run(f"{SEARCH % word}.map(url => url.pathname.slice(1))")
    behind = [path.startswith(HOOKS["BEHIND"]) for path in found]
    assert not behind[0], found


# Types a word, and says where the results lead. They come when the search is done with them.
SEARCH = """(() => {
    const word = '%s'
    const field = document.querySelector('[data-md-component=search-query]')
    if (field.value !== word) {
        document.querySelector('[data-md-toggle=search]').checked = true
        field.focus()
        field.value = word
        field.dispatchEvent(new Event('keyup', {bubbles: true}))
    }
    return [...document.querySelectorAll('.md-search-result__link')].map(a => new URL(a.href))
})()"""
