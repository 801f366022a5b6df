"""The evaluator of guards in C agrees with the one in this file, for random guards and random changes."""

from __future__ import annotations

import contextvars
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, explain
from capture.api.decorator import captured_states
from capture.guards.guard import CHANGED, MOVED, OK, OVERLAPS, Guard, Referent, itself, members, pieces_of, text_of
from capture.guards.key_guards import call_guard, named_guards
from capture.key.code_names import NamedSource, same_value
from capture.native import native
from capture.state.source import Source
from capture.torch_private import capabilities
from capture.torch_private.tensor_reads import static_tensors

# ------------------------------------------------------------------------------------------------- the evaluator here


def look(source: Source) -> Any:
    """The value that a source leads to. Raises where it leads nowhere."""
    match source.kind:
        case "item":
            if isinstance(source.holder, dict) and source.name not in source.holder:
                raise KeyError(source.name)  # as a guard, which must not have a defaultdict make the entry
            return source.holder[source.name]
        case "attribute":
            return getattr(source.holder, source.name)
        case "closure":
            return source.holder.cell_contents
        case "weak":
            return source.holder().__dict__[source.name]
        case "call":
            return source.holder()
        case "slot":
            return source.name.__get__(source.holder)
        case "context":
            try:
                return source.holder.get()
            except LookupError:
                raise KeyError from None
    raise AssertionError(source.kind)


def is_member(found: Any, value: Any, kind: type | None) -> bool:
    return same_value(found, value) if kind is None else type(found) is kind


def holds_whole(guard: Guard) -> bool:
    """Whether a guard of a kind that looks at a whole object holds."""
    holder, expected = guard.source.holder, guard.expected
    match guard.kind:
        case "names":
            own = holder if isinstance(holder, dict) else vars(holder() if isinstance(holder, weakref.ref) else holder)
            names, there, values, kinds = expected
            told = dict(zip(there, zip(values, kinds, strict=True), strict=True))
            same = all(name in own and is_member(own[name], *pair) for name, pair in told.items())
            return same and not any(name in own for name in names - set(there))
        case "table":
            keys, values, kinds = expected
            same = len(holder) == len(keys) and all(map(same_value, holder, keys))
            return same and all(map(is_member, holder.values(), values, kinds))
        case "sequence":
            values, kinds = expected
            return len(holder) == len(values) and all(map(is_member, holder, values, kinds))
        case "functions":
            parts = [part for f in holder for part in (f.__code__, f.__defaults__, f.__kwdefaults__)]
            return all(now is before for now, before in zip(parts, expected, strict=True))
        case "classes":
            objects = [entry() if isinstance(entry, weakref.ref) else entry for entry in holder]
            kinds, owns = expected
            return all(
                type(part) is kind and (own is None or part.__dict__ is own)
                for part, kind, own in zip(objects, kinds, owns, strict=True)
            )
        case "bases":
            return all(part.__mro__ is mro for part, mro in zip(holder, expected, strict=True))
        case "definitions":
            return all(getattr(part, guard.source.name) == told for part, told in zip(holder, expected, strict=True))
    raise AssertionError(guard.kind)


def holds(guard: Guard, leaves: Sequence[Tensor]) -> bool:
    source, expected = guard.source, guard.expected
    match guard.kind:
        case "absent":
            return source.name not in source.holder
        case "length":
            return bool(len(source.holder) == expected)
        case "members":
            (absent, there), own = expected, source.holder
            is_there = all(name in own and same_value(own[name], value) for name, value in there)
            return is_there and not any(name in own for name in absent)
        case "empty":
            return not any(len(member) for member in source.holder)
        case "address":
            return bool(leaves[source.name].data_ptr() == expected)
        case "apart":
            nbytes, pieces = expected
            begin, words = leaves[source.name].data_ptr(), memoryview(pieces).cast("Q")
            pairs = zip(words[::2], words[1::2], strict=True)
            return not any(begin < end and first < begin + nbytes for first, end in pairs)
        case "present":
            return look(source) is not None
        case "value":
            return same_value(look(source), expected)
        case "object":
            read = look(source)
            needs = read.requires_grad if isinstance(read, Tensor) else None
            same = type(read) is expected.kind and (expected.reference is None or read is expected.reference())
            return same and needs == expected.requires_grad
    return holds_whole(guard)


