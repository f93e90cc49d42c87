"""The picture of credit: completions of one prompt as coloured text, one cell a token. Drawing only."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font
from matplotlib.patches import Rectangle

# Lengths are in characters of the monospaced font across and in lines down, and become inches here.
FONT, FONT_SIZE = "DejaVu Sans Mono", 10.5
CHARACTER = 0.602 * FONT_SIZE / 72  # inches; 0.602 em is the font's advance
LINE = 0.29  # inches
LABEL_WIDTH = 15.0
LINE_WIDTH = 100.0  # where a completion wraps
NARROWEST_CELL = 2.2
LINES_A_COMPLETION = 5
LONGEST_TOKEN = 32
INK, FAINT, NOT_SAMPLED = "#1f2328", "#6e7781", "#eceff1"


@dataclass
class CreditRow:
    """One completion. `advantages` and `sampled` have one entry a token; a token that the policy did not sample
    (sampled False) is grey. `label` stands at the left."""

    label: str
    tokens: Sequence[str]
    advantages: Sequence[float]
    sampled: Sequence[bool]


@dataclass
class _Cell:
    text: str
    advantage: float
    sampled: bool
    x: float
    width: float
    line: int


def credit_figure(prompt: str, caption: str, rows: Sequence[CreditRow]) -> Figure:
    """A figure of the rows under the prompt. Colours are symmetric about 0: red tokens are made less likely, blue
    ones more likely. A completion wraps, and beyond five lines it is cut with a note of how many tokens are not shown.
    """
    blocks = [_lay_out(row) for row in rows]
    heights = [max((cell.line for cell in cells), default=0) + 1 for cells, _ in blocks]
    right = max((cell.x + cell.width for cells, _ in blocks for cell in cells), default=0.0)
    width = LABEL_WIDTH + min(max(right, 56.0), LINE_WIDTH) + 2.0
    title = _prompt_lines(prompt, int(width) - 6)
    top = len(title) + 1.6  # the prompt, the caption, and some air
    bodies = sum(heights) + 0.45 * max(len(rows) - 1, 0)
    height = top + bodies + 2.9  # the colour bar and its label

    figure = Figure(figsize=(width * CHARACTER, height * LINE), dpi=110, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for number, line in enumerate(title):
        _write(axes, 1.0, number + 0.8, line, weight="bold" if len(title) == 1 else "normal", size=FONT_SIZE)
    _write(axes, 1.0, len(title) + 0.8, caption, color=FAINT, size=FONT_SIZE - 2)

    limit = max((abs(c.advantage) for cells, _ in blocks for c in cells if c.sampled), default=0.0) or 1.0
    norm, colours = Normalize(-limit, limit), _colours()
    y = top
    for row, (cells, hidden), lines in zip(rows, blocks, heights, strict=True):
        _write(axes, LABEL_WIDTH - 1.2, y + 0.5, row.label, ha="right", size=FONT_SIZE - 1)
        for cell in cells:
            _draw(axes, cell, y, colours, norm)
        if not cells:
            _write(axes, LABEL_WIDTH, y + 0.5, "(empty)", color=FAINT, size=FONT_SIZE - 1)
        if hidden:
            end = cells[-1].x + cells[-1].width
            note = f"… {hidden} more"
            _write(axes, LABEL_WIDTH + end + 0.6, y + lines - 0.5, note, color=FAINT, size=FONT_SIZE - 2)
        y += lines + 0.45

    bar = figure.add_axes(
        (LABEL_WIDTH / width, 1.75 / height, min(42.0, width - LABEL_WIDTH - 2) / width, 0.42 / height)
    )
    scale = figure.colorbar(ScalarMappable(norm, colours), cax=bar, orientation="horizontal")
    scale.set_label("advantage (red: made less likely, blue: made more likely)", size=FONT_SIZE - 2, color=INK)
    scale.set_ticks([-limit, -limit / 2, 0, limit / 2, limit])
    scale.set_ticklabels([f"{tick:+.3g}" if tick else "0" for tick in scale.get_ticks()])
    scale.ax.tick_params(labelsize=FONT_SIZE - 2.5, length=2, color=FAINT, labelcolor=INK)
    scale.outline.set_edgecolor("#c9ced3")  # type: ignore[operator]
    return figure


def _lay_out(row: CreditRow) -> tuple[list[_Cell], int]:
    """The cells that fit, and how many tokens do not."""
    cells: list[_Cell] = []
    x, line = 0.0, 0
    for token, advantage, sampled in zip(row.tokens, row.advantages, row.sampled, strict=True):
        text = readable(token)
        width = max(NARROWEST_CELL, len(text) + 0.9)
        room = LINE_WIDTH - (10.0 if line == LINES_A_COMPLETION - 1 else 0.0)  # the note stands on the last line
        if x + width > room:
            x, line = 0.0, line + 1
            if line == LINES_A_COMPLETION:
                break
        cells.append(_Cell(text, advantage, sampled, x, width, line))
        x += width
    return cells, len(row.tokens) - len(cells)


def _draw(axes: Axes, cell: _Cell, top: float, colours: Colormap, norm: Normalize) -> None:
    x, y = LABEL_WIDTH + cell.x, top + cell.line
    face = colours(norm(cell.advantage)) if cell.sampled else NOT_SAMPLED
    axes.add_patch(Rectangle((x, y + 0.06), cell.width, 0.88, facecolor=face, edgecolor="#c9ced3", linewidth=0.5))
    ink = FAINT if not cell.sampled else "white" if _is_dark(face) else INK
    _write(axes, x + cell.width / 2, y + 0.5, cell.text, ha="center", color=ink, size=FONT_SIZE)


def _write(
    axes: Axes, x: float, y: float, text: str, size: float, color: str = INK, ha: str = "left", weight: str = "normal"
) -> None:
    axes.text(  # parse_math: a dollar sign is a dollar sign
        x, y, text, family=FONT, size=size, color=color, ha=ha, va="center_baseline", weight=weight, parse_math=False
    )


def readable(token: str) -> str:
    """A token as one visible piece of text: line ends, tabs and lone spaces as signs, long ones cut, and a box for
    each character that the font does not have."""
    text = token.replace("\r", "").replace("\n", "↵").replace("\t", "⇥")
    if text.strip(" ") == "":
        text = text.replace(" ", "·")
    if len(text) > LONGEST_TOKEN:
        text = text[: LONGEST_TOKEN - 1] + "…"
    return "".join(character if ord(character) in _glyphs() else "□" for character in text)


def _prompt_lines(prompt: str, width: int, most: int = 4) -> list[str]:
    """The prompt on at most `most` lines; the middle of a long one is left out."""
    text = readable_text(prompt)
    room = width * most - 8
    if len(text) > room:
        text = f"{text[: room // 2]} … {text[-(room // 2) + 3 :]}"
    return textwrap.wrap(text, width, drop_whitespace=False)[:most] or ["(empty prompt)"]


def readable_text(text: str) -> str:
    """Text on one line, with a box for each character that the font does not have."""
    return "".join(readable(character) if character != " " else " " for character in text)


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(FT2Font(findfont(FontProperties(family=FONT))).get_charmap())


@cache
def _colours() -> Colormap:
    """Red to white to blue without the darkest ends, where text is hard to read."""
    return LinearSegmentedColormap.from_list("credit", colormaps["RdBu"](np.linspace(0.1, 0.9, 255)))


def _is_dark(colour: object) -> bool:
    red, green, blue = np.asarray(colour, dtype=float)[:3]
    return math.sqrt(0.299 * red**2 + 0.587 * green**2 + 0.114 * blue**2) < 0.58
