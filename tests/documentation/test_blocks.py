"""Every code block of the README and of ``docs/`` runs, and prints what the page says that it prints."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import capture
from capture import config
from tests.support.pages import PAGES, ROOT, blocks, comparable, run, says

COMPARED = not torch.cuda.is_available()  # pages show what a CPU prints

WITH_CODE = [page for page in PAGES if any(block.is_run for block in blocks(page))]


@pytest.fixture
def _as_in_a_new_process() -> Iterator[None]:
    threads = torch.get_num_threads()
    capture.reset()
    with config.patch(cache=False), torch.set_grad_enabled(True):  # a page may switch them off
        yield
    torch.set_num_threads(threads)
    gc.collect()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("_as_in_a_new_process")
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_blocks_run_and_print_what_the_page_says(page: Path) -> None:
    for block, printed in run(page):
        if block.printed is not None and COMPARED:
            assert says(block.printed, printed), f"{name_of(page)}:{block.line} printed:\n{printed}"
        elif COMPARED:
            assert not printed, f"{name_of(page)}:{block.line} prints what the page does not show:\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_is_left_out_silently(page: Path) -> None:
    """A block that does not run says why, in a comment before it. Blocks of other languages do not run either."""
    silent = [
        f"{name_of(page)}:{block.line}"
        for block in blocks(page)
        if block.language not in ("python", "toml", "sh") and not block.directive
    ]
    assert not silent, "these blocks neither run nor say why not (`<!-- not run: ... -->`): " + ", ".join(silent)


def test_measured_numbers_and_places_are_not_compared() -> None:
    assert comparable("took 1.5 ms\n  at f (/tmp/a/serve.py:12)") == comparable("took 20.75 ms\nat f (serve.py:3)")
    assert comparable("3 replays") != comparable("4 replays")


@pytest.mark.parametrize(
    ("page", "printed", "same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a ... c\n", "a b c\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n...\n", "b\n", False),
    ],
)
def test_dots_stand_for_anything(page: str, printed: str, same: bool) -> None:
    assert says(page, printed) is same
