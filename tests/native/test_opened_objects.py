"""Objects of libraries that C opens: graphs whose parts lead back to them, caches, tensors with attributes."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from capture.api.decorator import captured_states
from capture.key import objects
from tests.support.device import DEVICE
from tests.support.fast_paths import fresh as fresh
from tests.support.fast_paths import goes_straight

EDGE = ("author", "writes", "paper")


class Mode(enum.Enum):
    FIRST = 1
    SECOND = 2


class Store:
    """What a graph keeps of one kind of node."""

    __slots__ = ("parent", "values")

    def __init__(self, parent: Any, values: Any) -> None:
        self.parent, self.values = weakref.ref(parent), values


class Graph:
    def __init__(self) -> None:
        self.kind: type = Graph
        self.mode = Mode.FIRST
        self.edges: dict[Any, Tensor] = {EDGE: tensor()}
        self.store = Store(self, tensor())
        self.beside = Store(self.store.values, None)


class Layer:
    """Memory for one layer that is made by the first call, as caches of transformers do."""

    def __init__(self) -> None:
        self.is_there, self.length = False, 0
        self.keys: Any = None

    def update(self, x: Tensor) -> Tensor:
        if not self.is_there:
            self.keys, self.is_there = torch.zeros_like(x), True
            self.keys.note = "static"
        found: Tensor = self.keys.add_(x)
        return found


class Cache:
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]


def tensor() -> Tensor:
    return torch.randn(3, device=DEVICE)


@pytest.fixture(autouse=True)
def opened() -> None:
    objects.opened.update({Graph, Store, Layer, Cache})


def of_graph(graph: Any) -> Tensor:
    found: Tensor = graph.store.values * 2 + sum(graph.edges.values())
    if graph.store.parent() is not graph:
        found = found + 1
    if graph.mode is Mode.SECOND:
        found = found * 3
    return found if graph.kind is Graph and EDGE in graph.edges else -found


def _lone() -> Graph:
    graph = Graph()
    graph.beside = Store(graph, None)
    return graph


def _other(change: Callable[[Graph], object]) -> Graph:
    graph = _lone()
    change(graph)
    return graph


OTHER: Graph = Graph()
CHANGES: dict[str, Callable[[Graph], object]] = {
    "the parent": lambda graph: setattr(graph.store, "parent", weakref.ref(OTHER)),
    "no parent": lambda graph: setattr(graph.store, "parent", weakref.ref(Graph())),
    "a part for the whole": lambda graph: setattr(graph.store, "parent", weakref.ref(graph.edges[EDGE])),
    "a member of an enumeration": lambda graph: setattr(graph, "mode", Mode.SECOND),
    "a class": lambda graph: setattr(graph, "kind", Store),
    "the key of an edge": lambda graph: graph.edges.update({(*EDGE, "too"): graph.edges.pop(EDGE)}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_object_whose_parts_lead_back_to_it(change: str) -> None:
    run = capture(of_graph)
    with torch.no_grad():
        for _ in range(4):
            graph = _lone()
            assert torch.equal(run(graph), of_graph(graph))
        assert goes_straight(run, _lone())
        for _ in range(4):
            other = _other(CHANGES[change])
            assert torch.equal(run(other), of_graph(other))
            graph = _lone()
            assert torch.equal(run(graph), of_graph(graph))
        assert goes_straight(run, _lone())


def test_a_reference_to_what_was_not_met_goes_the_general_way() -> None:
    run = capture(of_graph)
    with torch.no_grad():
        for _ in range(6):
            graph = Graph()
            assert torch.equal(run(graph), of_graph(graph))


@pytest.mark.parametrize("way", ["by position", "by name", "among others"])
def test_a_cache_that_the_first_call_sets_up(way: str) -> None:
    def plain(x: Tensor, cache: Any) -> Any:
        return [layer.update(x) * 2 for layer in cache.layers]

    def spread(x: Tensor, **rest: Any) -> Any:
        return plain(x, rest["cache"])

    run, own, mine = capture(spread if way == "among others" else plain), Cache(), Cache()
    with torch.no_grad():
        for number in range(12):
            if number == 8:
                own, mine = Cache(), Cache()
            x = tensor()
            result = run(x, mine) if way == "by position" else run(x, cache=mine)
            for ours, theirs in zip(result, plain(x, own), strict=True):
                assert torch.equal(ours, theirs)
            assert vars(mine.layers[0]).keys() == vars(own.layers[0]).keys()
        assert recordings(run).replays >= 5
        assert captured_states(run)[0].fast_paths.are_there
        if way == "by position":
            assert goes_straight(run, tensor(), mine)


def _noted(*names: str) -> Tensor:
    made = tensor()
    for name in names:
        setattr(made, name, 2.0)
    return made


@pytest.mark.filterwarnings("ignore:CG110:capture.CaptureWarning")
@pytest.mark.parametrize("within", [False, True])
def test_names_of_attributes_of_tensors(within: bool) -> None:
    def body(value: Any) -> Tensor:
        x: Tensor = value["x"] if within else value
        return x * 2 if hasattr(x, "first") else x * 3

    def made(*names: str) -> Any:
        return {"x": _noted(*names)} if within else _noted(*names)

    run = capture(body)
    with torch.no_grad():
        for _ in range(4):
            value = made("first", "second")
            assert torch.equal(run(value), body(value))
        for names in ((), ("first",), ("first", "third"), ("first", "second", "third"), ("second", "first")) * 2:
            value = made(*names)
            assert torch.equal(run(value), body(value))


def test_attributes_that_nothing_reads() -> None:
    run = capture(lambda x: x * 2)
    with torch.no_grad():
        for _ in range(4):
            run(_noted("first"))
        assert goes_straight(run, _noted("first"))
        assert not goes_straight(run, _noted("second"))
        assert not goes_straight(run, _noted())
        assert not goes_straight(run, _noted("first", "second"))
        for _ in range(4):
            run(_noted())
        assert goes_straight(run, _noted())
