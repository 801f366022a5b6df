"""Containers of classes that derive from Python's. What such a class does as members are looked at is the body's
affair: guards, walks and keys look at members as Python's own class has them, and run none of it."""

from __future__ import annotations

import abc
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, recordings

METHODS = (
    "__getitem__", "__setitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__missing__", "__repr__",
    "__reversed__", "keys", "values", "items", "get", "pop", "copy", "append", "clear", "update", "setdefault", "index",
    "count",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    with config.patch(cache=False), torch.no_grad():
        yield


def counting(base: Any, counts: list[str]) -> Any:
    """A class derived from ``base``, each of whose methods notes that it ran."""

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts.append(name)
            return function(self, *args, **kwargs)

        return method

    methods = {name: noting(name, getattr(base, name)) for name in METHODS if hasattr(base, name)}
    return type(f"Counting{base.__name__}", (base,), methods)


def _as_a_closure(kept: Any, read: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * read(kept)


def _in_a_module(kept: Any, read: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    module = nn.Linear(2, 2)
    module.kept = kept
    return lambda x: x * read(module.kept)


BASES: dict[str, tuple[Any, Any]] = {
    "dict": (dict, "a"), "OrderedDict": (OrderedDict, "a"), "defaultdict": (defaultdict, "a"), "list": (list, 0),
    "tuple": (tuple, 0), "deque": (deque, 0),
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("place", [_as_a_closure, _in_a_module])
@pytest.mark.parametrize("member", ["number", "tensor", "dict"])
@pytest.mark.parametrize("name", BASES)
@pytest.mark.filterwarnings("ignore:CG105:capture.CaptureWarning")  # a tensor in a deque has no place
def test_no_method_of_its_class_runs(name: str, member: str, place: Callable[..., Any]) -> None:
    counts, (base, key) = list[str](), BASES[name]
    made: Any = {"number": 2.0, "tensor": torch.ones(2) * 3, "dict": {"v": 2.0}}[member]
    own = counting(base, counts)
    kept: Any = own([made]) if key == 0 else own(None, a=made) if base is defaultdict else own(a=made)

    def read(container: Any) -> Any:
        found = base.__getitem__(container, key)
        return found["v"] if type(found) is dict else found

    x = torch.ones(2)
    body = place(kept, read)
    function = capture(body)
    counts.clear()
    for number in range(12):
        if number == 6 and member == "dict":
            made["v"] = 7.0
        elif number == 6 and base is not tuple:
            base.__setitem__(kept, key, made * 2)
        assert torch.equal(function(x), body(x))
    assert not counts
    assert recordings(function).replays >= 8 or (base is deque and member == "tensor")


class _Defaults(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        self[key] = {"v": 9.0}
        return self[key]


@pytest.mark.parametrize("make", [_Defaults, lambda: defaultdict(dict)])
def test_a_member_that_is_gone_does_not_come_back(make: Callable[[], dict[str, Any]]) -> None:
    kept = make()
    kept["a"] = {"v": 2.0}

    def body(x: Tensor) -> Tensor:
        scale: float = kept["a"]["v"] if "a" in kept else 3.0
        return x * scale

    function, x = capture(body), torch.ones(2)
    for number in range(14):
        if number == 5:
            kept.clear()
        if number == 9:
            kept["b"] = {}
        assert torch.equal(function(x), body(x))
        assert list(kept) == (["a"] if number < 5 else [] if number < 9 else ["b"])
    assert recordings(function).replays >= 6


def test_members_that_its_iterator_leaves_out() -> None:
    class Public(dict[str, Any]):
        @override
        def __iter__(self) -> Iterator[str]:
            return (name for name in dict.__iter__(self) if not name.startswith("_"))

    kept = Public(_scale=[2.0], shown=1.0)
    function, x = capture(lambda x: x * kept["_scale"][0]), torch.ones(2)
    for number in range(12):
        if number in (4, 8):
            kept["_scale"][0] += number
        assert function(x).tolist() == [kept["_scale"][0]] * 2
    assert recordings(function).replays >= 6


@pytest.mark.parametrize("base", [UserDict, UserList, abc.ABC, Exception])
def test_a_class_that_type_makes(base: Any) -> None:
    """One with abstract methods says that it is of the module ``abc``."""
    kept: Any = type("Made", (base,), {})()
    kept.scales = {"v": [2.0]}
    function, x = capture(lambda x: x * kept.scales["v"][0]), torch.ones(2)
    for number in range(12):
        if number == 4:
            kept.scales["v"][0] = 5.0
        elif number == 8:
            kept.scales = {"v": [7.0]}
        assert function(x).tolist() == [kept.scales["v"][0]] * 2
    assert recordings(function).replays >= 6
