"""The words of findings about work on the host that no operator of torch does, or that no graph can hold."""

from __future__ import annotations

_SPLIT = "move it before or after the captured function  (splits the work in two)"
WORDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "unsafe": (
        "cannot be part of a recording",
        "it waits for the device or decides on the host, where a replay does nothing",
        ("use an operator that stays on the device  (no cost)", _SPLIT),
    ),
    "draw": (
        "cannot be part of a recording",
        "a replay runs no Python, so the numbers drawn in the recorded call would stay for ever",
        (
            "draw with torch, as by torch.rand  (no cost)",
            "draw before the call, and pass what was drawn as a tensor  (one small copy a call)",
        ),
    ),
    "iterator": (
        "cannot be part of a recording",
        "a replay runs no Python, so the iterator would not go on",
        ("take from it before the call, and pass what it gave  (no cost)", "pass a list instead  (no cost)"),
    ),
    "file": (
        "cannot be part of a recording",
        "a replay runs no Python, so nothing would be read or written",
        ("read before the call, and write after it  (no cost)",),
    ),
    "seed": (
        "cannot be part of a recording",
        "a replay runs no Python, so this would be done once and then never again",
        ("do it before the call  (no cost)",),
    ),
    "mode": (
        "cannot be part of a recording",
        "a replay runs no Python, so the mode would stay as it is",
        ("set it before the call, or put it back in the function  (no cost)",),
    ),
    "array": (
        "makes a tensor of an array",
        "arrays are written in place and nothing tells of it: a recording would keep the values of now",
        (
            "pass torch.from_numpy(array) as an argument, whose memory every call reads  (no cost)",
            "make the tensor once, outside, if the array never changes  (no cost)",
        ),
    ),
    "address": (
        "gets the address of a tensor as a number",
        "nothing tells when the tensor lies elsewhere: a recording would go on with the memory of now",
        ("have the operator take the tensor itself  (no cost)", _SPLIT),
    ),
}
"""What the operator does, why it matters and what helps, by kind of work."""
BY_TEXT = {
    "drawing from ": "draw", "taking from ": "iterator", "leaving another ": "mode", "seeding a ": "seed",
    "using the file ": "file",
}  # fmt: skip
"""Work that is no operator: the beginning of its text, and its key in ``WORDS``."""
