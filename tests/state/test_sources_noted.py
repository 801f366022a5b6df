"""The walk over what modules hold, before a watched run: the C module finds what the Python code finds."""

from __future__ import annotations

import dis
import functools
import inspect
import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from capture.key import code_names
from capture.key.code_names import chains
from capture.native import native
from capture.state import snapshot as _snapshot
from capture.state.diff import changes
from capture.state.snapshot import snapshot
from capture.state.source import MODULE_INTERNALS, Found, Source, Tables, are_as_they_were, members_of_module

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


def seen(noted: tuple[list[Found], Tables]) -> Any:
    """All that was noted, with objects as their ids."""
    members, tables = noted

    def of(one: Found) -> Any:
        source, value = one
        return source.kind, id(source.holder), source.name, source.path, id(source.parent), id(value)

    told = [(id(now), keys, list(map(id, values))) for now, keys, values in tables]
    return list(map(of, members)), told


def members_here(module: nn.Module, source: Source) -> tuple[list[Found], Tables]:
    """What ``members_of_module`` gives, computed in Python."""
    tables: list[tuple[Any, dict[str, Any]]] = [
        ("parameter", module._parameters), ("buffer", module._buffers), ("module", module._modules),
        ("attribute", {key: value for key, value in module.__dict__.items() if key not in MODULE_INTERNALS}),
    ]  # fmt: skip
    members: list[Found] = []
    for kind, table in tables:
        for name, value in table.items():
            holder = module if kind == "attribute" else table
            path = f"{source.path}[{name}]" if kind != "attribute" and name.isdigit() else f"{source.path}.{name}"
            members.append((Source(kind, holder, name, path, source), value))
    dicts = (module.__dict__, module._parameters, module._buffers, module._modules)
    return members, tuple([(now, tuple(now), tuple(now.values())) for now in dicts])


@given(modules())
def test_members_in_c_are_those_in_python(module: nn.Module) -> None:
    source = Source("root", module, None, "self")
    found, inside = (seen(one(module, source)) for one in (members_here, members_of_module))
    assert found == inside


@pytest.mark.one_in(4)
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
    _, tables = members_here(module, Source("root", module, None, "self"))
    change(module)
    same = [tuple(now) == keys and all(map(operator.is_, now.values(), values)) for now, keys, values in tables]
    assert are_as_they_were(tables) == all(same)


def test_wrong_arguments_of_places_raise() -> None:
    module = nn.Linear(2, 3)
    source = Source("root", module, None, "self")
    members = functools.partial(native.members_of_module, internals=frozenset())
    nameless, listed = nn.Module(), nn.Module()
    nameless._parameters[0] = None  # type: ignore[index]
    listed.__dict__["_parameters"] = []
    wrong: list[tuple[Any, ...]] = [
        (module, None), (module, source, []), (nameless, source), (listed, source), (1, source),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises((TypeError, AttributeError)):
            members(*arguments)
    wrong_tables: list[Any] = [[], (1,), ((1, (), ()),), (({}, [], ()),)]
    for tables in wrong_tables:
        with pytest.raises((TypeError, SystemError)):
            native.are_as_they_were(tables)


def test_what_a_forward_names_is_found_once() -> None:
    scope: dict[str, Any] = {"TABLE": [torch.ones(1)], "nn": nn, "LIMIT": 3}
    exec(  # noqa: S102 - a module of users', with globals of its own
        "class Named(nn.Module):\n    def forward(self, x):\n        return x * TABLE[0] * LIMIT", scope
    )
    model = nn.Sequential(*[scope["Named"]() for _ in range(3)])
    shot = snapshot([Source("root", model, None, "self")])
    assert [path for path in shot.sources if "forward" in path] == [
        "Named.forward:TABLE", "Named.forward:LIMIT", "Named.forward:TABLE.0",
    ]  # fmt: skip
    assert list(shot.forwards.values()) == [2]


def test_globals_are_those_that_chains_begin_at() -> None:
    holders = [
        nn.MultiheadAttention,
        nn.LSTM,
        nn.Module,
        torch.optim.AdamW,
        inspect,
        dis,
        functools,
        _snapshot,
        code_names,
    ]
    codes = [function.__code__ for holder in holders for _, function in inspect.getmembers(holder, inspect.isfunction)]
    many = "def f():\n    return " + " + ".join(f"name{n}" for n in range(700))  # indices of more than a byte
    codes.append(compile(many, "many", "exec"))
    for code in codes:
        roots = dict.fromkeys(chain.root for chain in chains(code) if chain.kind == "global")
        assert code_names.globals_in(code) == tuple(roots), code
    assert len(codes) > 300


@pytest.mark.parametrize("first", [None, torch.zeros(1), 3])
def test_changes_come_in_one_order_whatever_was_there(first: Any) -> None:
    """A plan's effects are compared in order: what an attribute was before must not change it."""
    module: Any = nn.Module()
    module.other, module.last, module.count = torch.zeros(2), first, 0
    before = snapshot([Source("root", module, None, "self")])
    module.count, module.last, module.other = 1, torch.ones(1), torch.ones(2)
    assert [one.source.path for one in changes(before)] == ["self.other", "self.last", "self.count"]
