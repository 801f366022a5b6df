"""Numbers that differ from call to call, in the parameters of a graph's kernels.

A recording holds each number as its kernels got it. The body is captured several more times, with its own numbers and
with others; nothing of that runs. What differs between the captures tells where the numbers are (``number_inference``),
and a replay sets them there, in the blocks of parameters in which addresses are set, too (``kernel_params``).

Refused is whatever is not proven: other operators or other nodes with another number, an operator whose results may
follow from the number in other ways than element by element, kernels that no operator tells of.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field
from typing_extensions import override

from capture.core.data import define
from capture.core.interrupts import let_through
from capture.engines.base import Number, NumbersToLift, Refusal, StateTensors
from capture.engines.cuda import graph_edges, kernel_params
from capture.engines.cuda.calibrate import CalibrationSetup, capture_again
from capture.engines.cuda.kernel_params import BytesWriter, GraphNode
from capture.engines.cuda.number_inference import (
    SAME,
    NumberPlace,
    NumberRefusal,
    NumberSample,
    NumberUse,
    infer_numbers,
    is_normal,
)
from capture.engines.cuda.pool import CudaPool
from capture.engines.cuda.recorder import GraphRecorder
from capture.native import native
from capture.observe.operator_schema import Operator, looked_up, number_arguments, tensors_in, tensors_out
from capture.torch_private import cuda

_SHARES = (0.7390851332151607, 0.6180339887498949, 0.9159655941772190, 0.5671432904097838, 0.8346268416740731)
"""By which a number is multiplied for a further capture: it keeps its sign, and its side of one; no two numbers get the
same share in a capture. All digits of such a product count."""
_STEPS = (259, 278, 301, 322, 345)
"""Added to a whole number for a further capture. The sums have more digits than bfloat16 holds, in one capture at
least, and what is computed of a count, as ``1 - beta**t``, is not yet the same for all of them."""
_CAPTURES = 3
_NEARER = (1.0, 0.25, 1 / 16, 1 / 64, -0.25, -1 / 16, -1 / 64)
"""Shares of the way to such numbers, for bodies that compare theirs: others have the same answers only nearby."""
_LESS = 12  # by how much steps of whole numbers may be shorter: of 12 in a row one has the remainder that is asked for
_STEPS_NEARBY = tuple(by * sign for by in range(1, 25) for sign in (1, -1))
_FILLINGS = (0, 0xA5, 0x3C, 0xFF, 0x11, 0x5A)
"""Of the captures with the same numbers. Those past ``SAME`` are made where something may have been left by chance, and
then those with other numbers once more."""


def other_numbers(
    numbers: Sequence[Number], may_be: Callable[[Sequence[Number]], bool] = lambda _: True
) -> list[tuple[Number, ...]] | None:
    """Numbers for further captures, each another one in each. ``may_be``: whether the body goes the same way with them.
    None where all that were tried are others: they come nearer, and whole ones one by one, as of those with the same
    remainder."""
    found: list[tuple[Number, ...]] = []
    for turn in range(_CAPTURES):
        far = (_others(numbers, turn, nearer, less) for nearer in _NEARER for less in range(_LESS))
        tried = itertools.chain(far, (_neighbours(numbers, turn, by) for by in _STEPS_NEARBY))
        others = next((one for one in tried if _are_other(one, numbers) and one not in found and may_be(one)), None)
        if others is None:
            return None
        found.append(others)
    return found


def _others(numbers: Sequence[Number], turn: int, nearer: float, less: int) -> tuple[Number, ...]:
    return tuple(
        number + int((_STEPS[(turn + at) % len(_STEPS)] - less) * nearer) * (-1 if number < 0 else 1)
        if type(number) is int
        else number * (1 + (_SHARES[(turn + at) % len(_SHARES)] / (1 + at // len(_SHARES)) - 1) * nearer)
        for at, number in enumerate(numbers)
    )  # fmt: skip


def _neighbours(numbers: Sequence[Number], turn: int, by: int) -> tuple[Number, ...]:
    return tuple(
        number + by + at if type(number) is int else number * (1 + by * _SHARES[(turn + at) % len(_SHARES)] / 1024)
        for at, number in enumerate(numbers)
    )


def _are_other(others: Sequence[Number], numbers: Sequence[Number]) -> bool:
    return all(one != number for one, number in zip(others, numbers, strict=True))


class NumberRecorder(GraphRecorder):
    """A recorder that notes which operators get these numbers, and the nodes that they launch."""

    def __init__(
        self, pool: CudaPool, registered: set[int], state: StateTensors, numbers: Sequence[Number], filling: int
    ) -> None:  # fmt: skip
        """``filling``: what operators find on the stack where they write nothing. Without that it would be what was
        there last, numbers and their texts among it, which differs from capture to capture as numbers do."""
        super().__init__(pool, registered, state)
        self._filling = filling
        self._numbers = {(type(number), number): at for at, number in reversed(list(enumerate(numbers)))}
        self.uses: list[NumberUse] = []
        self.kinds: set[torch.dtype] = set()
        """Of the tensors that these operators get and give."""
        self.obstacle: str | None = None

    @override
    def execute(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [(place, number) for place, value in (*enumerate(args), *kwargs.items())
                 for number in self._among(value)]  # fmt: skip
        native.fill_stack(self._filling)
        if not given:
            return super().execute(op, args, kwargs)
        first = self._count() if self._count is not None else -1
        result = super().execute(op, args, kwargs)
        tensors, made = tensors_in(args, kwargs), tensors_out(result)
        name = looked_up(op)[0].name
        if first < 0 or self._nodes < first:
            self.obstacle = "nodes cannot be counted"
        elif not {place for place, _ in given} <= number_arguments(op):
            self.obstacle = f"results of {name} may follow from a number in any way"
        elif any(tensor.device != self.device for tensor in (*tensors, *made)):
            self.obstacle = f"{name} gets a number on the host"
        elif first == self._nodes and any(tensor.numel() for tensor in made):
            self.obstacle = f"{name} launches nothing"
        index = len(self.trace.sequence)
        self.uses += [NumberUse(index, name, number, first, self._nodes) for _, number in given]
        self.kinds |= {tensor.dtype for tensor in (*tensors, *made)}
        return result

    def _among(self, value: Any) -> list[int]:
        if isinstance(value, (list, tuple)):
            return [number for member in value for number in self._among(member)]
        kind = type(value)
        return [self._numbers[kind, value]] if (kind is float or kind is int) and (kind, value) in self._numbers else []


@define(eq=False)
class _Sample:
    """One further capture: what it launched, and what its operators got."""

    launched: NumberSample
    uses: list[NumberUse]
    kinds: set[torch.dtype]
    sequence: Sequence[str]
    scalars: Sequence[tuple[str, ...]]


def learn_numbers(
    pool: CudaPool, nodes: Sequence[GraphNode], made: CalibrationSetup, numbers: NumbersToLift,
    graph: torch.cuda.CUDAGraph,
) -> GraphNumbers | Refusal:  # fmt: skip
    """The numbers of a recording, or why they stay as they were recorded."""
    samples: list[_Sample] = []

    def capture(of_call: tuple[Number, ...], at: int, filling: int = 0) -> Refusal | None:
        """One more sample, in this place."""
        given = numbers.given(of_call)
        if given is None:
            return Refusal("Python cannot compute what operators get")
        if of_call is numbers.then and not all(map(is_normal, given)):
            return None
        call, generators = numbers.again(of_call)
        recorded: list[_Sample] = []
        refusal = capture_again(
            pool, made, call, generators, functools.partial(_recorder, pool, made, tuple(given), filling),
            functools.partial(_read, pool, recorded, tuple(given), of_call in unlike),
        )  # fmt: skip
        samples[at:at] = recorded
        return refusal

    found = other_numbers(numbers.now, numbers.may_be)
    if found is None:
        return Refusal("no other numbers were found with which the body goes the same way")
    same, unlike = SAME, found
    again = [tuple(n * 1.0 if type(n) is float else n for n in numbers.now) for _ in _FILLINGS]  # at other addresses
    for at, of_call in enumerate((numbers.now, *again[: same - 1], *unlike, numbers.then)):
        if (refusal := capture(of_call, len(samples), _FILLINGS[at] if at < same else 0)) is not None:
            return refusal
    others = samples[same : same + _CAPTURES]  # not those whose numbers may be equal to others in the body
    uses = others[0].uses
    if any(sample.uses != uses for sample in others):
        return Refusal("operators get the numbers otherwise in another capture")
    difference = next((text for sample in samples[1:] if (text := _difference(samples[0], sample, uses))), None)
    if difference is not None:
        return Refusal(difference)
    smallest = min([4, *[kind.itemsize for sample in others for kind in sample.kinds]])  # no operator may get any
    words = [node.words for node in nodes]
    places = infer_numbers(words, [sample.launched for sample in samples], uses, smallest, same)
    more = [*again[same:], *unlike]
    while isinstance(places, NumberRefusal) and places.may_be_left and more:
        of_call = more.pop(0)
        at = len(samples) if of_call in unlike else same
        if (refusal := capture(of_call, at, _FILLINGS[at] if at == same else _FILLINGS[-1])) is not None:
            return refusal
        same += at == same
        places = infer_numbers(words, [sample.launched for sample in samples], uses, smallest, same)
    if isinstance(places, NumberRefusal):
        return Refusal(places.reason, kernel=None if places.node is None else nodes[places.node].name())
    make = functools.partial(GraphNumbers, pool, graph)
    return _lifted(make, nodes, places, uses, others[0].kinds, [sample.launched for sample in samples])


def _lifted(
    make: Callable[..., GraphNumbers], nodes: Sequence[GraphNode], places: Sequence[NumberPlace],
    uses: Sequence[NumberUse], kinds: set[torch.dtype], samples: Sequence[NumberSample],
) -> GraphNumbers | Refusal:  # fmt: skip
    """``make``: of the graph. The first of the samples has the recording's own numbers."""
    used = tuple(sorted({use.number for use in uses}))
    alike = _alike(used, samples)
    powers = frozenset(used.index(use.number) for use in uses if "pow" in use.name)
    of_used = tuple(evolve(place, number=used.index(place.number)) for place in places)
    own = tuple(samples[0].numbers[number] for number in used)
    taken = (*used, *(number for _, number in alike))
    lifted = make(of_used, nodes, taken, powers, kinds, own, tuple(at for at, _ in alike))
    fits = lifted.takes([samples[0].numbers[number] for number in taken])
    return lifted if fits else Refusal("the numbers are too large or too small")


