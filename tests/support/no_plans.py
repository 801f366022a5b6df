"""Plans on disk, for tests of what is found out in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capture import config


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    """No plan is kept on disk, or found there."""
    with config.patch(cache=False):
        yield
