"""Plain values on modules that code below the captured function reads: another value makes another recording."""

from __future__ import annotations

import gc
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import Recordings, capture, recordings
from tests.support.device import use_device

CALLS = 4
pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def device() -> None:
    use_device()


def gain_of(module: Any) -> float:
    return float(module.gain)


class Adapter(nn.Module):
    """Reads attributes in its ``forward``, through a property, and in a function that gets the module."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scaling = {"default": 0.5}
        self.active = ["default"]
        self._is_off = False
        self.gain = 1.5
        self.shape: tuple[int, ...] = (8,)
        self.unread = 0
        self.act: Callable[[Tensor], Tensor] = torch.tanh

    @property
    def is_off(self) -> bool:
        return self._is_off

    @override
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.act(self.base(x)) * gain_of(self)
        if not self.is_off:
            for name in self.active:
                found = found + self.down(x) * self.scaling[name]
        if hasattr(self, "extra"):
            found = found + self.extra  # type: ignore[operator]
        return found.reshape(-1, *self.shape)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Adapter() for _ in range(3)])
        self.drop = nn.Dropout(0.5)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.drop(x)
        return found


def _set(name: str, value: Any) -> Callable[[Net], None]:
    return lambda net: setattr(net.layers[1], name, value)


def _layer(net: Net) -> Adapter:
    found = net.layers[1]
    assert isinstance(found, Adapter)
    return found


def _quieter(module: nn.Module) -> None:
    if isinstance(module, Adapter):
        module.gain = 0.1


def _halved(net: Net) -> dict[str, Tensor]:
    return {name: tensor.detach() / 2 for name, tensor in net.state_dict().items()}


EVENTS: dict[str, Callable[[Net], Any]] = {
    "a flag behind a property": _set("_is_off", True),
    "a number that a function reads": _set("gain", 2.5),
    "a number in a dict": lambda net: _layer(net).scaling.update(default=2.0),
    "another dict": _set("scaling", {"default": 3.0}),
    "one more in a list": lambda net: _layer(net).active.append("default"),
    "a tuple": lambda net: setattr(net.layers[2], "shape", (2, 4)),
    "a function": _set("act", torch.sin),
    "an attribute that was not there": _set("extra", 1.0),
    "a parameter that was not there": lambda net: _layer(net).register_parameter("extra", nn.Parameter(torch.ones(1))),
    "of torch's module": lambda net: setattr(net.drop, "p", 0.25),
    "in all layers": lambda net: net.apply(_quieter),
    "while parameters move": lambda net: net.apply(_quieter).load_state_dict(net.state_dict(), assign=True),
    "while parameters are others": lambda net: net.apply(_quieter).load_state_dict(_halved(net), assign=True),
}


def forms(net: Net) -> dict[str, Callable[[], Any]]:
    return {"function": lambda: capture(lambda x: net(x)), "module": lambda: capture(net)}


@pytest.mark.one_in(18)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("form", ["function", "module"])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_another_value_is_another_recording(event: str, form: str, grad: bool) -> None:
    mine, theirs = Net(), Net()
    captured = forms(mine)[form]()

    def compare(number: int) -> None:
        x = torch.arange(16.0).reshape(2, 8) / 16 + number
        torch.manual_seed(number)
        expected = theirs(x)
        torch.manual_seed(number)
        assert torch.equal(captured(x), expected)

    with torch.set_grad_enabled(grad):
        for number in range(CALLS):
            compare(number)
        for net in (mine, theirs):
            EVENTS[event](net)
        for number in range(CALLS):
            compare(number)
    counted = recordings(captured)
    assert counted.recordings >= 2
    assert counted.replays > 0
    assert not counted.eager_calls


def _switched(calls: int, every: int) -> Recordings:
    """Make calls; the last of every ``every`` calls has a flag of all layers on."""
    net, twin = Net(), Net()
    captured = capture(lambda x: net(x))
    with torch.no_grad():
        for number in range(calls):
            for module in (net, twin):
                for layer in module.eval().layers:
                    setattr(layer, "_is_off", number % every == every - 1)  # noqa: B010 - no parameter or module
            x = torch.full((2, 8), float(number))
            assert torch.equal(captured(x), twin(x))
    return recordings(captured)


def test_a_switch_back_and_forth_keeps_both_recordings() -> None:
    counted = _switched(12, 3)
    assert counted.recordings <= 3
    assert counted.replays >= 5


def test_a_switch_in_every_call_replays_both_ways() -> None:
    """A switch that is thrown in each call, as a policy and its reference do, which are one model with and without
    adapters."""
    counted = _switched(10, 2)
    assert (counted.recordings, counted.eager_calls) == (2, 0)
    assert counted.replays >= 4


def test_threads_watch_at_once() -> None:
    nets = [Net().eval() for _ in range(4)]
    functions = [capture(lambda x, net=net: net(x)) for net in nets]
    together = threading.Barrier(4)
    wrong = []

    def run(net: Net, function: Any) -> None:
        use_device()
        with torch.no_grad():
            for number in range(8):
                together.wait()
                if number == 4:
                    _quieter(_layer(net))
                x = torch.full((2, 8), float(number))
                if not torch.equal(function(x), net(x)):
                    wrong.append(number)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(nets, functions, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert "__getattribute__" not in nn.Module.__dict__


def test_what_the_body_does_not_read_may_change() -> None:
    net = Net().eval()
    captured = capture(lambda x: net(x))
    with torch.no_grad():
        for number in range(8):
            for name in ("unread", "not_there"):
                setattr(net.layers[0], name, number)
            x = torch.full((2, 8), float(number))
            assert torch.equal(captured(x), net(x))
    counted = recordings(captured)
    assert (counted.recordings, counted.observations) == (1, 1)


def test_an_equal_value_changes_nothing() -> None:
    net = Net().eval()
    captured = capture(lambda x: net(x))
    with torch.no_grad():
        for number in range(8):
            for layer in net.layers:
                for name, value in (("gain", float(f"1.{5}")), ("_is_off", bool(0))):
                    setattr(layer, name, value)
            x = torch.full((2, 8), float(number))
            assert torch.equal(captured(x), net(x))
    assert recordings(captured).recordings == 1


def test_a_value_that_is_another_in_every_call_ends_in_eager_calls() -> None:
    net, twin = Net(), Net()
    captured = capture(lambda x: net(x), max_recordings=3)

    @torch.no_grad()
    def run() -> None:
        for number in range(30):
            for one in (net, twin):
                one.eval()
                _set("gain", str(number // 3 / 4))(one)
            x = torch.full((2, 8), float(number))
            assert torch.equal(captured(x), twin(x))

    with pytest.warns(match=r"CG901.*'net\.layers\[1\]\.gain' differs"):
        run()


def test_the_bodys_own_compiler_is_not_in_the_way() -> None:
    """A watched run leaves no ``__getattribute__`` on modules' classes, at which ``torch.compile`` in the body gives
    up."""
    net = Net().eval()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    captured = capture(lambda x: compiled(x))
    with torch.no_grad():
        for number in range(CALLS):
            x = torch.full((2, 8), float(number))
            assert torch.equal(captured(x), net(x))
    assert "__getattribute__" not in nn.Module.__dict__


class Agent:
    """A plain object whose methods read attributes that the captured method does not name."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(8, 8)
        self.epsilon, self.unread, self.scales = 0.5, 0, {"a": 2.0}

    def noisy(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x) * self.epsilon + self.scales["a"]
        return found if not hasattr(self, "greedy") else found.relu()

    def act(self, x: Tensor) -> Tensor:
        return self.noisy(x)

    @capture
    def step(self, x: Tensor) -> Tensor:
        return self.noisy(x)