def _alike(used: Sequence[int], samples: Sequence[NumberSample]) -> list[tuple[int, int]]:
    """Numbers that were equal to one of the used ones in every capture: which one of those, and the other."""

    def told(number: int) -> list[tuple[type, str]]:
        return [_typed_text(sample.numbers[number]) for sample in samples]

    texts = {number: told(number) for number in range(len(samples[0].numbers))}
    return [
        (at, earlier)
        for at, number in enumerate(used)
        for earlier in texts if earlier not in used and texts[earlier] == texts[number]
    ]  # fmt: skip


def _recorder(
    pool: CudaPool, made: CalibrationSetup, values: Sequence[Number], filling: int, registered: set[int]
) -> NumberRecorder:  # fmt: skip
    return NumberRecorder(pool, registered, made.state, values, filling)


def _read(
    pool: CudaPool, samples: list[_Sample], values: tuple[Number, ...], are_unlike: bool,
    graph: torch.cuda.CUDAGraph, recorder: NumberRecorder,
) -> Refusal | None:  # fmt: skip
    """``are_unlike``: no other number of the body, such as a size, is one of these."""
    if recorder.unseen or (recorder.obstacle is not None and are_unlike):
        return Refusal(recorder.obstacle or "kernels that no operator tells of were launched")
    try:
        with torch.cuda.device(pool.device):
            nodes = kernel_params.read(graph)
            if len(nodes) != len(graph_edges.nodes_of(int(graph.raw_cuda_graph()))):
                return Refusal("the graph has graphs inside")
    except kernel_params.DriverError as error:
        return Refusal(f"its parameters cannot be read: {error}")
    pool.find(0)  # refreshes the list of the pool's segments, which may be others in the next capture
    parts = tuple(pool.parts())
    is_own = lambda address: any(begin <= address < end for begin, end in parts)  # noqa: E731
    launched = NumberSample(values, [node.words for node in nodes], is_own, _host_memory())
    trace = recorder.trace
    samples.append(_Sample(launched, recorder.uses, recorder.kinds, list(trace.sequence), list(trace.scalars)))
    return None


