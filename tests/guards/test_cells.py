"""The table of cells: a kind of Python state, who reads it, what happens to it, and in which kind of call.

Each cell replays before the change, is right in the call after it, and replays again within three calls. Cells that go
eager instead are listed with the rule that says so.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import config
from tests.guards.cells import CALLED, KINDS, READERS, Cell
from tests.guards.kinds import ADDED, DELETED, IN_PLACE, REPLACED, Kind

EAGER: dict[tuple[str, str], str] = {}
"""Kind and change to the rule by which calls after the change are eager."""
NEVER: dict[str, str] = {}
"""Kinds that are eager from the first call on, with the rule."""


def _cells() -> Iterator[Any]:
    """Four of the twelve readers and kinds of call for each change, in turn; ``make test`` takes the first."""
    columns = list(itertools.product(READERS, CALLED))
    rows = [(kind, name) for kind in KINDS for name in kind.changes]
    for number, (kind, name) in enumerate(rows):
        for turn in range(4):
            reader, called = columns[(number * 5 + turn * 3) % len(columns)]
            marks = [pytest.mark.slow] if turn else []
            yield pytest.param(kind, name, reader, called, id=f"{kind.name}-{name}-{reader}-{called}", marks=marks)


CELLS = tuple(_cells())


@pytest.fixture
def _apart() -> Iterator[None]:
    with torch.enable_grad(), config.patch(cache=False, strict=True):
        yield


@pytest.mark.one_in(18)
@pytest.mark.parametrize(("kind", "change", "reader", "called"), CELLS)
@pytest.mark.usefixtures("_apart")
def test_cell(kind: Kind, change: str, reader: str, called: str) -> None:
    cell = Cell(kind, reader, called)
    never, eager = kind.name in NEVER, (kind.name, change) in EAGER
    try:
        contextvars.copy_context().run(lambda: cell.run(kind.changes[change], never=never, eager=eager))
    finally:
        for clean in cell.space["CLEAN"]:
            clean()


def test_how_many_cells_there_are() -> None:
    assert len(CELLS) >= 800
    changes = {(kind.name, name) for kind in KINDS for name in kind.changes}
    eager = EAGER.keys() | {pair for pair in changes if pair[0] in NEVER}
    assert eager <= changes
    assert len(eager) <= 0.1 * len(changes)


def table() -> str:
    """The rows of the table in ``docs/key.md``."""
    columns = (REPLACED, IN_PLACE, DELETED, ADDED)
    rows = [f"| kind of state | {' | '.join(columns)} |", f"|{'---|' * 5}"]
    for kind in KINDS:
        marks = ["replays" if column in kind.changes else "" for column in columns]
        rows.append(f"| {kind.name} | {' | '.join(marks)} |")
    return "\n".join(rows)


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "key.md").read_text()
    assert page.split("<!-- cells -->\n")[1].split("\n<!-- end of cells -->")[0] == table()
