"""All that a body reads is checked, wherever the code that reads it is: each change shows in the call after it."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import operator
import queue
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, recordings

Change = Callable[[], object]
WHERE = types.ModuleType("settings")  # a module of the user's


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


class Layer(nn.Module):
    """A module whose ``forward`` multiplies by what the given function reads."""

    def __init__(self, read: Callable[[Any], Any], **kept: Any) -> None:
        super().__init__()
        self.read = read
        self.__dict__.update(kept)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.read(self))


class Config:
    scale = 2.0
    unread = 0


@dataclasses.dataclass
class Record:
    scale: float = 2.0


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Mode(enum.Enum):
    TRAIN = 1
    EXPORT = 2


class Pair(NamedTuple):
    scale: float


class Method:
    def gain(self) -> float:
        return 2.0

    @property
    def half(self) -> float:
        return self.gain() / 2

    @staticmethod
    def fixed() -> float:
        return 2.0

    def __len__(self) -> int:
        return 2

    def __call__(self) -> float:
        return 2.0


class Derived(Method):
    @override
    def gain(self) -> float:
        return super().gain() * 2


class Meta(type):
    base = 2.0

    @property
    def scale(cls) -> float:
        return cls.base


class Made(metaclass=Meta):
    pass


class Proxy:
    """Passes attribute reads on to another object."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=2.0)
_DEFAULTS = {"scale": 2.0}
BY_DEFAULT: contextvars.ContextVar[dict[str, float]] = contextvars.ContextVar("BY_DEFAULT", default=_DEFAULTS)
LOCAL = threading.local()
LOCAL.scale = 2.0
SCALE = 2.0
TABLE = {"scale": 2.0}


@functools.lru_cache
def made() -> Config:
    return Config()


def with_default(scale: list[float] = [2.0]) -> float:  # noqa: B006 - users write this
    return scale[0]


def _default() -> Any:
    assert with_default.__defaults__ is not None
    return with_default.__defaults__[0]


def by_global() -> float:
    return SCALE


def adder(scale: float) -> Callable[[], float]:
    return lambda: scale


def set_global(value: float) -> None:
    global SCALE
    SCALE = value


def new_code() -> float:
    return 5.0


def of(keeper: Any, name: str, value: Any) -> tuple[Change, Change]:
    """Functions that set an attribute, and that set it back."""
    had, before = name in vars(keeper) if hasattr(keeper, "__dict__") else True, getattr(keeper, name, None)
    return lambda: setattr(keeper, name, value), lambda: setattr(keeper, name, before) if had else delattr(keeper, name)


Case = tuple[Layer, Change, Change]


def attribute(kept: Any, name: str = "scale", value: Any = 5.0) -> Callable[[], Case]:
    def make() -> Case:
        layer = Layer(lambda self: getattr(self.cfg, "scale"), cfg=kept() if isinstance(kept, type) else kept)  # noqa: B009
        return (layer, *of(layer.cfg, name, value))

    return make


def case(read: Callable[[Any], Any], change: Callable[[Any], Any], undo: Change = lambda: None, **kept: Any) -> Any:
    def make() -> Case:
        own = {name: one() if isinstance(one, (type, types.FunctionType)) else one for name, one in kept.items()}
        layer = Layer(read, **own)
        return layer, lambda: change(layer), undo

    return make


def _swap_code() -> Any:
    def helper() -> float:
        return 2.0

    return case(lambda _: helper(), lambda _: setattr(helper, "__code__", new_code.__code__))


def _cell() -> Any:
    scale = 2.0

    def set_it() -> None:
        nonlocal scale
        scale = 5.0

    return case(lambda _: scale, lambda _: set_it())


def _globals() -> Any:
    scope: dict[str, Any] = {"SCALE": 2.0}
    exec("def read(_): return globals()['SCALE']", scope)  # noqa: S102 - as generated code does
    return case(scope["read"], lambda _: scope.update(SCALE=5.0))


def _weak_table() -> Any:
    key, table = Config(), weakref.WeakKeyDictionary[Any, float]()
    table[key] = 2.0
    return case(lambda _: table[key], lambda _: table.update({key: 5.0}))


def _queue() -> Any:
    waiting = queue.Queue[float]()
    waiting.put(2.0)
    return case(lambda _: waiting.queue[0], lambda _: waiting.queue.appendleft(5.0))