def _host_memory() -> Callable[[int], bool]:
    """Tells addresses of the heaps, stacks and libraries of this process, as the system knows them. Not of a device's
    memory, which is there, too, but cannot be read, or of memory that is shared with a device."""
    bounds: list[int] = []
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, access, _, _, _, *name = line.split(maxsplit=5)
            if access.startswith("r") and access.endswith("p") and not "".join(name).startswith("/dev/"):
                bounds += [int(address, 16) for address in addresses.split("-")]
    except (OSError, ValueError) as error:
        let_through(error)
        return lambda _: False
    return lambda address: bisect.bisect_right(bounds, address) & 1 == 1


def _difference(first: _Sample, second: _Sample, uses: Sequence[NumberUse]) -> str | None:
    """What operators did otherwise with other numbers, but for getting those."""
    if first.sequence != second.sequence:
        return "other operators run with another number"
    given: dict[int, int] = {}
    for use in uses:
        given[use.operator] = given.get(use.operator, 0) + 1
    for at, (texts, again) in enumerate(zip(first.scalars, second.scalars, strict=True)):
        if texts != again:
            differing = sum(a != b for a, b in zip(texts, again, strict=False))
            if len(texts) != len(again) or differing > given.get(at, 0):
                return f"{first.sequence[at]} gets what was computed from a number"
    return None


def _typed_text(value: Number) -> tuple[type, str]:
    return type(value), repr(value)