def verdict(guards: Sequence[Guard], leaves: Sequence[Tensor], tensors: Callable[[], bool] | None = None) -> int:
    """The verdict of the guards in order, with tensors before what asks for free memory."""
    first = [guard for guard in guards if guard.kind != "apart"]
    try:
        for guard in first:
            if not holds(guard, leaves):
                return guard.verdict
        if tensors is not None and not tensors():
            return MOVED
        for guard in guards[len(first) :]:
            if not holds(guard, leaves):
                return guard.verdict
    except (AttributeError, KeyError, IndexError, ValueError):
        return CHANGED
    return OK


# ------------------------------------------------------------------------------------- random objects, guards, changes


class Thing:
    """An object with attributes, equal to nothing but itself."""

    shared = 1.0


class Between(Thing):
    pass


class OtherThing(Thing):
    pass


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a


VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE")


def helper(a: Any = 1, *, b: Any = 2) -> Any:
    return a, b


def other_helper(a: Any = 3, *, b: Any = 4) -> Any:
    return b, a


CODES = (helper.__code__, other_helper.__code__)


NAMES = ["a", "b", "c", "0"]
WHOLE = ["names", "names", "table", "sequence", "functions", "bases", "classes", "definitions"]
TOLD = ["__name__", "__qualname__", "__module__", "__doc__"]
LEAF = torch.zeros(2)
SHARED = [Thing(), nn.Linear(1, 1), len, Thing, [1, 2], {"a": 1}, LEAF, torch.ones(2, requires_grad=True)]
PLAIN: st.SearchStrategy[Any] = st.one_of(
    st.integers(-2, 300), st.booleans(), st.none(), st.floats(width=16), st.text("ab", max_size=2),
    st.binary(max_size=1),
    st.sampled_from([0.0, -0.0, float("nan"), 1.0, torch.Size([2]), torch.device("cpu"), torch.int8]),
)  # fmt: skip
VALUES: st.SearchStrategy[Any] = PLAIN | st.sampled_from(SHARED)


def again(value: Any) -> Any:
    """An equal value, as another object where Python can make one."""
    if type(value) in (int, float, str, bytes):
        text = value.hex() if type(value) is float else value
        return float.fromhex(text) if type(value) is float else type(value)(eval(repr(value)))  # noqa: S307 - our own
    return torch.Size(list(value)) if type(value) is torch.Size else value


