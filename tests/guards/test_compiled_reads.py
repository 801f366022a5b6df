"""What compiled parts of a body look up: Dynamo's guards tell, so each change is seen that makes torch compile anew.

Each program exists twice, with a compiled part in both; one of the two is captured. Both see the same change.
"""

from __future__ import annotations

import enum
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from attrs import define, field
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, recordings, warmup
from tests.support.rows import rand


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """No compiled code, and no module, of another test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    for name in [name for name in sys.modules if name.startswith("made_for_a_test_")]:
        del sys.modules[name]


compiled = functools.partial(torch.compile, backend="eager")


class Mode(enum.Enum):
    """A member with a value, and one that is read by name."""

    LOW = 1.0
    HIGH = 3.0


class Pair(NamedTuple):
    """A part of a config."""

    scale: float
    shift: float


@define
class Config:
    """Plain values that layers read."""

    scale: float = 2.0
    mode: Mode = Mode.LOW
    pair: Pair = field(factory=lambda: Pair(1.0, 2.0))
    table: dict[str, float] = field(factory=lambda: {"a": 1.0})


class Space(types.SimpleNamespace):
    """What one program keeps, so that its twin has another."""


_numbers = itertools.count()


def globals_of(text: str) -> dict[str, Any]:
    """A module of its own, so that globals belong to one twin. Dynamo looks for it by its name."""
    module = types.ModuleType(f"made_for_a_test_{next(_numbers)}")
    sys.modules[module.__name__] = module
    vars(module)["torch"] = torch
    exec(text, vars(module))  # noqa: S102 - a module of the test
    return vars(module)


class Layer(nn.Module):
    """Reads its config, a counter of its own and a buffer."""

    bias: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config: Any = config
        self.k = 2.0
        self.register_buffer("bias", torch.zeros(3))

    @override
    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.bias * self.config.pair.shift
        return self.inner(x) + change

    def inner(self, x: Tensor) -> Tensor:
        """Is replaced."""
        result: Tensor = x * self.config.scale * self.k + self.config.table["a"] * self.config.mode.value
        return result


class Net(nn.Module):
    """Layers, of which each is compiled."""

    def __init__(self, config: Config, which: str) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList([Layer(config) for _ in range(2)])
        for layer in self.layers:
            if which == "forward":
                layer.forward = compiled(layer.forward)
            elif which == "in place":
                layer.compile(backend="eager")
        if which == "module":
            self.layers = nn.ModuleList([compiled(layer) for layer in self.layers])  # type: ignore[misc]

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def layers(which: str) -> Any:
    """Gives a program of layers, with what changes it."""

    def make() -> tuple[Callable[[Tensor], Tensor], Any]:
        config = Config()
        net = Net(config, which)
        plain = [getattr(layer, "_orig_mod", layer) for layer in net.layers]
        return net, Space(config=config, net=net, plain=plain)

    return make


def changes_of_layers() -> dict[str, Callable[[Any], Any]]:
    """Changes by name."""

    def method(space: Any) -> None:
        space.plain[0].inner = types.MethodType(lambda self, x: x - 5.0 * self.k, space.plain[0])

    def hook(space: Any) -> None:
        space.plain[0].register_forward_hook(lambda module, args, out: out * 3.0)

    return {
        "number of a config": lambda space: setattr(space.config, "scale", 7.0),
        "member of an enum": lambda space: setattr(space.config, "mode", Mode.HIGH),
        "tuple": lambda space: setattr(space.config, "pair", Pair(1.0, 9.0)),
        "value in a dict": lambda space: space.config.table.update(a=4.0),
        "attribute of a layer": lambda space: setattr(space.plain[1], "k", 5.0),
        "buffer": lambda space: setattr(space.plain[1], "bias", torch.ones(3)),
        "buffer in place": lambda space: space.plain[1].bias.add_(1.0),
        "method": method,
        "hook": hook,
        "another config": lambda space: setattr(space.plain[0], "config", Config(scale=11.0)),
        "training": lambda space: space.net.eval(),
    }


TEXT = """
FACTOR = 2.0
class Holder: scale = 3.0
HOLD = Holder()
TABLE = {"x": 1.0, 2: 5.0}
ITEMS = [1.0, 2.0]
def helper(x, times=4.0): return x * FACTOR + times
def other(x): return x - 100.0
def passed_on(function):
    import functools
    @functools.wraps(function)
    def inner(*args, **kwargs): return function(*args, **kwargs) * WRAPPED
    return inner
WRAPPED = 1.5
@passed_on
def wrapped(x): return x + 1.0
def make(scale):
    def nested(x): return x * scale
    def outer(x): return nested(x) + scale
    return outer
nested = make(3.0)
CALLS = {"one": helper, "two": other}
CHOICE = "one"
def partly(x):
    x = helper(x)
    torch._dynamo.graph_break()
    return later(x) * HOLD.scale
def later(x): return x + TABLE["x"] + ITEMS[1]
def part(x):
    x = wrapped(helper(x)) + TABLE[2]
    x = nested(x) * HOLD.scale + sum(ITEMS)
    return CALLS[CHOICE](x) if len(ITEMS) < 5 else x
