"""A container or plain object among the arguments holds a tensor that needs gradients: forward and backward are
recorded apart, on aliases of that tensor in containers of their own. What the body writes there is the caller's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from tests.runtime.test_decisions import Step, Wrap, _every_body_pays, twins  # noqa: F401
from tests.support.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


class Plain:
    def __init__(self) -> None:
        self.buf, self.w = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE, requires_grad=True)
        self.n, self.best, self.log, self.inner = 0, 9.0, list[Any](), {"a": torch.zeros(3, device=DEVICE)}
        self.other: Any = None


@dataclasses.dataclass
class Data:
    buf: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(3, device=DEVICE))
    w: Tensor = dataclasses.field(default_factory=lambda: torch.ones(3, device=DEVICE, requires_grad=True))
    n: int = 0
    best: float = 9.0
    log: list[Any] = dataclasses.field(default_factory=list)
    inner: dict[str, Tensor] = dataclasses.field(default_factory=lambda: {"a": torch.zeros(3, device=DEVICE)})
    other: Any = None


KINDS: dict[str, Callable[[], Any]] = {"object": Plain, "dataclass": Data, "dict": lambda: dict(vars(Plain()))}


class Access:
    """Members of an object or dict by name."""

    def __init__(self, holder: Any) -> None:
        object.__setattr__(self, "holder", holder)

    def __getattr__(self, name: str) -> Any:
        holder = object.__getattribute__(self, "holder")
        return holder[name] if type(holder) is dict else getattr(holder, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        holder = object.__getattribute__(self, "holder")
        if type(holder) is dict:
            holder[name] = value
        else:
            setattr(holder, name, value)


def replaced(s: Any, x: Tensor) -> Any:
    y = s.w * x
    s.buf = s.buf + x
    return y


def counted(s: Any, x: Tensor) -> Any:
    y = s.w * x
    if y.sum() > 0:
        s.n += 1
    return y


def with_its_graph(s: Any, x: Tensor) -> Any:
    y = s.w * x
    s.other = y.detach()
    return y


def kept_itself(s: Any, x: Tensor) -> Any:
    s.other = s.w
    return s.w * x + s.buf


def logged(s: Any, x: Tensor) -> Any:
    y = s.w * x
    s.log.append(y.detach().sum())
    s.inner["a"] = s.inner["a"] + x
    s.n += 1
    return y


def the_best(s: Any, x: Tensor) -> Any:
    y = s.w * x
    s.best = min(s.best, y.sum().item())
    return y


def in_place(s: Any, x: Tensor) -> Any:
    s.buf.add_(x)
    return s.w * s.buf


def raised(s: Any, x: Tensor) -> Any:
    s.n += 1
    s.buf = s.buf + x
    if s.n % 7 == 0:
        raise ValueError(s.n)
    return s.w * x


BODIES = [replaced, counted, with_its_graph, kept_itself, logged, the_best, in_place, raised]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_body_writes_there(kind: str, body: Callable[[Any, Tensor], Any]) -> None:
    def program(wrap: Wrap) -> Step:
        state = KINDS[kind]()
        members = Access(state)
        f = wrap(lambda s, x: body(Access(s), x))

        def step(n: int) -> Any:
            members.w.grad = None
            result = f(state, torch.randn(3, device=DEVICE) + n % 3)
            result.square().sum().backward()
            kept = [members.buf, members.w.grad, members.n, members.best, list(members.log), dict(members.inner)]
            return result.detach(), kept, members.other is members.w, members.other is None

        return step

    with torch.enable_grad():
        twins(program, 30)


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_is_handed_back(kind: str) -> None:
    def program(wrap: Wrap) -> Step:
        state = KINDS[kind]()

        @wrap
        def f(s: Any, x: Tensor) -> Any:
            members = Access(s)
            members.buf = members.buf + x
            return s, members.w * x

        def step(n: int) -> Any:
            given, result = f(state, torch.full((3,), float(n), device=DEVICE))
            result.sum().backward()
            return given is state, Access(given).buf, Access(state).w.grad

        return step

    with torch.enable_grad():
        twins(program, 20)


def test_a_list() -> None:
    def program(wrap: Wrap) -> Step:
        state = [torch.ones(3, device=DEVICE, requires_grad=True), torch.zeros(3, device=DEVICE)]

        @wrap
        def f(s: Any, x: Tensor) -> Any:
            s[1] = s[1] + x
            if len(s) < 6:
                s.append(x * 2)
            return s[0] * x

        def step(n: int) -> Any:
            result = f(state, torch.full((3,), float(n), device=DEVICE))
            result.sum().backward()
            return result.detach(), [one.detach() for one in state], state[0].grad

        return step

    with torch.enable_grad():
        twins(program, 20)
