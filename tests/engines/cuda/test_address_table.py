"""The table of one recording's bindings, with a driver that only takes notes, and the reading of parameter blocks."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import define, field

from capture.engines.cuda import kernel_params
from capture.engines.cuda.address_inference import AddressWord, NodeParameters
from capture.engines.cuda.address_table import AddressTable
from capture.engines.cuda.kernel_params import DriverError, GraphNode


@define(eq=False)
class Driver:
    """A driver that notes, for each setting of a node, the node's number and its words."""

    log: list[tuple[int, dict[int, int]]] = field(factory=list)
    made: int = 0
    refuses: bool = False

    def node(self, number: int) -> GraphNode:
        def editor(indices: Sequence[int]) -> _Editor:
            self.made += 1
            return _Editor(self, number, indices)

        return GraphNode(None, NodeParameters("kernel", (), ()), lambda: f"kernel {number}", editor)


@define(eq=False)
class _Editor:
    driver: Driver
    number: int
    indices: Sequence[int]

    def set(self, executable: Any, values: Sequence[int]) -> bool:
        assert executable == "executable"
        if not self.driver.refuses:
            self.driver.log.append((self.number, dict(zip(self.indices, values, strict=True))))
        return not self.driver.refuses


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def table(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> AddressTable:
    """Tensor a in nodes 0 and 1, b in node 1."""
    monkeypatch.setattr(kernel_params, "read", lambda graph: [driver.node(number) for number in range(3)])
    monkeypatch.setattr(kernel_params, "executable_of", lambda graph: "executable")
    graph: Any = None
    bindings = AddressTable(graph)
    bindings.begins.update(a=0x1000, b=0x2000)
    bindings.learn([AddressWord(0, 2, "a", 8), AddressWord(1, 0, "a", 0), AddressWord(1, 1, "b", 4)])
    return bindings


def test_only_nodes_of_what_moved_are_set(driver: Driver, table: AddressTable) -> None:
    assert table.bind({"b": 0x5000})
    assert driver.log == [(1, {0: 0x1000, 1: 0x5004})]
    assert table.bind({"a": 0x7000})
    assert driver.log[1:] == [(0, {2: 0x7008}), (1, {0: 0x7000, 1: 0x5004})]


def test_what_no_node_uses_may_be_anywhere(driver: Driver, table: AddressTable) -> None:
    table.begins["c"] = 0x3000
    assert not table.bind({"c": 0x5000})
    table.leave_alone(["c"])
    assert table.knows(["a", "b", "c"])
    assert table.bind({"c": 0x5000, "b": 0x6000})
    assert driver.log == [(1, {0: 0x1000, 1: 0x6004})]
    table.begins["d"] = 0x4000
    table.learn([AddressWord(2, 0, "d", 0)])
    assert table.bind({"c": 0x7000, "d": 0x8000})
    assert driver.log[1:] == [(2, {0: 0x8000})]
    assert table.kernels(["c"]) == []


def test_bound_again_to_the_same_address_is_nothing_to_do(driver: Driver, table: AddressTable) -> None:
    assert table.bind({"b": 0x5000})
    assert table.bind({"b": 0x5000})
    assert len(driver.log) == 1


def test_parameters_of_a_node_are_read_once(driver: Driver, table: AddressTable) -> None:
    for turn in range(20):
        assert table.bind({"b": 0x5000 + 0x1000 * turn})
    assert (len(driver.log), driver.made) == (20, 1)


def test_unknown_and_misaligned_addresses_change_nothing(driver: Driver, table: AddressTable) -> None:
    assert not table.bind({"a": 0x7000, "c": 0x8000})
    assert not table.bind({"b": 0x8000, "a": 0x7000 + 64})
    assert driver.log == []
    assert table.bind({"b": 0x5000})
    assert driver.log == [(1, {0: 0x1000, 1: 0x5004})]


def test_what_is_learned_later_joins_what_is_known(driver: Driver, table: AddressTable) -> None:
    assert table.bind({"a": 0x7000})
    table.begins["c"] = 0x3000
    table.learn([AddressWord(1, 3, "c", 0), AddressWord(2, 0, "c", 16)])
    assert table.knows(["a", "b", "c"])
    driver.log.clear()
    assert table.bind({"c": 0x4000})
    assert driver.log == [(1, {0: 0x7000, 1: 0x2004, 3: 0x4000}), (2, {0: 0x4010})]
    assert table.kernels(["c"]) == ["kernel 1", "kernel 2"]


def test_a_driver_that_refuses_is_an_error_and_not_forgotten(driver: Driver, table: AddressTable) -> None:
    driver.refuses = True
    with pytest.raises(DriverError, match="kernel 1"):
        table.bind({"b": 0x5000})
    driver.refuses = False
    assert table.bind({"b": 0x5000})
    assert driver.log == [(1, {0: 0x1000, 1: 0x5004})]


def test_both_styles_of_launch_are_read_as_one_block() -> None:
    first, second = ctypes.c_uint64(0x1122334455667788), ctypes.c_uint32(7)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(first), ctypes.addressof(second))
    block = kernel_params._from_pointers(ctypes.addressof(pointers), [(0, 8), (16, 4)])
    assert block == struct.pack("<QQI", 0x1122334455667788, 0, 7)
    assert kernel_params._words(block) == (0x1122334455667788, 0, 7)

    buffer, size = ctypes.create_string_buffer(block, len(block)), ctypes.c_size_t(len(block))
    extra = (ctypes.c_void_p * 5)(2, ctypes.addressof(size), 1, ctypes.addressof(buffer), 0)
    assert kernel_params._from_extra(ctypes.addressof(extra)) == block
