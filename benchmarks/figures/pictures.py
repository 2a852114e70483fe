"""Pictures of docs/data, as SVG for light and dark pages: rows of dots on axes of times, one panel beside another."""

import math
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import NamedTuple

from benchmarks import decode_mixer
from benchmarks import step as steps
from benchmarks.cases import CASES
from benchmarks.figures import machine, tables
from benchmarks.figures.kernels import MODELS
from chunkwise.command import models
from chunkwise.shared.chips import CHIPS

# The colours of text, of lines, and of the kinds of dots.
THEMES = {
    "": ("#24292f", "#d0d7de", ("#1f6fd0", "#c2410c", "#2b8a3e", "#8250df")),
    "-dark": ("#e6edf3", "#3d444d", ("#6cb0ff", "#ff9a5c", "#5fd07a", "#c4a1ff")),
}
LABELS, WIDTH, LINE, TOP, BOTTOM = 200, 910, 23, 48, 28
# A dot of a kind: a circle, a square, a triangle or a diamond of about one size.
SHAPES = ("M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z", "M-4,-4h7v7h-7z", "M0,-5l5,8h-10z", "M0,-5l5,5l-5,5l-5,-5z")
# What is drawn of a row of a layer.
PARTS = {"chunkwise": "estimate_ms", "its bytes": "floor_ms"}
PICTURES: dict[str, Callable[[], "Picture"]] = {}


class Picture(NamedTuple):
    """A title, and times in ms by panel, by row, and by the kind of the dot."""

    title: str
    panels: dict[str, dict[str, dict[str, float]]]

    @property
    def rows(self) -> list[str]:
        """The rows of all panels."""
        return [*dict.fromkeys(row for rows in self.panels.values() for row in rows)]

    @property
    def kinds(self) -> list[str]:
        """The kinds of dots."""
        dots = (dots for rows in self.panels.values() for dots in rows.values())
        return [*dict.fromkeys(kind for kind in dots for kind in kind)]

    def text(self) -> str:
        """Return all figures, for those who do not see the picture."""
        times = lambda dots: "/".join(_short(dots[kind]) if kind in dots else "-" for kind in self.kinds).rstrip("/-")
        panel = lambda rows: "; ".join(f"{name} {times(dots)}" for name, dots in rows.items())
        panels = ". ".join(f"{name}: {panel(rows)}" for name, rows in self.panels.items())
        return f"{self.title}, {'/'.join(self.kinds)}. {panels}."


