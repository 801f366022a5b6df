"""The device of the suite, which part of the slow tests runs, and names of cases that are alike in all processes.

``CAPTURE_TEST_DEVICE=cuda`` runs every test that names no device on the GPU (``make test-gpu``). ``--part 2/3`` runs
the second third of the tests that are marked as slow (``make test-all PART=2/3``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

os.environ.setdefault("CAPTURE_STRICT", "1")  # what goes wrong inside the library is to be seen; in subprocesses, too
os.environ.setdefault("CAPTURE_DROP_SLOW", "0")  # no recording goes because this machine was busy

from capture.tree import step

pytest.register_assert_rewrite("tests.support")  # so that what fails in a helper is shown as in a test

from tests.support.device import use_device  # noqa: E402 - the line above has to be first
from tests.support.garbage import set_aside, set_imports_aside  # noqa: E402
from tests.support.left_behind import left_behind  # noqa: E402
from tests.support.parts import mark_dealt, part_of  # noqa: E402

use_device()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="of the slow tests only every N-th, from the K-th on")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_dealt(items)
    part: str | None = config.getoption("--part")
    if part is None:
        return
    try:
        chosen = part_of([item.nodeid for item in items if item.get_closest_marker("slow")], part)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_collection_finish() -> None:
    """Take what is there now out of the garbage collector's sight: each of hundreds of collections then takes half a
    second less."""
    set_aside()


def pytest_runtest_logfinish() -> None:
    """So with what a test has imported: a tenth of a second less for each collection after torch._dynamo came."""
    set_imports_aside()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert not left_behind()


@pytest.fixture(autouse=True)
def _unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps end by themselves until this test marks them, whatever the test before did."""
    monkeypatch.setattr(step.marks(), "begun", 0)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Names without addresses; None where pytest's own name has none."""
    text = repr(val)
    if " at 0x" not in text:
        return None
    name = getattr(val, "__qualname__", None)
    return name if isinstance(name, str) else re.sub(r" (of type object )?at 0x[0-9a-f]+", "", text)
