"""What a recorder notes of operators is enough: run in any order that the notes allow, they leave the same memory.

The operators run on the CPU, and count as one node each; their tensors are all kept, at the addresses that were noted.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from capture import capture
from capture.api.inspect import state_of
from capture.engines.base import NOTHING_KNOWN
from capture.engines.cuda import graph_edges, kernel_params, recorder, scheduling
from capture.engines.cuda.address_inference import NodeParameters
from capture.engines.cuda.memory_recorder import MemoryNotes, MemoryRecorder
from capture.key.signature import Leaves
from capture.key.tensor_meta import bytes_of
from capture.observe.operator_schema import looked_up, tensors_in, tensors_out
from capture.observe.run import run_watched
from capture.schedule.accesses import Memory, accesses
from capture.schedule.dependencies import dependencies
from tests.support.device import without_default_device
from tests.support.orders import some_order

CPU = torch.device("cpu")
Ran = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class Pool:
    """All memory there is."""

    device = CPU
    stream = None

    def find(self, address: int) -> bool:
        return True

    def parts(self) -> list[tuple[int, int]]:
        return [(0, 1 << 56)]

    def is_taken(self, address: int) -> bool:
        return False


class Host:
    moving: ClassVar[frozenset[str]] = frozenset()
    device_copies: ClassVar[dict[int, Any]] = {}
    constants: ClassVar[list[Any]] = []

    def __init__(self, *_: Any) -> None: ...

    def is_copy(self, tensor: Tensor) -> bool:
        return False

    def note_constant(self, tensor: Tensor) -> None: ...

    def run(self, op: Any, traits: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return looked_up(op)[1](*args, **kwargs)


class Counting(MemoryRecorder):
    """A recorder that counts a node for each operator that makes no view, and can keep the calls."""

    def __init__(self, room: int, *, keeps: bool) -> None:
        super().__init__(Pool(), set(), NOTHING_KNOWN, None, room=room)
        self.nodes = 0
        self.keeps = keeps
        self.ran: list[Ran] = []

    @override
    def _launch(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super()._launch(op, args, kwargs)
        if not looked_up(op)[0].view:
            self.nodes += 1
        if self.keeps and not looked_up(op)[0].view:
            self.ran.append((looked_up(op)[1], args, kwargs, result))
        return result

    @override
    def _taken(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators run on the CPU, and each is a node: no driver is asked."""
    monkeypatch.setattr(recorder, "node_counter", lambda stream: None)
    with without_default_device():
        yield


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counting]:
    monkeypatch.setattr(recorder, "HostTensors", Host)
    monkeypatch.setattr(recorder, "is_capturing", lambda: True)

    def run(
        body: Callable[..., Any], *values: Any, grad: bool = False, room: int = 0, keeps: bool = True
    ) -> Counting:  # fmt: skip
        state, leaves, made = state_of(capture(body)), Leaves(), Counting(room, keeps=keeps)
        made._count = lambda: made.nodes
        state.arguments(values, leaves)
        with torch.set_grad_enabled(grad):
            watched = run_watched(state.call(values, leaves), made, None)
        assert watched.error is None
        return made

    return run


def again(ran: Ran) -> None:
    """Run a call again on the same memory."""
    run, args, kwargs, result = ran
    given = {id(one.untyped_storage()) for one in tensors_in(args, kwargs)}
    for into, out in zip(tensors_out(result), tensors_out(run(*args, **kwargs)), strict=True):
        if id(into.untyped_storage()) not in given:
            into.copy_(out)


def memory_after(ran: list[Ran], order: list[int], storages: list[Any], before: list[Tensor]) -> list[Tensor]:
    for storage, contents in zip(storages, before, strict=True):
        bytes_of(storage).copy_(contents)
    for one in order:
        again(ran[one])
    return [bytes_of(storage).clone() for storage in storages]


def in_place(x: Tensor, out: Tensor) -> Tensor:
    for number, row in enumerate(x.unbind(0)):
        out[number].copy_(row.sin())
    out[1:3].mul_(2)
    out.t()[0].add_(out[:, 1])
    return out.flip(0).cumsum(0)


def lists(x: Tensor, out: Tensor) -> list[Tensor]:
    parts = list(out.split(1))
    torch._foreach_add_(parts, list(x.split(1)), alpha=0.5)
    torch._foreach_mul_(parts[1:], 3.0)
    return [torch.stack(parts).sum(0), *torch._foreach_neg(parts)]


def indexed(x: Tensor, out: Tensor) -> Tensor:
    at = torch.arange(2, device=x.device)
    out[at] = x[at + 1]
    out.index_add_(0, at + 1, x[:2])
    torch.add(out, x, out=out)
    return out.scatter(1, x.argsort(-1), x) + out.sort(-1).values