def _short(ms: float) -> str:
    """Return a time with three digits at most."""
    return f"{ms:.3f}".rstrip("0") if ms < 0.1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten from just below a time to just above another."""
    all_of = [m * 10.0**n for n in range(-4, 4) for m in (1, 2, 5)]
    first, last = max(x for x in all_of if x <= low), min(x for x in all_of if x >= high)
    return [x for x in all_of if first <= x <= last]


def draw(picture: Picture, theme: str) -> str:
    """Return the picture as SVG."""
    ink, faint, colours = THEMES[theme]
    rows, kinds = picture.rows, picture.kinds
    height, panel = TOP + LINE * len(rows) + BOTTOM, (WIDTH - LABELS) / len(picture.panels)
    text = lambda x, y, words, more="": f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'
    line = lambda x, y, to_x, to_y: f'<path d="M{x:.1f},{y:.1f}L{to_x:.1f},{to_y:.1f}" stroke="{faint}"/>'

    def dot(kind, x, y):
        shape, colour = SHAPES[kind % len(SHAPES)], colours[kind % len(colours)]
        return f'<path d="{shape}" transform="translate({x:.1f},{y:.1f})" fill="{colour}"/>'

    out = [text(LABELS - 8, TOP + LINE * (i + 0.7), row, 'text-anchor="end"') for i, row in enumerate(rows)]
    for i, kind in enumerate(kinds):
        x = LABELS + i * (WIDTH - LABELS) / len(kinds)
        out += [dot(i, x + 5, 10), text(x + 15, 15, kind)]
    for i, (name, of_rows) in enumerate(picture.panels.items()):
        left, right = LABELS + panel * i + 6, LABELS + panel * (i + 1) - 26
        times = [ms for dots in of_rows.values() for ms in dots.values()]
        ticks = _ticks(min(times), max(times))
        every = 1 if (right - left) / len(ticks) > 40 else 3
        scale = (right - left) / math.log(ticks[-1] / ticks[0])
        at = lambda ms, left=left, scale=scale, first=ticks[0]: left + scale * math.log(ms / first)
        out.append(text(left, TOP - 8, f"{name}, ms", 'font-weight="bold"'))
        for n, tick in enumerate(ticks):
            out.append(line(at(tick), TOP, at(tick), height - BOTTOM + 4))
            if n % every == 0:
                out.append(text(at(tick), height - BOTTOM + 18, f"{tick:g}", 'text-anchor="middle"'))
        for j, row in enumerate(rows):
            y = TOP + LINE * (j + 0.5)
            dots = {kinds.index(kind): ms for kind, ms in of_rows.get(row, {}).items()}
            if dots:
                out.append(line(at(min(dots.values())), y, at(max(dots.values())), y))
            out += [dot(kind, at(ms), y) for kind, ms in dots.items()]
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    style = f'font-family="sans-serif" font-size="13" fill="{ink}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(out) + "\n</svg>\n"


def files(name: str) -> dict[str, str]:
    """Return the files of a picture, by their paths from the root."""
    return {f"docs/images/{name}{theme}.svg": draw(PICTURES[name](), theme) for theme in THEMES}


def _shown(name: str, text: str, folder: str = "images") -> str:
    """Return the line of a page that shows a picture."""
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.svg">'
    return f"<picture>{dark}![{text}]({folder}/{name}.svg)</picture>"


def picture(function: Callable[[], Picture]) -> Callable[[], Picture]:
    """Register a function as the picture with its name, and as the block that shows it."""
    name = function.__name__.replace("_", "-")
    PICTURES[name], tables.BLOCKS[name] = function, lambda: _shown(name, function().text())
    return function


def _by(rows: Iterable[dict], keys: tuple[Callable[[dict], str], ...], ms: Callable[[dict], float]) -> Mapping:
    """Return the times of rows in dictionaries by the first key, the second and the third."""
    found: dict = {}
    for row in rows:
        panel, name, kind = (key(row) for key in keys)
        found.setdefault(panel, {}).setdefault(name, {})[kind] = ms(row)
    return found


@picture
def layer_times() -> Picture:
    """The forward of every layer on every chip, beside the time of its bytes and its peers."""
    ours = [row for row in tables.select(tables.rows_of("tpu-layers"), way="forward") if row["case"] in MODELS]
    ours = [row | {"kind": kind, "ms": row[key]} for row in ours for kind, key in PARTS.items()]
    theirs = [*tables.rows_of("tpu-kda"), *tables.select(tables.rows_of("tpu-two-keys"), way="forward")]
    theirs = [x | {"kind": x["implementation"], "ms": x["estimate_ms"]} for x in theirs if x["case"] in MODELS]
    rows = ours + [row for row in theirs if row["implementation"] != "fused"]
    keys = (lambda row: row["chip"], lambda row: MODELS[row["case"]], lambda row: row["kind"])
    rows.sort(key=lambda row: ([*CHIPS].index(row["chip"]), [*MODELS].index(row["case"])))
    return Picture("Predicted ms of a forward of 8,192 tokens", dict(_by(rows, keys, lambda row: row["ms"])))


@tables.block
def first_picture() -> str:
    """The same for the README, with the figures of a v6e as its text; the page on performance has all."""
    title, panels = layer_times()
    return _shown("layer-times", Picture(title, {"v6e": panels["v6e"]}).text(), "docs/images")


@picture
def decode_times() -> Picture:
    """64 decodes of a mixer, by pool and chip."""

    def pool(row):
        mixture = steps.MIXTURES[row["mixture"]]
        return f"{mixture.pool}, ring of {mixture.replay}" if mixture.replay else mixture.pool

    def layer(row):
        found = decode_mixer.MIXERS[row["case"]]
        return f"{tables.TITLES.get(found.operator, 'RWKV-7').removeprefix('gated ')}, {found.H}/{found.HV}"

    of_one = lambda mixture: mixture.W == 1 and not mixture.prefills
    rows = [x for x in tables.rows_of("decodes") if x.get("cycles") and of_one(steps.MIXTURES[x["mixture"]])]
    order = lambda row: [*steps.MIXTURES].index(row["mixture"])
    rows.sort(key=lambda row: ([*decode_mixer.MIXERS].index(row["case"]), order(row), [*CHIPS].index(row["chip"])))
    times = _by(rows, (layer, pool, lambda row: row["chip"]), lambda row: row["estimate_ms"])
    return Picture("Predicted ms of 64 decodes by operator, key/value heads and pool", dict(times))


@picture
def gpu_times() -> Picture:
    """Calls on an H100, of plain JAX beside kernels of others."""
    operator = lambda row: f"{machine.of_layer(row)}, {CASES[row['case']].HV} heads"
    library = lambda row: '"xla"' if row["implementation"] == "xla" else row["implementation"]
    rows = sorted(tables.rows_of("time-h100"), key=lambda row: row["implementation"] != "xla")
    times = _by(rows, (tables.way, operator, library), lambda row: row["median_ms"])
    return Picture("Measured ms on an H100, T = 8,192", dict(times))


@picture
def device_times() -> Picture:
    """The time of an operator whose tokens lie on several devices of a v6e."""
    rows = [row for name in ("", "-backward", "-others") for row in tables.rows_of(f"scale-v6e{name}")]

    def operator(row):
        layer: models.Layer = CASES[row["case"]]
        return f"{tables.TITLES[layer.operator]}, {layer.HV} heads"

    devices = lambda row: f"{row['devices']} device{'s' * (row['devices'] > 1)}"
    rows.sort(key=lambda row: ([*tables.PASSES].index(row["pass"]), row["devices"]))
    times = _by(rows, (tables.way, operator, devices), lambda row: row["estimate_ms"])
    return Picture("Predicted ms of 8,192 tokens a device on v6e", dict(times))
