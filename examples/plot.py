"""A picture of bars for the demo: eager and captured side by side, with a title and axes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 860, 190, 210, 84, 22, 18
COLOURS = {"eager": "#9aa0a6", "captured": "#2060c0"}


def bars(path: Path, title: str, values: Mapping[str, tuple[float, float]]) -> None:
    """Two bars for each program, their lengths relative to its eager one; times in microseconds beside them."""
    height = TOP + len(values) * (2 * BAR + GAP) + 52
    image = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    small, large = ImageFont.load_default(13), ImageFont.load_default(18)
    whole = WIDTH - LEFT - RIGHT
    longest = whole / max(1.0, *(captured / eager for eager, captured in values.values()))  # the length of eager's bar
    draw.text((LEFT, 14), title, fill="black", font=large)
    for number, (name, colour) in enumerate(COLOURS.items()):
        draw.rectangle((LEFT + 110 * number, 52, LEFT + 110 * number + 12, 64), fill=colour)
        draw.text((LEFT + 110 * number + 18, 50), name, fill="black", font=small)
    y = TOP
    for name, (eager, captured) in values.items():
        draw.text((LEFT - 10, y + BAR), name, fill="black", font=small, anchor="rm")
        for value, colour in zip((eager, captured), COLOURS.values(), strict=True):
            end = LEFT + longest * value / eager
            draw.rectangle((LEFT, y, end, y + BAR - 4), fill=colour)
            gain = "" if value is eager else f", {eager / value:.1f} times as fast"
            draw.text((end + 8, y + 1), f"{value:,.0f} us{gain}", fill="black", font=small)
            y += BAR
        y += GAP
    axis = y - GAP + 8
    draw.line([(LEFT, TOP - 8), (LEFT, axis), (LEFT + whole, axis)], fill="black")
    for tenth in range(0, 11, 2):
        x = LEFT + longest * tenth / 10
        draw.line([(x, axis), (x, axis + 5)], fill="black")
        draw.text((x, axis + 8), f"{tenth / 10:.1f}", fill="black", font=small, anchor="ma")
    draw.text((LEFT + whole / 2, axis + 26), "time relative to eager", fill="black", font=small, anchor="ma")
    image.save(path)