class World:
    """Holders of all kinds, and what may change in them."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        filled = draw(st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1))
        self.dicts: list[dict[Any, Any]] = [dict(filled), OrderedDict(filled), defaultdict(list, filled)]
        self.lists: list[list[Any]] = [draw(st.lists(VALUES, min_size=1, max_size=4))]
        self.cells = [types.CellType(draw(VALUES)), types.CellType()]
        self.things: list[Any] = [Thing(), nn.Module(), OtherThing()]
        for thing_made in self.things:
            thing_made.__dict__.update(draw(st.dictionaries(st.sampled_from(NAMES), VALUES)))
        self.fleeting: list[Any] = [Thing(), nn.ReLU(), torch.zeros(2), torch.zeros(2, requires_grad=True)]
        self.cleared: list[Any] = [{}, [], OrderedDict()]
        self.kind = type("Kind", (Thing,), dict(draw(st.dictionaries(st.sampled_from(NAMES), VALUES))))
        self.several: list[Any] = [set(draw(st.sets(st.integers(0, 5)))), deque(draw(st.lists(VALUES, max_size=3)))]
        self.slotted: Any = Slotted(draw(VALUES))
        VARIABLE.set(draw(VALUES))
        self.memory = torch.zeros(64)
        self.leaves = [self.memory[at : at + 4] for at in (0, 8, 20)]

    def containers(self) -> list[Any]:
        return [*self.dicts, *self.lists, *[thing.__dict__ for thing in self.things]]

    def source(self) -> Source:
        kind = self.draw(st.sampled_from(["item", "item", "attribute", "closure", "weak", "call", "slot", "context"]))
        owner, name = self.draw(st.sampled_from(self.things)), self.draw(st.sampled_from([*NAMES, "shared"]))
        match kind:
            case "item":
                holder = self.draw(st.sampled_from(self.containers()))
                return Source(kind, holder, self.draw(st.integers(0, 3)) if type(holder) is list else name, "x")
            case "attribute":
                return Source(kind, owner, name, "x")
            case "closure":
                return Source(kind, self.draw(st.sampled_from(self.cells)), None, "x")
            case "weak":
                return Source(kind, weakref.ref(owner), name, "x")
            case "slot":
                return Source(
                    kind, self.slotted, self.draw(st.sampled_from([vars(Slotted)["a"], vars(Slotted)["b"]])), "x"
                )
            case "context":
                return Source(kind, VARIABLE, None, "x")
        position = self.draw(st.integers(0, 2))
        lists = self.lists[0]
        return Source("call", lambda: lists[position], None, "x")

    def columns(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[type | None, ...]]:
        """What a guard on names expects: the values, or their classes instead."""
        kinds = [type(one) if self.draw(st.booleans()) else None for one in values]
        return tuple([None if kind else one for one, kind in zip(values, kinds, strict=True)]), tuple(kinds)

    def whole(self, told: int) -> Guard:
        """A guard on a whole object."""
        kind: Any = self.draw(st.sampled_from(WHOLE))
        match kind:
            case "names":
                candidates = [*self.things, *self.fleeting[:1]]
                holder = self.draw(
                    st.sampled_from([*candidates, *map(weakref.ref, candidates), *self.dicts, self.kind])
                )
                target = holder() if isinstance(holder, weakref.ref) else holder
                own = target if isinstance(target, dict) else vars(target)
                holder = holder if isinstance(holder, (weakref.ref, type)) else own
                wanted = frozenset(self.draw(st.sets(st.sampled_from(NAMES))))
                there = [name for name in own if name in wanted]
                expected: Any = (wanted, tuple(there), *self.columns([own[name] for name in there]))
                return Guard(kind, itself(holder, "x"), expected, told)
            case "table":
                holder = self.draw(st.sampled_from([*self.dicts, self.things[0].__dict__]))
                return Guard(kind, itself(holder, "x"), (tuple(holder), *self.columns(list(holder.values()))), told)
            case "sequence":
                holder = self.draw(st.sampled_from([*self.lists, *self.several]))
                return Guard(kind, Source("root", holder, type(holder), "x"), self.columns(list(holder)), told)
            case "functions":
                parts = (helper.__code__, helper.__defaults__, helper.__kwdefaults__)
                return Guard(kind, itself((helper,), "x"), parts, told)
            case "bases":
                return Guard(kind, itself((OtherThing, Thing), "x"), (OtherThing.__mro__, Thing.__mro__), told)
            case "definitions":
                of: tuple[Any, ...] = self.draw(st.sampled_from([(helper,), (helper, OtherThing, Thing)]))
                what = self.draw(st.sampled_from(TOLD if of == (helper,) else TOLD[:2]))
                return Guard(kind, Source("root", of, what, "x"), tuple(getattr(one, what) for one in of), told)
        objects = (weakref.ref(self.things[0]), self.slotted)
        own = self.draw(st.sampled_from([None, self.things[0].__dict__]))
        return Guard(kind, itself(objects, "x"), ((type(self.things[0]), Slotted), (own, None)), told)

    def guard(self) -> Guard:
        kinds = ["value"] * 4 + ["whole"] * 5
        kinds += ["object", "present", "absent", "length", "members", "empty", "address"]
        kind: Any = self.draw(st.sampled_from(kinds))
        told = self.draw(st.sampled_from([CHANGED, MOVED]))
        if kind == "whole":
            return self.whole(told)
        match kind:
            case "absent":
                return Guard(kind, Source("item", self.draw(st.sampled_from(self.dicts)), self.name(), "x"), None, told)
            case "length":
                holder = self.draw(st.sampled_from(self.containers()))
                return Guard(kind, itself(holder, "x"), len(holder), told)
            case "empty":
                several = self.draw(st.lists(st.sampled_from([*self.containers(), *self.cleared]), max_size=3))
                return Guard(kind, itself(tuple(several), "x"), None, told)
            case "members":
                own = self.draw(st.sampled_from([*self.dicts, self.things[0].__dict__]))
                return members(own, "x", [name for name in NAMES if name not in own], own.items())
            case "address":
                at = self.draw(st.integers(0, 3))
                return Guard(kind, Source("argument", None, at, "x"), self.leaves[min(at, 2)].data_ptr(), MOVED)
        source = self.source()
        try:
            value = look(source)
        except (AttributeError, KeyError, IndexError, ValueError):
            value = self.draw(VALUES)
        if kind == "object":
            target = (
                value if isinstance(value, (Thing, nn.Module, Tensor)) else self.draw(st.sampled_from(self.fleeting))
            )
            return Guard(kind, source, Referent.of(target), told)
        return Guard(kind, source, None if kind == "present" else value, told)

    def name(self) -> str:
        found: str = self.draw(st.sampled_from(NAMES))
        return found

    def apart(self) -> list[Guard]:
        pieces = sorted(self.draw(st.sets(st.integers(0, 31), max_size=3)))
        base = self.memory.data_ptr()
        begins = [base + 8 * one for one in pieces]
        told = pieces_of(begins, [begin + 4 for begin in begins])
        sizes = [(at, self.draw(st.sampled_from([0, 4, 16]))) for at in self.draw(st.sets(st.integers(0, 2)))]
        return [Guard("apart", Source("argument", None, at, "x"), (size, told), OVERLAPS) for at, size in sizes]

    def change(self) -> None:
        match self.draw(st.integers(0, 16)):
            case 0 | 1 | 2:
                holders = [*self.dicts, *[thing.__dict__ for thing in self.things], self.cleared[0], self.cleared[2]]
                holder = self.draw(st.sampled_from(holders))
                name = self.name()
                equal = name in holder and self.draw(st.booleans())
                holder[name] = again(holder[name]) if equal else self.draw(VALUES)
            case 3:
                holders = [*self.dicts, self.things[0].__dict__, self.cleared[0]]
                self.draw(st.sampled_from(holders)).pop(self.name(), None)
            case 4:
                inside = self.lists[0]
                inside[self.draw(st.integers(0, len(inside) - 1))] = self.draw(VALUES)
            case 5:
                self.lists[0].append(self.draw(VALUES))
            case 6:
                self.draw(st.sampled_from(self.cells)).cell_contents = self.draw(VALUES)
            case 7:
                self.things[0].__class__ = self.draw(st.sampled_from([Thing, OtherThing]))
            case 8:
                self.draw(st.sampled_from([self.fleeting[2], LEAF])).requires_grad_(self.draw(st.booleans()))
            case 9:
                holder = self.draw(st.sampled_from(self.dicts))
                holder["a"] = self.draw(st.sampled_from(self.fleeting))
                self.leaves[0] = self.memory[self.draw(st.integers(0, 20)) :][:4]
            case 10:
                setattr(self.kind, self.name(), self.draw(VALUES))
            case 11:
                self.several[0].symmetric_difference_update({self.draw(st.integers(0, 5))})
                self.several[1].append(self.draw(VALUES))
            case 12:
                setattr(self.slotted, self.draw(st.sampled_from(["a", "b"])), self.draw(VALUES))
            case 13:
                VARIABLE.set(self.draw(VALUES))
            case 14:
                helper.__code__ = self.draw(st.sampled_from(CODES))
                helper.__defaults__ = self.draw(st.sampled_from([None, (1,), helper.__defaults__]))
                setattr(
                    helper, self.draw(st.sampled_from(TOLD)), "".join(["hel", self.draw(st.sampled_from(["per", "p"]))])
                )
                helper.__doc__ = self.draw(st.sampled_from([None, "It helps."]))
            case 15:
                OtherThing.__bases__ = self.draw(st.sampled_from([(Thing,), (Between,)]))
                setattr(
                    OtherThing, self.draw(st.sampled_from(TOLD[:2])), self.draw(st.sampled_from(["Other", "Thing"]))
                )
            case 16:
                self.things[0].__dict__ = self.draw(st.sampled_from([dict(vars(self.things[0])), vars(self.things[0])]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", range(3))
@settings(max_examples=70, deadline=None, derandomize=False)  # parts draw alike where `CI` is set, else
@given(data=st.data())
def test_c_says_what_python_says(part: int, data: st.DataObject) -> None:
    world = World(data.draw)
    guards = [world.guard() for _ in range(data.draw(st.integers(1, 6)))] + world.apart()
    alone, together = [native.Guards((guard,)) for guard in guards], native.Guards(tuple(guards))
    copied = together.beside(tuple(guard for guard in guards if guard.kind == "apart"), None)
    for step in range(data.draw(st.integers(1, 8))):
        if step:
            world.change()
        for guard, alone_guard in zip(guards, alone, strict=True):
            assert alone_guard(world.leaves) == verdict([guard], world.leaves), (step, text_of(guard))
        expected = verdict(guards, world.leaves)
        for _ in range(2):  # twice: the second time nothing that is unchanged is read again
            assert together(world.leaves) == copied(world.leaves) == expected
        at = data.draw(st.integers(0, len(guards) - 1))
        if guards[at].kind == "value":  # expect another value from now on
            value = data.draw(VALUES)
            guards[at] = Guard("value", guards[at].source, value, guards[at].verdict)
            for several in (together, copied):
                several.expect(at, value)
            alone[at].expect(0, value)
    LEAF.requires_grad_(False)


# ------------------------------------------------------------------------------------------------ what else they keep


def test_guards_expect_objects_without_keeping_them_alive() -> None:
    net, own, receiver = nn.Linear(2, 2), nn.Module(), Thing()
    net_of = types.CellType(net)
    own.__dict__["net"] = receiver.__dict__["net"] = net
    sources = [
        NamedSource(lambda: net_of.cell_contents, net_of),
        NamedSource(lambda: own.__dict__["net"], own.__dict__, "net"),
        NamedSource(lambda: receiver.__dict__["net"], weakref.ref(receiver), "net"),
        NamedSource(lambda: net_of.cell_contents),
    ]
    guards = [native.Guards(tuple(named_guards(net, source) or ())) for source in sources]
    assert [(guard(()), guard(())) for guard in guards] == [(OK, OK)] * 4
    net.__class__ = nn.ReLU  # type: ignore[assignment] # mypy takes the attribute for read-only
    assert [(guard(()), guard(())) for guard in guards] == [(CHANGED, CHANGED)] * 4
    gone = weakref.ref(net)
    net_of.cell_contents = own.__dict__["net"] = receiver.__dict__["net"] = None
    del net
    assert gone() is None
    assert [guard(()) for guard in guards] == [CHANGED] * 4
    del net_of.cell_contents
    assert guards[0](()) == CHANGED


def test_guards_are_garbage_with_what_they_look_at() -> None:
    thing: Any = Thing()
    thing.guards = native.Guards((Guard("value", Source("item", thing.__dict__, "a", "a"), 1),))
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("in_c", [True, False])
def test_tensors_come_before_free_memory(in_c: bool) -> None:
    tensor, argument = torch.zeros(4), torch.zeros(2)
    addresses, metadata = capabilities.address_check([tensor]), capabilities.metadata_check([tensor])
    tensors = static_tensors([tensor], asks_gradient=True) if in_c else lambda: addresses() and metadata()
    begin = argument.data_ptr()
    apart = Guard("apart", Source("argument", None, 0, "x"), (8, pieces_of([begin], [begin + 8])), OVERLAPS)
    guards = native.Guards((apart,), tensors)
    assert (guards([argument]), guards.tensors is tensors) == (OVERLAPS, True)
    assert guards([torch.zeros(2)]) == OK
    kept, tensor.data = tensor.data, torch.zeros(4)
    assert guards([argument]) == MOVED
    tensor.data = kept
    assert guards([argument]) == OVERLAPS
    tensor.grad = torch.ones(4)
    assert guards([torch.zeros(2)]) == OK
    guards.tensors = None
    tensor.data = torch.zeros(4)
    assert guards([torch.zeros(2)]) == OK


def test_what_stops_a_program_comes_out_of_a_guard() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    def gone() -> None:
        raise KeyError

    with pytest.raises(KeyboardInterrupt):
        native.Guards((call_guard(stop, None, "x"),))(())
    assert native.Guards((call_guard(gone, None, "x"),))(()) == CHANGED


class NoData:
    def data_ptr(self) -> int:
        raise TypeError


def test_records_that_make_no_sense_are_refused() -> None:
    own: dict[str, Any] = {}
    item, at = Source("item", own, "a", "x"), Source("argument", None, 0, "x")
    odd: list[Any] = [
        Guard("value", Source("closure", 1, None, "x")), Guard("object", item, 1), Guard("length", item, 1),
        Guard("length", itself([], "x"), "1"), Guard("address", item, 1), Guard("apart", at, 1),
        Guard("members", itself([], "x"), ((), ())), Guard("empty", itself([], "x")),
        Guard("members", itself(own, "x"), ((), ("ab",))),
        Guard("members", itself(own, "x"), (["a"], ())), Guard("absent", Source("item", [], 0, "x")),
        Guard("value", Source("nothing", own, "a", "x")), Guard("nothing", item), Guard("value", item, 1, OK),  # type: ignore[arg-type]
        Guard("object", item, (weakref.ref(Thing), 1, None)), Guard("value", at, 1),
        Guard("names", itself(1, "x"), (frozenset(), (), (), ())), Guard("names", item, (frozenset(), (), (), ())),
        Guard("names", itself(own, "x"), (set(), (), (), ())),
        Guard("names", itself(own, "x"), (frozenset(), (1,), (), ())),
        Guard("table", itself([], "x"), ((), (), ())), Guard("table", itself(own, "x"), ((), ())),
        Guard("sequence", itself([], "x"), ((), ())), Guard("sequence", Source("root", (), list, "x"), ((), ())),
        Guard("functions", itself((1,), "x"), (1, 1, 1)), Guard("functions", itself((helper,), "x"), ()),
        Guard("classes", itself((1,), "x"), ()), Guard("bases", itself((1,), "x"), (1,)),
        Guard("definitions", Source("root", (1,), "__name__", "x"), (1,)),
        Guard("definitions", Source("root", (helper,), "__code__", "x"), (helper.__code__,)),
        Guard("definitions", Source("root", (helper,), "__name__", "x"), ()),
        Guard("definitions", itself((helper,), "x"), ("helper",)),
        Guard("value", Source("slot", own, 1, "x")),
        Guard("value", Source("context", own, None, "x")),
    ]  # fmt: skip
    for wrong in odd:
        with pytest.raises(ValueError, match="no such guard"):
            native.Guards((wrong,))
    for given_records in ((1,), (Source("item", own, "a", "x"),)):
        with pytest.raises(TypeError):
            native.Guards(given_records)
    guards = native.Guards((Guard("length", itself(own, "x"), 0), Guard("value", item, 1), Guard("address", at, 1)))
    wrong_calls: list[Callable[[], Any]] = [
        lambda: guards(), lambda: guards((), 1), lambda: guards(1), lambda: native.Guards([]),
        lambda: native.Guards((), 1), lambda: guards.expect(0), lambda: setattr(guards, "tensors", 1),
    ]  # fmt: skip
    for call in wrong_calls:
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError, match="no such guard"):
        guards.expect(0, "1")
    with pytest.raises(IndexError):
        guards.expect(3, 1)
    own["a"] = 1
    guards.expect(0, 1)
    with pytest.raises(TypeError):
        guards([NoData()])
    assert guards([]) == CHANGED, "an argument that the call has not"


# --------------------------------------------------------------------------------------------- guards of real programs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.gain, self.sizes = 2.0, [1, 2]

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.gain + len(self.sizes)
        return y


def guards_of(function: Any) -> Any:
    (entry,) = captured_states(function)[0].entries()
    return entry.nodes[0].guard


def test_explain_prints_guards() -> None:
    net = Net()
    with torch.no_grad(), config.patch(cache=False):
        explanation = explain(net)(torch.zeros(1, 4))
    told = explanation.guards
    assert told == tuple(sorted(told, key=told.index))
    for line in (
        "self: table 'linear': this Linear", "self.linear.weight: value this Parameter float32 (4, 4)",
        "self.sizes: sequence 1, 2", "self.linear: table 'weight': a Parameter, 'bias': None",
    ):  # fmt: skip
        assert line in told, told
    (line,) = [line for line in told if line.startswith("self: names")]
    assert "gain = 2.0, sizes = this list" in line
    assert f"guards looked at before every replay: {len(told)}\n  {told[0]}\n" in str(explanation)


def test_a_recording_keeps_its_guards_where_a_tensor_moves() -> None:
    net = Net()
    captured, xs = capture(lambda x: net(x)), [torch.randn(n, 4) for n in (1, 2)]
    with torch.no_grad(), config.patch(cache=False):
        for x in xs:
            for _ in range(4):
                captured(x)
        first, second = (entry.nodes[0].guard for entry in captured_states(captured)[0].entries())
        assert first.structure is second.structure, "the second recording takes the guards of the first"
        assert (first.check(xs[:1]), second.check(xs[1:])) == (OK, OK)
        net.linear.weight.data = torch.ones(4, 4)
        assert (first.check(xs[:1]), second.check(xs[1:])) == (MOVED, MOVED)
        assert torch.equal(captured(xs[0]), net(xs[0]))
        assert (first.check(xs[:1]), second.check(xs[1:])) == (OK, MOVED), "each follows on its own"
        net.sizes.append(3)
        assert first.check(xs[:1]) == CHANGED
        assert [guard.verdict for guard in first.guards()] == sorted((g.verdict for g in first.guards()), reverse=True)
        for guard in first.guards():
            assert text_of(guard).startswith(guard.source.path)
