"""Draw ``images/how-it-works.svg``: ``python docs/draw_how_it_works.py``. The standard library is enough.

The picture is text in, text out, so that the committed file can be compared with what this gives.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).with_name("images") / "how-it-works.svg"

WAY_IN = [
    ("your call", ""),
    ("capture/api", "the decorated function"),
    ("capture/key", "bind, make the key"),
    ("capture/runtime", "what is known for this key?"),
]
CALLS = [
    (
        "call 1: nothing is known",
        "watch one eager run",
        [
            ("capture/observe", "run the body, note each operator"),
            ("capture/state", "what changed in Python objects?"),
            ("capture/core", "facts"),
            ("capture/rules", "findings, decisions: the plan"),
            ("capture/plan_cache", "keep the plan on disk"),
        ],
    ),
    (
        "call 2: there is a plan",
        "run the body as a recording",
        [
            ("capture/tree", "the pool as the path left it"),
            ("capture/engines", "tape, or CUDA graph"),
            ("capture/rules", "is the plan the same again?"),
            ("capture/guards", "what has to stay as it is"),
            ("capture/tree", "one more node"),
        ],
    ),
    (
        "call 3: there is a recording",
        "replay it",
        [
            ("capture/runtime", "make the fast path"),
            ("capture/tree", "which node fits?"),
            ("capture/guards", "do they hold?"),
            ("capture/engines", "copy in, replay"),
            ("capture/tree", "build the outputs"),
        ],
    ),
    (
        "then: the fast path, in C",
        "the same, without Python",
        [
            ("capture/native", "compare the arguments"),
            ("capture/native", "which node fits?"),
            ("capture/native", "guards"),
            ("capture/native", "copy in, launch"),
            ("capture/native", "hand out the outputs"),
        ],
    ),
]

BOX_WIDTH, BOX_HEIGHT, GAP, ROW = 212, 46, 24, 62
MARGIN = 30
COLUMNS_TOP = 200
FONT = "Helvetica, Arial, sans-serif"
INK, PAPER, FOLDER, LINE = "#1b1f24", "#ffffff", "#0b5394", "#8a949e"
FILLS = ("#e8f0fe", "#e6f4ea", "#fef3e0", "#f3e8fd")


def text(x: float, y: float, words: str, *, size: int = 13, weight: str = "normal", color: str = INK) -> str:
    """One line of text, centred at ``x``."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{color}" '
        f'text-anchor="middle">{escape(words)}</text>'
    )


def box(x: float, y: float, title: str, below: str, fill: str) -> list[str]:
    """A box with the folder's name and what it does."""
    middle = x + BOX_WIDTH / 2
    lines = [
        f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="{LINE}"/>'
    ]
    if not below:
        return [*lines, text(middle, y + 28, title, weight="bold")]
    return [*lines, text(middle, y + 19, title, weight="bold", color=FOLDER), text(middle, y + 37, below)]


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line with a head at its end."""
    return f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{INK}" fill="none" marker-end="url(#head)"/>'


def shortcut(width: int) -> list[str]:
    """From the decorated function over the key to the first box of the fast path."""
    x, top, right = MARGIN + BOX_WIDTH + GAP + BOX_WIDTH / 2, MARGIN - 14, width - 12
    y = COLUMNS_TOP + BOX_HEIGHT / 2
    way = f"M{x:g} {MARGIN} L{x:g} {top} L{right} {top} L{right} {y:g} L{width - MARGIN} {y:g}"
    return [
        f'<path d="{way}" stroke="{INK}" stroke-dasharray="5 4" fill="none" marker-end="url(#head)"/>',
        text(x + 250, top - 3, "a call like an earlier one", size=12),
    ]


def picture() -> str:
    """The whole file."""
    width = 2 * MARGIN + 4 * BOX_WIDTH + 3 * GAP
    height = COLUMNS_TOP + 5 * ROW + 18
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONT}">',
        "<title>What the first three calls of a captured function do, and those after them</title>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">',
        f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
    ]
    for column, (title, below) in enumerate(WAY_IN):
        x = MARGIN + column * (BOX_WIDTH + GAP)
        lines += box(x, MARGIN, title, below, PAPER)
        if column:
            lines.append(arrow(x - GAP, MARGIN + BOX_HEIGHT / 2, x, MARGIN + BOX_HEIGHT / 2))
    bus = MARGIN + BOX_HEIGHT + 24
    last = MARGIN + 3 * (BOX_WIDTH + GAP) + BOX_WIDTH / 2
    first = MARGIN + BOX_WIDTH / 2
    lines.append(
        f'<path d="M{last:g} {MARGIN + BOX_HEIGHT} L{last:g} {bus} L{first:g} {bus}" stroke="{INK}" fill="none"/>'
    )
    lines += shortcut(width)
    for column, (call, what, steps) in enumerate(CALLS):
        x = MARGIN + column * (BOX_WIDTH + GAP)
        middle = x + BOX_WIDTH / 2
        if column < 3:  # the fast path makes no key: ``shortcut`` leads to it
            lines.append(arrow(middle, bus, middle, bus + 22))
        lines.append(text(middle, COLUMNS_TOP - 38, call, size=15, weight="bold"))
        lines.append(text(middle, COLUMNS_TOP - 18, what))
        for row, (folder, does) in enumerate(steps):
            y = COLUMNS_TOP + row * ROW
            lines += box(x, y, folder, does, FILLS[column])
            if row:
                lines.append(arrow(middle, y - ROW + BOX_HEIGHT, middle, y))
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
