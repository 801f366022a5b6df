"""Looking for classes and modules of the whole process while other threads make objects."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from torch import nn

from capture.api.module_paths import module_paths
from capture.state.unreached import _all_classes, _objects_of, objects_of, with_subclasses


class Meta(type):
    pass


class Kind(metaclass=Meta):
    pass


class Below(Kind):
    pass


@pytest.fixture
def fast_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("fast_switching")
@pytest.mark.parametrize(
    "look", [_all_classes, lambda: module_paths([nn.Linear(2, 2)]), lambda: _objects_of(nn.Module)]
)
def test_no_tuple_breaks_that_another_thread_is_making(look: Callable[[], object]) -> None:
    """It would raise ``SystemError`` there, in code that is not ours."""
    errors: list[BaseException] = []
    is_over = threading.Event()

    def make() -> None:
        while not is_over.is_set():
            try:
                assert len(tuple(number for number in range(300))) == 300
            except BaseException as error:  # noqa: BLE001 - told below
                errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        look()
    is_over.set()
    for thread in threads:
        thread.join()
    assert errors == []


def test_what_is_found() -> None:
    one, other = Kind(), Below()
    assert with_subclasses(Kind) == [Kind, Below]
    assert {id(found) for found in objects_of(Kind)} == {id(one), id(other)}
    assert {Meta, Kind, Below} <= set(_all_classes())