CASES: dict[str, Callable[[], Case]] = {
    "by globals()": _globals(),
    "in a weak table": _weak_table(),
    "in a queue": _queue(),
    "called by syntax": case(
        lambda s: s.m(),
        lambda _: setattr(Method, "__call__", lambda _: 5.0),
        functools.partial(setattr, Method, "__call__", vars(Method)["__call__"]),
        m=Method,
    ),
    "called by a builtin": case(
        lambda s: len(s.m),
        lambda _: setattr(Method, "__len__", lambda _: 5),
        functools.partial(setattr, Method, "__len__", vars(Method)["__len__"]),
        m=Method,
    ),
    "by an attrgetter": case(
        lambda s: s.get(s.cfg),
        lambda s: setattr(s.cfg, "deep", 5.0),
        cfg=lambda: types.SimpleNamespace(deep=2.0),
        get=lambda: operator.attrgetter("deep"),
    ),
    "in an array": case(
        lambda s: s.numbers[0], lambda s: s.numbers.__setitem__(0, 5.0), numbers=lambda: array.array("d", [2.0])
    ),
    "attribute of an object": attribute(Config),
    "attribute of a dataclass": attribute(Record),
    "slot": attribute(Slots),
    "namespace": attribute(types.SimpleNamespace(scale=2.0)),
    "class attribute": case(
        lambda s: s.cfg.scale,
        lambda _: setattr(Config, "scale", 5.0),
        lambda: setattr(Config, "scale", 2.0),
        cfg=Config,
    ),
    "object replaced": case(
        lambda s: s.cfg.scale, lambda s: setattr(s, "cfg", types.SimpleNamespace(scale=5.0)), cfg=Config
    ),
    "attribute shadows the class": attribute(Config, "scale", 7.0),
    "attribute of a module of the user's": attribute(WHERE),
    "enum": case(
        lambda s: 2.0 if s.mode is Mode.TRAIN else 3.0, lambda s: setattr(s, "mode", Mode.EXPORT), mode=Mode.TRAIN
    ),
    "namedtuple": case(lambda s: s.cfg.scale, lambda s: setattr(s, "cfg", Pair(5.0)), cfg=Pair(2.0)),
    "through a proxy": case(
        lambda s: s.cfg.scale, lambda s: setattr(s.cfg.inner, "scale", 5.0), cfg=lambda: Proxy(Config())
    ),
    "method of an instance": case(lambda s: s.m.gain(), lambda s: setattr(s.m, "gain", lambda: 5.0), m=Method),
    "method of a class": case(
        lambda s: s.m.gain(),
        lambda _: setattr(Method, "gain", lambda _: 5.0),
        functools.partial(setattr, Method, "gain", Method.gain),
        m=Method,
    ),
    "method of a base": case(
        lambda s: s.m.gain(),
        lambda _: setattr(Method, "gain", lambda _: 5.0),
        functools.partial(setattr, Method, "gain", Method.gain),
        m=Derived,
    ),
    "behind a property": case(lambda s: s.m.half, lambda s: setattr(s.m, "gain", lambda: 5.0), m=Method),
    "static method": case(
        lambda s: s.m.fixed(),
        lambda _: setattr(Method, "fixed", staticmethod(lambda: 5.0)),
        functools.partial(setattr, Method, "fixed", staticmethod(Method.fixed)),
        m=Method,
    ),
    "class swapped": case(lambda s: s.m.gain(), lambda s: setattr(s.m, "__class__", Derived), m=Method),
    "metaclass": case(lambda _: Made.scale, lambda _: setattr(Meta, "base", 5.0), lambda: setattr(Meta, "base", 2.0)),
    "code replaced": _swap_code(),
    "cell": _cell(),
    "cell of another function": case(
        lambda s: s.f(), lambda s: setattr(s.f.__closure__[0], "cell_contents", 5.0), f=lambda: adder(2.0)
    ),
    "global of a helper": case(lambda _: by_global(), lambda _: set_global(5.0), lambda: set_global(2.0)),
    "item of a global": case(
        lambda _: TABLE["scale"], lambda _: TABLE.update(scale=5.0), lambda: TABLE.update(scale=2.0)
    ),
    "default in place": case(
        lambda _: with_default(),
        lambda _: _default().__setitem__(0, 5.0),
        lambda: _default().__setitem__(0, 2.0),
    ),
    "of a cached function": case(
        lambda _: made().scale, lambda _: setattr(made(), "scale", 5.0), lambda: made.cache_clear()
    ),
    "context variable": case(lambda _: VARIABLE.get(), lambda _: VARIABLE.set(5.0), lambda: VARIABLE.set(2.0)),
    "default of a context variable": case(
        lambda _: BY_DEFAULT.get()["scale"],
        lambda _: BY_DEFAULT.get().update(scale=5.0),
        lambda: BY_DEFAULT.get().update(scale=2.0),
    ),
    "thread-local": case(
        lambda _: LOCAL.scale, lambda _: setattr(LOCAL, "scale", 5.0), lambda: setattr(LOCAL, "scale", 2.0)
    ),
    "computed name": case(
        lambda s: getattr(s.cfg, "sc" + s.end), lambda s: setattr(s.cfg, "scale", 5.0), cfg=Config, end="ale"
    ),
    "vars": case(
        lambda s: sum(vars(s.cfg).values()),
        lambda s: setattr(s.cfg, "more", 5.0),
        cfg=lambda: types.SimpleNamespace(a=1.0),
    ),
    "absent": case(
        lambda s: 5.0 if hasattr(s.cfg, "fast") else 2.0, lambda s: setattr(s.cfg, "fast", True), cfg=Config
    ),
    "deleted": case(
        lambda s: 5.0 if hasattr(s.cfg, "fast") else 2.0,
        lambda s: delattr(s.cfg, "fast"),
        cfg=lambda: types.SimpleNamespace(fast=True),
    ),
    "list grows": case(lambda s: len(s.several), lambda s: s.several.append(1), several=lambda: [1, 2]),
    "long list": case(lambda s: sum(s.several), lambda s: s.several.__setitem__(70, 5), several=lambda: [1] * 100),
    "nested list": case(lambda s: s.several[0][0], lambda s: s.several[0].__setitem__(0, 5.0), several=lambda: [[2.0]]),
    "set": case(lambda s: len(s.several), lambda s: s.several.add(5), several=lambda: {1, 2}),
    "deque": case(
        lambda s: s.several[0], lambda s: s.several.appendleft(5.0), several=lambda: collections.deque([2.0])
    ),
    "dict grows": case(
        lambda s: sum(s.several.values()), lambda s: s.several.update(b=5.0), several=lambda: {"a": 2.0}
    ),
    "order of a dict": case(
        lambda s: next(iter(s.several.values())),
        lambda s: s.several.move_to_end("a"),
        several=lambda: collections.OrderedDict(a=2.0, b=5.0),
    ),
    "default dict": case(
        lambda s: s.several["a"],
        lambda s: s.several.update(a=5.0),
        several=lambda: collections.defaultdict(float, a=2.0),
    ),
    "object in a list": case(
        lambda s: s.several[0].scale, lambda s: setattr(s.several[0], "scale", 5.0), several=lambda: [Config()]
    ),
    "partial": case(
        lambda s: s.f(), lambda s: setattr(s, "f", functools.partial(float, 5)), f=lambda: functools.partial(float, 2)
    ),
    "object in a partial": case(
        lambda s: s.f(),
        lambda s: setattr(s.f.args[0], "scale", 5.0),
        f=lambda: functools.partial(lambda one: one.scale, Config()),
    ),
    "integer for a float": case(lambda s: isinstance(s.a, int) + 1, lambda s: setattr(s, "a", 1), a=1.0),
    "sign of zero": case(lambda s: str(s.a).startswith("-") + 1, lambda s: setattr(s, "a", -0.0), a=0.0),
    "requires_grad": case(lambda s: s.w.requires_grad + 1, lambda s: s.w.requires_grad_(), w=lambda: torch.ones(1)),
    "dtype of a tensor": case(
        lambda s: s.w.element_size(), lambda s: setattr(s.w, "data", torch.ones(1).double()), w=lambda: torch.ones(1)
    ),
    "forward of an instance": case(
        lambda s: s.inner.forward(1.0), lambda s: setattr(s.inner, "forward", lambda _: 5.0), inner=lambda: _Inner()
    ),
}


class _Inner(nn.Module):
    @override
    def forward(self, x: Any) -> Any:
        return x * 2


def _call(net: nn.Module, x: Tensor) -> Any:
    return net(x)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("form", ["function", "module"])
@pytest.mark.parametrize("name", CASES)
def test_a_change_shows_in_the_next_call(name: str, form: str) -> None:
    WHERE.__dict__["scale"] = 2.0
    layer, change, undo = CASES[name]()
    net = nn.Sequential(layer)
    function: Any = capture(net) if form == "module" else capture(functools.partial(_call, net))
    try:
        for number in range(10):
            if number == 4:
                before = recordings(function).replays
                assert before > 0, "it replays before the change"
                change()
            x = torch.full((2,), float(number + 1))
            assert torch.equal(function(x), layer.forward(x)), number
        assert recordings(function).replays > before, "it replays again"
    finally:
        undo()
