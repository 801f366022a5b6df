"""Where a graph's kernels hold a number, from parameters that were made up, and how another one gets there."""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import define, field

from capture.engines.cuda import graph_edges, kernel_params, lifting
from capture.engines.cuda.address_inference import NodeParameters
from capture.engines.cuda.kernel_params import GraphNode
from capture.engines.cuda.lifting import GraphNumbers, other_numbers
from capture.engines.cuda.number_inference import (
    SAME,
    Number,
    NumberPlace,
    NumberRefusal,
    NumberSample,
    NumberUse,
    encode,
    infer_numbers,
)
from capture.native import native

Make = Callable[..., bytes]
ADDRESS = 0x7F00_0000_1000
OWN = 0x7E00_0000_0000
"""Addresses from here on are memory that may be elsewhere in each capture."""


def is_own(address: int) -> bool:
    return OWN <= address < OWN + 0x10000


def parameters(block: bytes, same: object = "kernel") -> NodeParameters:
    return NodeParameters("kernel", (same, len(block)), struct.unpack(f"<{len(block) // 8}Q", block))


def found(
    make: Make, numbers: Sequence[Number], *, uses: Sequence[NumberUse] | None = None, same: Callable[..., object] = str
) -> list[NumberPlace] | NumberRefusal:
    """What is inferred of one kernel whose block of parameters is made of the numbers."""
    own = tuple(numbers)
    every = [own] * SAME + (other_numbers(own) or [])
    samples = [NumberSample(tried, [parameters(make(*tried), same())], is_own) for tried in every]
    default = [NumberUse(0, "aten.mul.Tensor", at, 0, 1) for at in range(len(own))]
    return infer_numbers([parameters(make(*own), same())], samples, default if uses is None else uses)


FORMS: dict[str, Make] = {
    "float32 behind a count": lambda v: struct.pack("<ifQ", 640, v, ADDRESS),
    "float32 at the begin": lambda v: struct.pack("<fiQ", v, 640, ADDRESS),
    "float64": lambda v: struct.pack("<Qd", ADDRESS, v),
    "negative": lambda v: struct.pack("<Qff", ADDRESS, -v, 1.0),
    "inverse": lambda v: struct.pack("<Qff", ADDRESS, 1.0 / struct.unpack("<f", struct.pack("<f", v))[0], 1.0),
    "half": lambda v: struct.pack("<QeHI", ADDRESS, v, 3, 4),
    "twice": lambda v: struct.pack("<ddQ", v, -v, ADDRESS),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_number_is_found_and_another_one_put_there(form: str) -> None:
    make = FORMS[form]
    for own in (0.1, 0.3, -3.7, 0.0123):
        places = found(make, [own])
        assert isinstance(places, list)
        for new in (0.7, -11.25, 3.0, 0.25):
            block = bytearray(make(own))
            for place in places:
                encoded = place.encoded(new)
                assert encoded is not None
                block[place.offset : place.offset + place.size] = encoded
            assert block == make(new)


def test_bfloat16_as_torch_rounds() -> None:
    torch = pytest.importorskip("torch")
    draw = random.Random(3)
    for _ in range(300):
        value = draw.uniform(-8, 8) * 10.0 ** draw.randint(-20, 20)
        expected = torch.tensor(value, dtype=torch.bfloat16, device="cpu").view(torch.int16).item() & 0xFFFF
        assert encode("v as bfloat16", value) == struct.pack("<H", expected)
        single = torch.tensor(value, dtype=torch.float32, device="cpu")
        assert encode("1 / v as float32", value) == struct.pack("<f", (1 / single).item())


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 1e39, float("nan"), float("inf"), 0])
def test_numbers_that_are_flushed_or_overflow_have_no_form(value: Number) -> None:
    for form in ("v as float32", "-v as float64", "1 / v as float32", "v as bfloat16", "v as float16", "v as int32"):
        assert encode(form, value) is None