class Odd(Agent):
    """An object with its own ``__getattribute__`` and ``__eq__``."""

    __hash__ = None  # type: ignore[assignment]

    @override
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("scales" if name == "alias" else name)

    @override
    def __eq__(self, other: object) -> bool:
        return True


@dataclass(eq=False)
class Record(Agent):
    extra: int = 1

    def __post_init__(self) -> None:
        super().__init__()


CHANGES: dict[str, Callable[[Agent], Any]] = {
    "a number": lambda agent: setattr(agent, "epsilon", 0.25),
    "in a dict": lambda agent: agent.scales.update(a=3.0),
    "one that was not there": lambda agent: setattr(agent, "greedy", True),
    "all of them": lambda agent: vars(agent).update(epsilon=0.125, scales={"a": 1.0}, greedy=1),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("kind", "form"),
    [(Agent, "method"), (Agent, "bound"), (Agent, "closure"), (Odd, "bound"), (Odd, "closure"), (Record, "method")],
)
def test_objects_that_a_body_is_bound_to_or_names(change: str, form: str, kind: type[Agent]) -> None:
    mine, theirs = kind(), kind()
    if form == "method":
        function: Any = mine.step
    else:
        function = capture(mine.act if form == "bound" else lambda x: mine.act(x))
    with torch.no_grad():
        for number in range(12):
            if number == 4:
                for agent in (mine, theirs):
                    CHANGES[change](agent)
            for agent in (mine, theirs):
                agent.unread = number
            x = torch.full((2, 8), float(number))
            assert torch.equal(function(x), theirs.act(x))
    counted = recordings(function)
    assert (counted.recordings, counted.eager_calls) == (2, 0)
    assert "__getattribute__" not in Agent.__dict__
    assert type(Odd.__dict__["__getattribute__"]) is types.FunctionType


class Sealed(type):
    @override
    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{cls.__name__} is sealed")


class SealedAgent(Agent, metaclass=Sealed):
    pass


def test_a_class_that_nobody_may_change() -> None:
    agent = SealedAgent()
    captured = capture(lambda x: agent.act(x))
    with torch.no_grad():
        for number in range(CALLS):
            x = torch.full((2, 8), float(number))
            assert torch.equal(captured(x), agent.act(x))
    assert recordings(captured).replays > 0


def test_nothing_keeps_an_object_alive() -> None:
    agent = Agent()
    with torch.no_grad():
        for number in range(6):
            agent.epsilon = 1.0 + number // 3
            agent.step(torch.ones(2, 8))
    gone = weakref.ref(agent)
    del agent
    gc.collect()
    assert gone() is None
