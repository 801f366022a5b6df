"""Draw ``images/speed.svg``, the picture of the README: ``python docs/draw_speed.py``. The standard library is enough.

All numbers are medians of saved runs on one H200 (``benchmarks/results/h200``). A bar is a time relative to eager; its
milliseconds are beside it. The picture is text in, text out, so that a test compares the committed file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

PICTURE = Path(__file__).with_name("images") / "speed.svg"
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "h200"

EAGER, BY_HAND, OURS = "eager", "by hand (torch.cuda.graph)", "capture"
COLOURS = {EAGER: "#9aa0a6", BY_HAND: "#f0a040", OURS: "#2060c0"}
TOP, LEFT, BAR, GAP, LONGEST, WIDTH = 78, 250, 18, 22, 470, 860


class Work(NamedTuple):
    """One group of bars: a saved run, its unit, and the names of its figures there."""

    title: str
    file: str
    unit: str
    figures: dict[str, str]


WORKS = (
    Work(
        "Llama-shaped 1B, one decode step", "gpu_decode.json", "ms a token",
        {EAGER: "eager", BY_HAND: "by hand: copy_, replay", OURS: "ours"},
    ),
    Work(
        "small GPT, whole training step", "gpu_training.json", "ms a step",
        {EAGER: "eager", BY_HAND: "by hand: the whole step", OURS: "ours, the whole step"},
    ),
)  # fmt: skip


def _medians(work: Work) -> tuple[dict[str, float], dict[str, Any]]:
    """Milliseconds of each bar, and the run they are of."""
    run = json.loads((RESULTS / work.file).read_text(encoding="utf-8"))
    measured = {figure["name"]: figure["median"] for figure in run["figures"] if figure["unit"] == work.unit}
    return {bar: float(measured[name]) for bar, name in work.figures.items()}, run


def picture() -> str:
    """The whole file."""
    groups = [(work, *_medians(work)) for work in WORKS]
    run = groups[0][2]
    parts: list[str] = []
    y = TOP
    for work, medians, _ in groups:
        parts.append(_text(LEFT - 12, y + 1.5 * BAR + 5, work.title, anchor="end"))
        for bar, milliseconds in medians.items():
            share = milliseconds / medians[EAGER]
            length = max(LONGEST * share, 2)
            note = f"{milliseconds:.2f} ms" + (
                "" if bar == EAGER else f", {medians[EAGER] / milliseconds:.1f} times as fast"
            )
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 3}" fill="{COLOURS[bar]}"/>')
            parts.append(_text(LEFT + length + 6, y + BAR - 6, note, size=12))
            y += BAR
        y += GAP
    axis = y - GAP + 6
    parts.append(f'<line x1="{LEFT}" y1="{TOP - 6}" x2="{LEFT}" y2="{axis}" stroke="#5f6368"/>')
    parts.append(f'<line x1="{LEFT}" y1="{axis}" x2="{LEFT + LONGEST}" y2="{axis}" stroke="#5f6368"/>')
    for tenth in range(0, 11, 2):
        x = LEFT + LONGEST * tenth / 10
        parts.append(f'<line x1="{x:.1f}" y1="{axis}" x2="{x:.1f}" y2="{axis + 4}" stroke="#5f6368"/>')
        parts.append(_text(x, axis + 18, f"{tenth / 10:.1f}", size=11, anchor="middle"))
    parts.append(
        _text(LEFT + LONGEST / 2, axis + 36, "time relative to eager (shorter is faster)", size=12, anchor="middle")
    )
    legend = LEFT
    for bar, colour in COLOURS.items():
        parts.append(f'<rect x="{legend}" y="44" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(legend + 18, 55, bar, size=12))
        legend += 36 + 7 * len(bar)
    height = axis + 52
    title = f"Launch-bound models on one {run['device']}, torch {run['torch'].partition('+')[0]}, bit-equal results"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#202124">'
    )
    back = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, back, _text(12, 26, title, size=15, weight="bold"), *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