@define(eq=False)
class _Slot:
    """A node with numbers. ``at``: what stands in its places in the graph that is launched; None if that is unknown."""

    node: GraphNode
    places: list[NumberPlace]
    recorded: tuple[bytes, ...]
    at: tuple[bytes, ...] | None
    _writer: BytesWriter | None = None

    def set(self, executable: Any, wanted: tuple[bytes, ...]) -> bool:
        """Put these there. False if the driver refuses."""
        if wanted == self.at:
            return True
        if self._writer is None:
            self._writer = self.node.bytes_editor([place.offset for place in self.places])
        self.at = None
        if not self._writer.set(executable, wanted):
            return False
        self.at = wanted
        return True


@define(eq=False)
class GraphNumbers:
    """Implements ``capture.engines.base.LiftedNumbers`` for one graph."""

    _pool: CudaPool
    _graph: torch.cuda.CUDAGraph
    _places: tuple[NumberPlace, ...]
    _nodes: Sequence[GraphNode]
    used: tuple[int, ...]
    powers: frozenset[int]
    _kinds: set[torch.dtype]
    _recorded: tuple[Number, ...]
    """The numbers that the graph was captured with."""
    _alike: tuple[int, ...] = ()
    """Numbers that could not be told apart from others follow those; which ones they are like."""
    _next: tuple[tuple[Number, ...], list[tuple[bytes, ...]]] | None = field(default=None, init=False)
    """The numbers that were asked for last, and what stands for them in each node."""
    _now: tuple[Number, ...] | None = field(init=False)
    """Those that it has now; None while some of them are set."""
    _slots: list[_Slot] = field(init=False)
    _executable: Any = None

    def __attrs_post_init__(self) -> None:
        self._now, by_node = self._recorded, dict[int, list[NumberPlace]]()
        for place in self._places:
            by_node.setdefault(place.node, []).append(place)
        self._slots = []
        for node, places in by_node.items():
            recorded = self._wanted(places, self._recorded)
            assert recorded is not None
            self._slots.append(_Slot(self._nodes[node], places, recorded, recorded))

    @staticmethod
    def _wanted(places: Sequence[NumberPlace], values: Sequence[Number]) -> tuple[bytes, ...] | None:
        wanted = []
        for place in places:
            encoded = place.encoded(values[place.number])
            if encoded is None:
                return None
            wanted.append(encoded)
        return tuple(wanted)

    def takes(self, values: Sequence[Number]) -> bool:
        """Whether all bytes of these numbers are known, and no type of the operators flushes or overflows them."""
        values, others = values[: len(self._recorded)], values[len(self._recorded) :]
        if any(
            _typed_text(values[at]) != _typed_text(earlier) for at, earlier in zip(self._alike, others, strict=True)
        ):
            return False
        for value, recorded in zip(values, self._recorded, strict=True):
            is_other = type(value) is not type(recorded) or (type(value) is int and (value < 0) != (recorded < 0))
            if is_other or not is_normal(value):
                return False
            if torch.float16 in self._kinds and not is_normal(value, 2.0**-14, 65504.0):
                return False
        return self._encode(tuple(values))

    def _encode(self, values: tuple[Number, ...]) -> bool:
        wanted = [self._wanted(slot.places, values) for slot in self._slots]
        known = [one for one in wanted if one is not None]
        self._next = (values, known) if len(known) == len(wanted) else None
        return self._next is not None

    def put(self, values: Sequence[Number]) -> bool:
        """See ``LiftedNumbers.put``."""
        values = values[: len(self._recorded)]
        if tuple(values) == self._now:
            return True
        self._now = None
        if not self._set(values):
            return False
        self._now = tuple(values)
        return True

    def _set(self, values: Sequence[Number]) -> bool:
        values = tuple(values)
        if (self._next is None or self._next[0] != values) and not self._encode(values):
            return False
        assert self._next is not None
        wanted = self._next[1]
        if cuda.current_device() == self._pool.index:
            return self._set_here(wanted)
        with torch.cuda.device(self._pool.device):
            return self._set_here(wanted)

    def _set_here(self, wanted: Sequence[tuple[bytes, ...]]) -> bool:
        if self._executable is None:
            self._use_executable()
        executable = self._executable
        return all(slot.set(executable, one) for slot, one in zip(self._slots, wanted, strict=True))

    def _use_executable(self) -> None:
        """Set numbers in the graph that was instantiated last, once that is on the device. It has the recorded ones."""
        self._executable = kernel_params.executable_of(self._graph)
        graph_edges.upload(int(self._executable), cuda.raw_stream(self._pool.index))
        for slot in self._slots:
            slot.at = slot.recorded

    def follow(self) -> None:
        """The graph was instantiated again, maybe in the middle of a call: give it that call's numbers."""
        self._executable = None
        if self._now is not None and not self._set(self._now):
            self._now = None
            raise kernel_params.DriverError("the driver takes no other parameters")