BREAKS = False
def body(x): return (partly_c(x) if BREAKS else part_c(x)).relu() + x
"""


def functions(*, breaks: bool) -> Any:
    """Gives a program of functions in a module of its own."""

    def make() -> tuple[Callable[[Tensor], Tensor], Any]:
        scope = globals_of(TEXT)
        scope.update(BREAKS=breaks, part_c=compiled(scope["part"]), partly_c=compiled(scope["partly"]))
        return scope["body"], scope

    return make


def changes_of_functions() -> dict[str, Callable[[Any], Any]]:
    """Changes by name."""

    def cell(scope: Any) -> None:
        scope["nested"].__closure__[1].cell_contents = 8.0

    def inner_cell(scope: Any) -> None:
        scope["nested"].__closure__[0].cell_contents = lambda x: x - 40.0

    return {
        "global": lambda scope: scope.update(FACTOR=5.0),
        "attribute": lambda scope: setattr(scope["HOLD"], "scale", 8.0),
        "attribute of a class": lambda scope: setattr(scope["Holder"], "scale", 8.0),
        "value in a dict": lambda scope: scope["TABLE"].update({2: 9.0, "x": 3.0}),
        "item of a list": lambda scope: scope["ITEMS"].__setitem__(1, 6.0),
        "length of a list": lambda scope: scope["ITEMS"].extend([1.0, 2.0, 3.0]),
        "default": lambda scope: setattr(scope["helper"], "__defaults__", (9.0,)),
        "code": lambda scope: setattr(scope["helper"], "__code__", scope["other"].__code__),
        "function": lambda scope: scope.update(helper=scope["other"]),
        "global of a wrapper": lambda scope: scope.update(WRAPPED=-1.0),
        "cell": cell,
        "function in a cell": inner_cell,
        "function in a dict": lambda scope: scope["CALLS"].update(one=scope["other"]),
        "key": lambda scope: scope.update(CHOICE="two"),
        "builtin": lambda scope: scope.update(len=lambda _: 9),
    }


_QUICK = (
    "forward: number", "forward: method", "in place: hook", "module: another", "functions: global", "functions: cell",
    "functions: function in a cell", "functions: code", "functions with a break: attribute",
)  # fmt: skip
CASES = [
    *[
        (f"{which}: {name}", layers(which), change)
        for which in ("forward", "in place", "module")
        for name, change in changes_of_layers().items()
    ],
    *[
        (f"functions{' with a break' * breaks}: {name}", functions(breaks=breaks), change)
        for breaks in (False, True)
        for name, change in changes_of_functions().items()
    ],
]


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:CG201")  # a number that changed is a tensor for Dynamo, and read on the host
@pytest.mark.parametrize(
    ("make", "change"),
    [
        pytest.param(make, change, id=name, marks=() if name.startswith(_QUICK) else pytest.mark.slow)
        for name, make, change in CASES
    ],
)
def test_a_change_of_what_compiled_code_reads_is_seen(make: Any, change: Any) -> None:
    """Replays before the change, is right after it, and replays again."""
    (plain, of_plain), (body, of_body) = make(), make()
    captured = capture(body)
    with torch.no_grad():
        for number in range(5):
            x = rand(2, 3, seed=number)
            assert torch.equal(captured(x), plain(x)), "before the change"
        before = recordings(captured).replays
        assert before > 0, recordings(captured).findings
        change(of_plain)
        change(of_body)
        for number in range(5, 11):
            x = rand(2, 3, seed=number)
            assert torch.equal(captured(x), plain(x)), f"in call {number - 4} after the change"
        totals = recordings(captured)
        assert totals.replays > before or any(one.code == "CG201" for one in totals.findings)


def test_compiled_code_that_is_not_called_costs_nothing_to_change() -> None:
    """Globals that only another compiled function reads are not guarded."""
    scope = globals_of(TEXT)
    scope.update(part_c=compiled(scope["part"]), partly_c=compiled(scope["partly"]))
    captured = capture(scope["body"])
    with torch.no_grad():
        for number in range(4):
            captured(rand(2, 3, seed=number))
        before = recordings(captured).replays
        scope["later"] = scope["other"]  # only read by ``partly``, which did not run
        for number in range(4):
            captured(rand(2, 3, seed=number))
    assert recordings(captured).replays == before + 4


def test_a_part_whose_guards_torch_does_not_show_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that no longer tells makes such bodies eager, never wrong."""
    scope = globals_of(TEXT)
    scope.update(part_c=compiled(scope["part"]), partly_c=compiled(scope["partly"]))
    captured = capture(scope["body"])
    monkeypatch.delattr(sys.modules["torch._dynamo.utils"], "orig_code_map")
    captured(rand(2, 3, seed=0))  # torch compiles in it, so it is watched once more
    with pytest.warns(CaptureWarning, match="guards torch does not show"):
        captured(rand(2, 3, seed=1))
    captured(rand(2, 3, seed=2))
    assert recordings(captured).replays == 0


@torch.compile(backend="eager")
def compiled_here(x: Tensor) -> Tensor:
    return x * 2 + SHIFT


SHIFT = 1.0


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_what_the_compiler_puts_among_globals_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that leaves no trace compiles: the code that Dynamo made then needs its names in later calls, too."""
    mine, x = capture(lambda x: compiled_here(x) + 1), torch.ones(3)
    with torch.no_grad():
        for number in range(3):
            warmup(mine)(x)
            assert torch.equal(compiled_here(x), x * 2 + SHIFT)
            assert torch.equal(mine(x), x * 2 + SHIFT + 1)
            monkeypatch.setitem(globals(), "SHIFT", number + 2.5)
