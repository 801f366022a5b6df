"""A small picture of loss curves for the demo."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw

SIZE, MARGIN = (640, 360), 40
COLOURS = ("#f0a040", "#2060c0", "#409040")


def save(path: Path, curves: Mapping[str, Sequence[float]], width: Sequence[int] = (5, 2)) -> None:
    """Losses over steps as lines, the first one drawn first and widest, so that equal ones are both seen."""
    image = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(image)
    values = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    low, high, steps = min(values), max(values), max(map(len, curves.values()))
    right, bottom = SIZE[0] - MARGIN, SIZE[1] - MARGIN
    across, up = (right - MARGIN) / max(steps - 1, 1), (bottom - MARGIN) / ((high - low) or 1.0)
    draw.line([(MARGIN, MARGIN), (MARGIN, bottom), (right, bottom)], fill="black")
    draw.text((4, MARGIN), f"{high:.2f}", fill="black")
    draw.text((4, bottom - 10), f"{low:.2f}", fill="black")
    draw.text((right - 60, bottom + 8), f"{steps} steps", fill="black")
    for number, (name, curve) in enumerate(curves.items()):
        points = [(MARGIN + step * across, bottom - (value - low) * up) for step, value in enumerate(curve)]
        colour = COLOURS[number % len(COLOURS)]
        draw.line(points, fill=colour, width=width[min(number, len(width) - 1)])
        draw.text((right - 120, MARGIN + 14 * number), name, fill=colour)
    image.save(path)