def test_whole_numbers() -> None:
    every: list[Make] = [
        lambda k: struct.pack("<Qii", ADDRESS, k, 7), lambda k: struct.pack("<Qq", ADDRESS, k),
        lambda k: struct.pack("<Qfi", ADDRESS, k, 7), lambda k: struct.pack("<Qd", ADDRESS, -k),
    ]  # fmt: skip
    for make in every:
        places = found(make, [5])
        assert isinstance(places, list)
        (place,) = places
        for new in (6, 300, 70001):
            block = bytearray(make(5))
            encoded = place.encoded(new)
            assert encoded is not None
            block[place.offset : place.offset + place.size] = encoded
            assert block == make(new)


def test_several_numbers_are_told_apart_where_they_are_equal() -> None:
    places = found(lambda a, b: struct.pack("<ffQ", b, a, ADDRESS), [0.1, 0.1])
    assert isinstance(places, list)
    assert {(one.offset, one.number) for one in places} == {(0, 1), (4, 0)}


REFUSED: dict[str, tuple[Make, str]] = {
    "computed by the host": (lambda v: struct.pack("<ffQ", v, 1 - v, ADDRESS), "unknown way"),
    "rounded to a whole": (lambda v: struct.pack("<fiQ", 2.0, round(v * 100), ADDRESS), "unknown way"),
    "nowhere": (lambda v: struct.pack("<ffQ", 1.0, 2.0, ADDRESS), "holds its number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_number_itself_is_refused(case: str) -> None:
    make, reason = REFUSED[case]
    refusal = found(make, [0.3])
    assert isinstance(refusal, NumberRefusal)
    assert reason in refusal.reason


def test_other_launches_are_refused() -> None:
    count = iter(range(100))
    refusal = found(FORMS["float64"], [0.3], same=lambda: f"grid {next(count)}")
    assert isinstance(refusal, NumberRefusal)
    assert "something else" in refusal.reason


def test_gaps_and_addresses_may_differ_where_they_do_for_equal_numbers() -> None:
    draw = random.Random(5)
    places = found(lambda v: struct.pack("<fIQ", v, draw.getrandbits(32), draw.getrandbits(48)), [0.3])
    assert isinstance(places, list)
    assert [(one.offset, one.size) for one in places] == [(0, 4)]


def test_own_memory_may_be_elsewhere_in_each_capture() -> None:
    places = found(lambda v: struct.pack("<ffQ", v, 1.0, OWN + int(abs(v) * 1000) * 8), [0.3])
    assert isinstance(places, list)
    assert [(one.offset, one.size) for one in places] == [(0, 4)]
    elsewhere = found(lambda v: struct.pack("<ffQ", v, 1.0, ADDRESS + int(abs(v) * 1000) * 8), [0.3])
    assert isinstance(elsewhere, NumberRefusal)


HEAP, STACK, DEVICE_MEMORY = 0x25FA_3E70, 0x7FFE_0DAD_E820, 0x7F12_3400_0000


def is_host(address: int) -> bool:
    return HEAP - 0x100000 <= address < HEAP + 0x100000 or STACK - 0x10000 <= address < STACK + 0x10000


@pytest.mark.parametrize(
    ("words", "smallest", "is_taken"),
    [
        ([HEAP, HEAP + 0x40, HEAP, HEAP + 0x10000, HEAP + 0x20000, HEAP, HEAP], 1, True),
        ([HEAP, HEAP, HEAP, HEAP + 0x10000, HEAP + 0x20000, HEAP, HEAP], 1, False),  # as a number may
        ([0, 0, 0, STACK, 0, 0, STACK - 0x80], 1, True),
        ([DEVICE_MEMORY, DEVICE_MEMORY, DEVICE_MEMORY, DEVICE_MEMORY + 512, 0, 0, 0], 4, False),
        ([0, 0x100, 0, 0x50, 0x40, 0x10, 0], 4, True),
        ([0, 0x100, 0, 0x50, 0x40, 0x10, 0], 1, False),  # a number of one byte may stand beside the gap
        ([0, 0, 0, 0x50, 0x40, 0x10, 0], 4, False),
    ],
)
def test_what_the_stack_held_is_no_number(words: list[int], smallest: int, is_taken: bool) -> None:
    own = (0.3,)
    every = [own] * SAME + (other_numbers(own) or [])
    blocks = [struct.pack("<QfIQ", ADDRESS, tried[0], 640, word) for tried, word in zip(every, words[:6], strict=True)]
    samples = [
        NumberSample(tried, [parameters(block)], is_own, is_host) for tried, block in zip(every, blocks, strict=True)
    ]
    recorded = parameters(struct.pack("<QfIQ", ADDRESS, 0.3, 640, words[6]))
    places = infer_numbers([recorded], samples, [NumberUse(0, "aten.mul.Tensor", 0, 0, 1)], smallest)
    assert isinstance(places, list) == is_taken, places


def test_memory_of_the_host_is_told_by_the_system() -> None:
    tells = lifting._host_memory()
    assert tells(id(object()))
    assert not tells(0x10)
    assert not tells(1 << 60)


def test_the_stack_is_filled_with_a_byte() -> None:
    for byte in (0, 0xA5, -1):
        native.fill_stack(byte)
    with pytest.raises(TypeError):
        native.fill_stack("0")


def test_what_is_left_by_chance_may_show_in_a_capture_with_other_numbers() -> None:
    """A byte that was the same in all captures but one, and differs where that one is made again, follows no number."""
    own = (0.3,)
    every = [*[own] * SAME, *(other_numbers(own) or ())]
    left = [5] * len(every)
    left[SAME + 1] = 0

    def infer() -> list[NumberPlace] | NumberRefusal:
        blocks = [struct.pack("<Qfi", ADDRESS, *tried, by) for tried, by in zip(every, left, strict=True)]
        samples = [NumberSample(tried, [parameters(block)], is_own) for tried, block in zip(every, blocks, strict=True)]
        return infer_numbers([parameters(blocks[0])], samples, [NumberUse(0, "aten.mul.Tensor", 0, 0, 1)], 4)

    refused = infer()
    assert isinstance(refused, NumberRefusal)
    assert refused.may_be_left
    for again in range(SAME, SAME + 3):
        every.append(every[again])
        left.append(5)
    places = infer()
    assert isinstance(places, list)
    assert [(place.offset, place.size) for place in places] == [(8, 4)]
    left[-2] = 0  # the same as before: it may be the number's
    assert isinstance(infer(), NumberRefusal)


@pytest.mark.parametrize(
    ("own", "may_be"),
    [((0.3,), lambda at: 0.25 < at[0] < 0.35), ((7,), lambda at: at[0] % 3 == 1), ((7, 0.3), lambda at: at[0] < 30),
     ((7,), lambda at: at[0] < 12),
     ((-2.0, 4), lambda at: at[0] < -1.9 and at[1] > 0)],
)  # fmt: skip
def test_other_numbers_with_which_the_body_goes_the_same_way(own: tuple[Number, ...], may_be: Any) -> None:
    others = other_numbers(own, may_be)
    assert others is not None
    assert all(map(may_be, others))
    for numbers in (others, [*others, own]):
        assert all(len(set(column)) == len(numbers) for column in zip(*numbers, strict=True))
    assert other_numbers(own, lambda _: False) is None


def test_an_operator_without_nodes_needs_no_place() -> None:
    uses = [NumberUse(0, "aten.mul.Tensor", 0, 0, 1), NumberUse(1, "aten.add.Tensor", 0, 1, 1)]
    assert isinstance(found(FORMS["float64"], [0.3], uses=uses), list)


# ---- in an executable graph


@define(eq=False)
class Graph:
    """Kernels as a driver has them: one block each, and a log of what was set."""

    blocks: list[bytearray]
    recorded: list[bytes] = field(init=False)
    executable: int = 1
    log: list[int] = field(factory=list)
    uploads: list[tuple[int, int]] = field(factory=list)
    refuses: bool = False

    def __attrs_post_init__(self) -> None:
        self.recorded = [bytes(one) for one in self.blocks]

    def instantiate(self) -> None:
        self.executable += 1
        self.blocks[:] = map(bytearray, self.recorded)

    def nodes(self) -> list[GraphNode]:
        makes: list[Any] = [functools.partial(_Block, self, at) for at in range(len(self.blocks))]
        read = [parameters(bytes(one)) for one in self.blocks]
        return [GraphNode(None, one, lambda: "a kernel", None, make) for one, make in zip(read, makes, strict=True)]


class _Block:
    def __init__(self, graph: Graph, at: int) -> None:
        self.graph, self.at, self.buffer = graph, at, bytearray(graph.recorded[at])

    def write(self, offset: int, value: bytes) -> None:
        self.buffer[offset : offset + len(value)] = value

    def apply(self, executable: Any) -> bool:
        assert executable == self.graph.executable
        assert self.graph.uploads
        assert self.graph.uploads[-1][0] == executable
        if not self.graph.refuses:
            self.graph.blocks[self.at][:] = self.buffer
            self.graph.log.append(self.at)
        return not self.graph.refuses


def blocks(v: float) -> list[bytes]:
    return [struct.pack("<ifQ", 64, v, ADDRESS), struct.pack("<QQ", 1, 2), struct.pack("<dQ", -v, ADDRESS)]


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    one = Graph(list(map(bytearray, blocks(0.3))))
    monkeypatch.setattr(kernel_params, "executable_of", lambda graph: graph.executable)
    monkeypatch.setattr(graph_edges, "upload", lambda executable, stream: one.uploads.append((executable, stream)))
    monkeypatch.setattr("capture.engines.cuda.lifting.torch.cuda.device", lambda device: _Nothing())
    monkeypatch.setattr("capture.engines.cuda.lifting.cuda.raw_stream", lambda index: 0)
    monkeypatch.setattr("capture.engines.cuda.lifting.cuda.current_device", lambda: 0)
    return one


class _Nothing:
    device, index = None, 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def lifted(graph: Graph) -> GraphNumbers:
    own = (0.3,)
    every = [own] * SAME + (other_numbers(own) or [])
    samples = [NumberSample(tried, [parameters(block) for block in blocks(*tried)], is_own) for tried in every]
    uses = [NumberUse(0, "aten.mul.Tensor", 0, 0, 1), NumberUse(1, "aten.sub.Tensor", 0, 2, 3)]
    nodes = graph.nodes()
    places = infer_numbers([node.words for node in nodes], samples, uses)
    assert isinstance(places, list)
    made: Any = GraphNumbers
    numbers: GraphNumbers = made(_Nothing(), graph, tuple(places), nodes, (0,), frozenset(), set(), own)
    return numbers


def test_only_nodes_with_numbers_are_set_and_only_when_they_change(graph: Graph) -> None:
    numbers = lifted(graph)
    assert numbers.put([0.3])
    assert graph.log == []
    assert numbers.put([0.7])
    assert graph.blocks == list(map(bytearray, blocks(0.7)))
    assert numbers.put([0.7])
    assert graph.log == [0, 2]
    assert len(graph.uploads) == 1
    assert numbers.put([0.3])
    assert graph.blocks == list(map(bytearray, blocks(0.3)))


def test_a_graph_that_is_instantiated_again_gets_the_numbers_of_the_call(graph: Graph) -> None:
    numbers = lifted(graph)
    assert numbers.put([0.7])
    graph.instantiate()
    numbers.follow()
    assert graph.blocks == list(map(bytearray, blocks(0.7)))
    assert numbers.put([0.11])
    assert graph.blocks == list(map(bytearray, blocks(0.11)))


def test_a_driver_that_refuses_is_told(graph: Graph) -> None:
    numbers = lifted(graph)
    graph.refuses = True
    assert not numbers.put([0.7])
    graph.refuses = False
    assert numbers.put([0.7])
    assert graph.blocks == list(map(bytearray, blocks(0.7)))


def test_numbers_that_no_type_holds_in_full_are_not_taken(graph: Graph) -> None:
    numbers = lifted(graph)
    assert numbers.takes([0.7])
    for value in (0.0, 1e-40, 1e39, float("inf"), float("nan"), 3):
        assert not numbers.takes([value])
