"""A plugin of pytest: ``pytest_plugins = ["capture.testing.plugin"]`` in a ``conftest.py`` turns it on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capture.runtime import lives
from capture.testing.replays import assert_no_eager


@pytest.fixture(autouse=True)
def _no_objects_before() -> None:
    """Objects that came and went in other tests do not count: a test is alike alone and among others."""
    lives.forget()


@pytest.fixture
def capture_no_eager() -> Iterator[None]:
    """The test fails, at its end, if a captured function became eager in it, or was so before and was called.

    For a whole file: ``pytestmark = pytest.mark.usefixtures("capture_no_eager")``.
    """
    with assert_no_eager():
        yield