def branches(x: Tensor, out: Tensor) -> Tensor:
    return torch.stack([functional.gelu(functional.gelu(x @ x.t()) @ out) for _ in range(4)]).mean(0)


def normed(x: Tensor, out: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    first = functional.batch_norm(x, mean, variance, training=True)
    second = functional.batch_norm(out, mean, variance, training=True)
    return first + second + functional.batch_norm(x, mean, variance)


def trained(x: Tensor, out: Tensor) -> Tensor:
    weight = out.detach().clone().requires_grad_()
    loss = (x @ weight.t()).tanh().square().sum() + weight.cos().sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    return gradient


BODIES = {
    "in place": in_place, "lists": lists, "indexed": indexed, "branches": branches, "normed": normed,
    "trained": trained,
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_all_orders_leave_the_same_memory(name: str, record: Callable[..., Counting]) -> None:
    torch.manual_seed(0)
    values = [torch.randn(4, 4, device=CPU), torch.randn(4, 4, device=CPU)]
    if name == "normed":
        values += [torch.zeros(4, device=CPU), torch.ones(4, device=CPU)]
    made = record(BODIES[name], *values, grad=name == "trained")
    ran = made.ran
    tensors = [tensor for _, args, kwargs, out in ran for tensor in (*tensors_in(args, kwargs), *tensors_out(out))]
    storages = list({id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}.values())
    read_storages = {id(value.untyped_storage()) for value in values}
    before = [
        bytes_of(storage).clone() if id(storage) in read_storages else torch.zeros_like(bytes_of(storage))
        for storage in storages
    ]
    operators = made.notes().operators
    schedule = dependencies(accesses([()] * len(ran), operators, Memory([], [], lambda _: None)))
    assert not any(operator.is_barrier for operator in operators)
    with torch.no_grad():
        chain = memory_after(ran, list(range(len(ran))), storages, before)
        for seed in range(6):
            order = some_order(len(ran), schedule.edges, random.Random(seed))
            now = memory_after(ran, order, storages, before)
            assert all(map(torch.equal, now, chain)), order
        backwards = memory_after(ran, list(reversed(range(len(ran)))), storages, before)
        assert not all(map(torch.equal, backwards, chain))


def test_branches_are_found(record: Callable[..., Counting]) -> None:
    made = record(branches, torch.randn(4, 4, device=CPU), torch.randn(4, 4, device=CPU))
    found = dependencies(accesses([()] * len(made.ran), made.notes().operators, Memory([], [], lambda _: None)))
    assert (found.longest, found.width) == (6, 4)


def test_lifetimes(record: Callable[..., Counting]) -> None:
    """Memory lives from the operator that made it to the first one that may have it again."""

    def body(x: Tensor) -> Tensor:
        y = x + 1
        z = y * 2
        del y
        w = z.exp()
        del z
        return w.neg()

    made = record(body, torch.randn(3, device=CPU), keeps=False)
    assert [operator.name for operator in made.notes().operators] == [
        "aten.add.Tensor", "aten.mul.Tensor", "aten.exp.default", "aten.neg.default",
    ]  # fmt: skip
    assert sorted((lifetime.born, lifetime.died) for lifetime in made.notes().lifetimes) == [
        (0, 2),
        (1, 3),
        (2, 4),
        (3, None),
    ]


def test_room_holds_memory_until_more_dies(record: Callable[..., Counting]) -> None:
    """Two results of 12 bytes are held: the third one's end gives the first one's memory back."""

    def body(x: Tensor) -> Tensor:
        for _ in range(5):
            x = x + 1
        return x

    def ends(room: int) -> list[int | None]:
        made = record(body, torch.randn(3, device=CPU), keeps=False, room=room)
        return [one.died for one in sorted(made.notes().lifetimes, key=lambda one: one.born)]

    assert ends(0) == [2, 3, 4, 5, None]
    assert ends(24) == [3, 4, 5, 5, None]
    assert ends(11) == ends(0)


def test_other_memory_for_a_storage_is_refused(record: Callable[..., Counting]) -> None:
    def body(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y.untyped_storage().resize_(12)
        return y.copy_(x)

    assert record(body, torch.randn(3, device=CPU)).notes().unsuited == "the body gives a storage other memory"


class Graph:
    def raw_cuda_graph(self) -> int:
        return 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A driver with a chain of kernels, behind a copy that the capture did not make."""
    told: dict[str, Any] = {"words": [], "data": {}, "edges": None, "set": None}
    plain = graph_edges.PLAIN

    def handles() -> list[int]:
        return list(range(100, 100 + len(told["words"])))

    def edges(_: int) -> list[graph_edges.GraphEdge]:
        chain = [(first, first + 1) for first in handles()[:-1]]
        if told["edges"] is not None:
            chain = told["edges"]
        data = told["data"]
        return [graph_edges.GraphEdge(7, 100), *(graph_edges.GraphEdge(*one, data.get(one, plain)) for one in chain)]

    def nodes(_: Any) -> list[Any]:
        copy = kernel_params.GraphNode(7, NodeParameters("memcpy", (), (1,)), lambda: "memcpy")
        kernels = [
            kernel_params.GraphNode(handle, NodeParameters("kernel", (), tuple(words)), lambda: "kernel")
            for handle, words in zip(handles(), told["words"], strict=True)
        ]
        return [copy, *kernels]

    for name, function in (
        ("missing", lambda: None), ("nodes_of", lambda _: [7, *handles()]), ("edges_of", edges),
        ("is_cooperative", lambda _: False), ("check", lambda _: None), ("block_of", lambda _: None),
        ("set_edges", lambda _, given: told.update(set=given)),
    ):  # fmt: skip
        monkeypatch.setattr(graph_edges, name, function)
    monkeypatch.setattr(kernel_params, "missing", lambda: None)
    monkeypatch.setattr(kernel_params, "read", nodes)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return told


def scheduled(notes: MemoryNotes) -> scheduling.GraphSchedule | str:
    return scheduling.schedule_of(Pool(), Graph(), notes, [7])  # type: ignore[arg-type]


def notes_of(made: Counting) -> tuple[MemoryNotes, list[list[int]]]:
    notes = made.notes()
    return notes, [[begin for begin, _ in (*one.reads, *one.writes)] for one in notes.operators]


def test_a_graph_gets_its_edges(record: Callable[..., Counting], driver: dict[str, Any]) -> None:
    """Copies come before all roots; a kernel that may begin early keeps that where it waits for its neighbour alone."""
    made = record(branches, torch.randn(4, 4, device=CPU), torch.randn(4, 4, device=CPU))
    notes, driver["words"] = notes_of(made)
    early = b"\x01\x00\x01" + bytes(5)
    driver["data"] = {(first, first + 1): early for first in range(100, 100 + len(made.ran) - 1)}
    schedule = scheduled(notes)
    assert isinstance(schedule, scheduling.GraphSchedule)
    edges = {(edge.first, edge.then): edge.data for edge in schedule.by_data}
    roots = {
        node
        for node in range(100, 100 + len(made.ran))
        if not any(then == node and first != 7 for first, then in edges)
    }
    assert {then for first, then in edges if first == 7} == roots
    last = 100 + len(made.ran) - 1
    assert edges[last - 1, last] == early  # the mean of the stack
    assert all(data == graph_edges.PLAIN for (first, then), data in edges.items() if then == last - 1 or first == 7)
    schedule.give_edges("by data")
    assert driver["set"] == schedule.by_data
    schedule.give_edges("recorded")
    assert driver["set"] == schedule.recorded == tuple(graph_edges.edges_of(1))


def test_streams_of_the_body_are_left(record: Callable[..., Counting], driver: dict[str, Any]) -> None:
    notes, driver["words"] = notes_of(record(branches, torch.ones(4, 4, device=CPU), torch.ones(4, 4, device=CPU)))
    driver["edges"] = [(100, 102), (101, 102)]
    assert scheduled(notes) == "the body has streams of its own"
    driver["edges"], notes.unsuited = None, "a reason"
    assert scheduled(notes) == "a reason"


def test_kernels_that_no_operator_names_are_barriers(record: Callable[..., Counting], driver: dict[str, Any]) -> None:
    made = record(branches, torch.ones(4, 4, device=CPU), torch.ones(4, 4, device=CPU))
    notes, driver["words"] = notes_of(made)
    del notes.operators[5]
    found = scheduled(notes)
    assert isinstance(found, scheduling.GraphSchedule)
    assert {(first, 5) for first in range(5)} <= closed(found.dependencies.edges)
    assert {(5, then) for then in range(6, len(made.ran))} <= closed(found.dependencies.edges)


def closed(edges: tuple[tuple[int, int], ...]) -> set[tuple[int, int]]:
    after: dict[int, set[int]] = {}
    for first, then in sorted(edges, reverse=True):
        after.setdefault(first, set()).update({then} | after.get(then, set()))
    return {(first, then) for first, found in after.items() for then in found}


def test_networks_are_noted_without_barriers(record: Callable[..., Counting]) -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3), nn.LayerNorm(3)).to(CPU)
    made = record(lambda x: functional.softmax(net(x), -1), torch.randn(2, 2, 4, 4, device=CPU))
    assert len(made.notes().operators) == len(made.ran)
    assert not any(one.is_barrier for one in made.notes().operators)
