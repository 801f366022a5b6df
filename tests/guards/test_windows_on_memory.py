"""Memory that Python code looks at and writes through pointers, windows and shared blocks: a change is seen, and what
the body writes is there after each call."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from typing import Any

import pytest
import torch
from attrs import frozen

from capture import capture, recordings
from tests.support.device import DEVICE


class Pair(ctypes.Structure):
    """A number, and a pointer to another one."""

    _fields_ = (("first", ctypes.c_int), ("second", ctypes.POINTER(ctypes.c_int)))


@frozen
class Memory:
    """A number that is read and written in one way by the body, and in another one by the caller."""

    get: Callable[[], int]
    put: Callable[[int], object]
    own: Callable[[int], object]
    """The caller's way."""
    end: Callable[[], object] = int


def by_pointer() -> Memory:
    pair = Pair(2)
    pointer = ctypes.pointer(pair)
    return Memory(
        lambda: pointer.contents.first,
        lambda value: setattr(pointer.contents, "first", value),
        lambda value: setattr(pair, "first", value),
    )


def by_pointer_in_a_structure() -> Memory:
    number = ctypes.c_int(2)
    pair = Pair(0, ctypes.pointer(number))
    return Memory(
        lambda: pair.second[0],
        lambda value: pair.second.__setitem__(0, value),
        lambda value: setattr(number, "value", value),
    )


def by_pointer_of_another_type() -> Memory:
    pair = Pair(2)
    pointer = ctypes.cast(ctypes.pointer(pair), ctypes.POINTER(ctypes.c_int))
    return Memory(
        lambda: pointer[0], lambda value: pointer.__setitem__(0, value), lambda value: setattr(pair, "first", value)
    )


def by_pointer_in_an_array() -> Memory:
    number = ctypes.c_int(2)
    pointers: Any = (ctypes.POINTER(ctypes.c_int) * 2)(ctypes.pointer(number))
    return Memory(
        lambda: pointers[0][0],
        lambda value: pointers[0].__setitem__(0, value),
        lambda value: setattr(number, "value", value),
    )


def by_window() -> Memory:
    numbers = array.array("i", [0, 2])
    window = memoryview(numbers)[1:]
    return Memory(
        lambda: window[0], lambda value: window.__setitem__(0, value), lambda value: numbers.__setitem__(1, value)
    )


def by_shared_memory() -> Memory:
    block: Any = shared_memory.SharedMemory(create=True, size=16)
    other: Any = shared_memory.SharedMemory(block.name)
    block.buf[0] = 2

    def end() -> None:
        other.close()
        block.close()
        block.unlink()

    return Memory(
        lambda: block.buf[0],
        lambda value: block.buf.__setitem__(0, value),
        lambda value: other.buf.__setitem__(0, value),
        end,
    )


def by_list_in_shared_memory() -> Memory:
    numbers: Any = shared_memory.ShareableList([2, 3])

    def end() -> None:
        numbers.shm.close()
        numbers.shm.unlink()

    def put(value: int) -> object:
        return numbers.__setitem__(0, value)

    return Memory(lambda: numbers[0], put, put, end)


@pytest.fixture(
    params=[
        by_pointer, by_pointer_in_a_structure, by_pointer_of_another_type, by_pointer_in_an_array, by_window,
        by_shared_memory, by_list_in_shared_memory,
    ]
)  # fmt: skip
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    made: Memory = request.param()
    yield made
    made.end()


def test_a_change_of_the_memory_is_seen(memory: Memory) -> None:
    get = memory.get
    captured = capture(lambda x: x * get())
    for number in range(10):
        if number == 5:
            assert recordings(captured).replays > 0
            memory.own(7)
        x = torch.arange(3.0, device=DEVICE) + number
        assert torch.equal(captured(x), x * (2 if number < 5 else 7)), number
    assert recordings(captured).replays > 4


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:CG204:capture.CaptureWarning")
def test_what_the_body_writes_there_is_there_after_each_call(memory: Memory) -> None:
    get, put = memory.get, memory.put

    def body(x: torch.Tensor) -> torch.Tensor:
        put(get() + 1)
        return x * 2

    captured = capture(body)
    for number in range(8):
        x = torch.arange(3.0, device=DEVICE) + number
        assert torch.equal(captured(x), x * 2)
        assert get() == 3 + number
