"""What modules hold, as it is noted before a watched run: the C module finds what Python finds."""

from __future__ import annotations

import dis
import functools
import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from capture import _named, _places, _state
from capture._changes import changes
from capture._fast import native
from capture._named import chains
from capture._places import Found, Place, Tables
from capture._state import snapshot

needs_c = pytest.mark.skipif(native is None, reason="the C module was not built")
NAMES = st.sampled_from(["weight", "scale", "0", "17", "²", "a.b", "", "étude"])
VALUES = st.sampled_from([None, 1, True, 2.5, "text", torch.float16, torch.Size([2]), [1], {"a": 1}, object()])


class Odd(nn.Module):
    """A module with a bit of everything."""

    def __init__(self, attributes: dict[str, Any], parameters: dict[str, Any], children: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__.update(attributes)
        self._parameters.update(parameters)
        self._modules.update(children)
        self._buffers.update({name: torch.zeros(1) for name in list(children)[:1]})


def modules() -> st.SearchStrategy[nn.Module]:
    parameters = st.sampled_from([None, nn.Parameter(torch.ones(2))])
    children = st.builds(nn.Linear, st.just(1), st.just(1)) | st.none()
    return st.builds(
        Odd, st.dictionaries(NAMES, VALUES), st.dictionaries(NAMES, parameters), st.dictionaries(NAMES, children)
    )


def seen(found: tuple[list[Found], Tables]) -> Any:
    """Everything there is, by identity."""
    members, tables = found

    def of(one: Found) -> Any:
        place, value = one
        return place.kind, id(place.holder), place.name, place.path, id(place.parent), id(value)

    told = [(id(now), keys, list(map(id, values))) for now, keys, values in tables]
    return list(map(of, members)), told


@needs_c
@given(modules())
def test_members_in_c_are_those_in_python(module: nn.Module) -> None:
    place = Place("root", module, None, "self")
    found, inside = (seen(one(module, place)) for one in (_places._members_of_module, _places.members_of_module))
    assert found == inside


@needs_c
@pytest.mark.parametrize(
    "change",
    [
        lambda m: None,
        lambda m: setattr(m, "bias", None),
        lambda m: setattr(m, "more", 1),
        lambda m: setattr(m, "in_features", 4),
        lambda m: delattr(m, "bias"),
        lambda m: m.register_parameter("bias", m._parameters.pop("bias")),
        lambda m: m._parameters.update(weight=m._parameters.pop("weight")),
        lambda m: m.__dict__.update({str(b"in_features", "ascii"): m.__dict__.pop("in_features")}),
        lambda m: m.add_module("inner", nn.ReLU()),
        lambda m: m.register_buffer("state", None),
    ],
)
def test_tables_in_c_are_compared_as_in_python(change: Any) -> None:
    module = nn.Linear(2, 3)
    _, tables = _places._members_of_module(module, Place("root", module, None, "self"))
    change(module)
    assert _places._are_as_they_were(tables) == native.are_as_they_were(tables)


@needs_c
def test_wrong_arguments_of_places_raise() -> None:
    module = nn.Linear(2, 3)
    place = Place("root", module, None, "self")
    members = functools.partial(native.members_of_module, internals=frozenset())
    nameless, listed = nn.Module(), nn.Module()
    nameless._parameters[0] = None  # type: ignore[index]
    listed.__dict__["_parameters"] = []
    wrong: list[tuple[Any, ...]] = [
        (module, None), (module, place, []), (nameless, place), (listed, place), (1, place),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises((TypeError, AttributeError)):
            members(*arguments)
    others: list[Any] = [[], (1,), ((1, (), ()),), (({}, [], ()),)]
    for tables in others:
        with pytest.raises((TypeError, SystemError)):
            native.are_as_they_were(tables)


def test_what_a_forward_names_is_found_once() -> None:
    scope: dict[str, Any] = {"TABLE": [torch.ones(1)], "nn": nn, "LIMIT": 3}
    exec(  # noqa: S102 - a module of users', with globals of its own
        "class Named(nn.Module):\n    def forward(self, x):\n        return x * TABLE[0] * LIMIT", scope
    )
    model = nn.Sequential(*[scope["Named"]() for _ in range(3)])
    found = snapshot([Place("root", model, None, "self")])
    assert [path for path in found.places if "forward" in path] == [
        "Named.forward:TABLE", "Named.forward:LIMIT", "Named.forward:TABLE.0",
    ]  # fmt: skip
    assert list(found.forwards.values()) == [2]


def test_globals_are_those_that_chains_begin_at() -> None:
    holders = [nn.MultiheadAttention, nn.LSTM, nn.Module, torch.optim.AdamW, inspect, dis, functools, _state, _named]
    codes = [one.__code__ for holder in holders for _, one in inspect.getmembers(holder, inspect.isfunction)]
    many = "def f():\n    return " + " + ".join(f"name{n}" for n in range(700))  # indices of more than a byte
    codes.append(compile(many, "many", "exec"))
    for code in codes:
        roots = dict.fromkeys(chain.root for chain in chains(code) if chain.kind == "global")
        assert _named.globals_in(code) == tuple(roots), code
    assert len(codes) > 300


@pytest.mark.parametrize("first", [None, torch.zeros(1), 3])
def test_changes_come_in_one_order_whatever_was_there(first: Any) -> None:
    """A plan's effects are compared in order: what an attribute was before must not change it."""
    module: Any = nn.Module()
    module.other, module.last, module.count = torch.zeros(2), first, 0
    before = snapshot([Place("root", module, None, "self")])
    module.count, module.last, module.other = 1, torch.ones(1), torch.ones(2)
    assert [one.place.path for one in changes(before)] == ["self.other", "self.last", "self.count"]
