"""A watch sees operators without a dispatch mode: what a composite operator calls is what plain eager calls."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from capture import capture, config, recordings
from capture.torch_private import operator_watch
from capture.torch_private.operator_watch import OperatorWatch, helped, hidden, is_on, unseen
from tests.support.device import DEVICE, EXECUTES

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


def gradient_of(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        f(x).sum().backward()
        assert x.grad is not None
        return x.grad

    return body


def prod_and_sum(x: Tensor) -> Tensor:
    return x.prod(1) + x.sum(1)


OTHER_UNDER_A_MODE: dict[str, Callable[[Tensor], Tensor]] = {
    "singular values": torch.linalg.svdvals,
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x @ x.mT),
    "condition": torch.linalg.cond,
    "nuclear norm": lambda x: torch.linalg.norm(x, "nuc"),
    "gradient of prod": gradient_of(lambda x: x.prod(1)),
    "gradient of prod of all": gradient_of(torch.prod),
    "gradient of cumprod": gradient_of(lambda x: x.cumprod(1)),
    "gradient of a norm": gradient_of(lambda x: torch.linalg.norm(x, "nuc").reshape(1)),
    "matmul": lambda x: x.reshape(2, 8, 16) @ x.reshape(1, 16, 16)[:, :, :5],
    "gradient of both": gradient_of(prod_and_sum),
}


def other_under_a_mode(name: str) -> Callable[[Tensor], Tensor]:
    """One of these bodies. The test is skipped where it cannot be recorded."""
    if DEVICE.type != "cpu" and "values" in name:
        pytest.skip("solvers of a device look at a status on the host")
    return OTHER_UNDER_A_MODE[name]


@pytest.mark.skipif(not operator_watch.has_key, reason="under a mode torch calls other operators")
@pytest.mark.parametrize("name", OTHER_UNDER_A_MODE)
def test_composite_operators_have_eagers_bits_in_every_call(name: str) -> None:
    body = other_under_a_mode(name)
    captured = capture(body)
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(16, 16, device=DEVICE)
        if seed in (3, 6):
            x[1, 2] = 0.0  # torch looks on the host whether there are zeros, and computes gradients otherwise
        if seed == 6:
            x[1, 3] = 0.0
        assert torch.equal(captured(x.clone()), body(x.clone())), seed
    assert recordings(captured).replays or not EXECUTES


class Own(Tensor):
    """A class of its own that does nothing."""


class OwnNew(Tensor):
    """A class with a constructor."""

    @staticmethod
    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls, *args)


class OwnInit(Tensor):
    """A class whose objects have more."""

    def __init__(self, *args: Any) -> None:
        self.numbers = len(args)


def _loaded() -> Tensor:
    buffer = io.BytesIO()
    torch.save(nn.Parameter(torch.ones(3)), buffer)
    buffer.seek(0)
    found: Tensor = torch.load(buffer, weights_only=True)
    return found


MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "parameter": lambda x: nn.Parameter(x.detach()),
    "empty parameter": lambda x: nn.Parameter(),
    "buffer": lambda x: nn.Buffer(x),
    "as subclass": lambda x: x.as_subclass(Own),
    "of a subclass": lambda x: x.as_subclass(Own) * 2,
    "make subclass": lambda x: Tensor._make_subclass(Own, x.detach()),
    "made of numbers": lambda x: Own([1.0, 2.0]),
    "made of sizes": lambda x: Own(2, 3),
    "made of a tensor": lambda x: Own(x),
    "made by name": lambda x: Tensor.__new__(Own, x),
    "made with a constructor": lambda x: OwnNew(x),
    "made with more": lambda x: OwnInit(x),
    "deep copy": lambda x: copy.deepcopy(nn.Parameter(x.detach())),
    "copy": lambda x: copy.copy(nn.Parameter(x.detach())),
    "new module": lambda x: nn.Linear(2, 2).weight,
    "converted module": lambda x: nn.Linear(2, 2).double().weight,
    "loaded": lambda x: _loaded(),
    "lazy module": lambda x: nn.LazyLinear(3)(torch.ones(2, 4)),
    "fake": lambda x: torch._subclasses.FakeTensorMode().from_tensor(x).shape,
    "computed in shapes": lambda x: fake_sum(x),
}


def fake_sum(x: Tensor) -> Any:
    with torch._subclasses.FakeTensorMode() as mode:
        return (mode.from_tensor(x) @ torch.ones(4, 2)).shape


@pytest.mark.parametrize("name", MAKERS)
def test_what_gives_a_tensor_its_class_works_in_a_body(name: str) -> None:
    def body(x: Tensor) -> tuple[str, Tensor]:
        return type(MAKERS[name](x)).__name__, x * 2

    captured = capture(body)
    for seed in range(3):
        x = torch.full((3, 4), float(seed))
        assert captured(x)[0] == body(x)[0]
        assert torch.equal(captured(x)[1], body(x)[1])


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    @override
    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def test_a_mode_of_the_body_sees_what_it_sees_eagerly() -> None:
    def body(x: Tensor) -> tuple[Tensor, list[str]]:
        with Counting() as mode:
            y = torch.linalg.svdvals(x) + 1
        return y * 2, mode.seen

    captured = capture(body)
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(4, 4, device=DEVICE)
        (ours, seen), (theirs, expected) = captured(x), body(x)
        assert torch.equal(ours, theirs)
        assert seen == expected


class Seeing(OperatorWatch):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    @override
    def see(self, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seen.append((str(op), threading.get_ident()))
        (args[0] if args and isinstance(args[0], Tensor) else torch.ones(1)).clone()  # which it does not see
        return op(*args, **kwargs)


class Reentrant(torch.autograd.Function):
    """A backward pass inside a backward pass, and so on: torch takes other threads from some depth on."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Reentrant.apply(x, ctx.depth - 1).sum().backward()  # type: ignore[no-untyped-call]
        return gradient * 3, None


def test_operators_in_torchs_own_threads_are_seen() -> None:
    x, depth = torch.ones(1, requires_grad=True), 70
    y = Reentrant.apply(x, depth)  # type: ignore[no-untyped-call]
    with Seeing() as watch:
        y.sum().backward()
    assert [op for op, _ in watch.seen].count("aten.mul.Tensor") == depth + 1
    assert len({thread for _, thread in watch.seen}) > 1
    assert x.grad is not None


@pytest.mark.skipif(not operator_watch.has_key, reason="a mode is left out by torch's own blocks")
def test_blocks_in_which_nothing_is_seen() -> None:
    with Seeing() as watch:
        assert is_on()
        for block in (hidden, unseen):
            with block():
                torch.ones(2)
        left = hidden()
        left.__enter__()
        assert not is_on()
        del left  # as where an interrupt came before the block began
        torch.ones(2)
        with watch:
            torch.zeros(2)
        torch.ones(2)
    torch.ones(2)
    assert not is_on()
    assert [op for op, _ in watch.seen] == ["aten.ones.default", "aten.zeros.default", "aten.ones.default"]


@pytest.mark.skipif(not operator_watch.has_key, reason="a mode is left out by torch's own blocks")
@pytest.mark.parametrize("kind", [hidden, unseen])
def test_a_block_that_dies_after_its_watch_ends_nothing(kind: type[hidden]) -> None:
    """The traceback of an interrupt keeps it. A key that is left on would have every tensor seen by Python."""
    with Seeing():
        left = kind()
        left.__enter__()
    operator_watch.put_state((None, False, False))
    del left
    assert operator_watch.state() == (None, False, False)
    with Seeing() as watch:
        torch.ones(2)
    assert len(watch.seen) == 1


def test_an_error_leaves_the_watch_on() -> None:
    with Seeing() as watch, helped():
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        torch.ones(2)
    assert [op for op, _ in watch.seen][-2:] == ["aten.mm.default", "aten.ones.default"]


def test_another_thread_is_not_watched() -> None:
    def other() -> None:
        torch.zeros(2)

    with Seeing() as watch:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert not watch.seen


WITHOUT = """
import torch
def missing(_): raise RuntimeError("could not parse dispatch key")
torch._C._dispatch_key_parse = missing
from capture import capture, config, recordings
from capture.torch_private import operator_watch
assert not operator_watch.has_key
def step(x):
    w = x.detach().requires_grad_()
    (w @ w).relu().sum().backward()
    return w.grad
captured = capture(step)
for seed in range(6):
    torch.manual_seed(seed)
    x = torch.randn(4, 4)
    assert torch.equal(captured(x), step(x))
assert recordings(captured).replays
"""


def test_without_the_key_a_watch_is_a_mode() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_this_torch_has_the_key_if_it_is_below_modes() -> None:
    key, python = torch._C._dispatch_key_parse("Fake"), torch._C.DispatchKey.Python
    assert operator_watch.has_key == (key.value < python.value)


UNWRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "returned": lambda x: torch.max_pool1d(x, 2),
    "read": lambda x: torch.max_pool1d(x, 2) + 1,
    "of what the body made": lambda x: torch.max_pool1d(x * 2, 2).relu(),
    "listed": lambda x: sum(torch.max_pool1d(x, 2).flatten().tolist()),
    "asked": lambda x: x * 2 if torch.max_pool1d(x, 2).sum() > 0 else x * 3,
    "made by the body": lambda x: torch.empty_like(x).copy_(x) * 2,
    "filled": lambda x: torch.empty(3).fill_(2.0) * x.sum(),
    "filled in parts": lambda x: filled_in_parts(x),
    "given to write": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
}


def filled_in_parts(x: Tensor) -> Tensor:
    made = x.new_empty(2, 4)
    made[0], made[1] = x[0, 0, :4], x[0, 0, 4:]
    return made * 2


@pytest.mark.skipif(DEVICE.type != "cpu", reason="torch calls operators there, and graphs have what kernels write")
@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_torch_writes_without_an_operator_is_right(name: str) -> None:
    """``max_pool1d`` without gradients makes memory, and fills it itself."""
    body = UNWRITTEN[name]
    captured = capture(body)
    with torch.no_grad(), config.patch(poison=True):
        for seed in range(8):
            torch.manual_seed(seed)
            x = torch.randn(2, 3, 8)
            ours, theirs = captured(x.clone()), body(x.clone())
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), seed
    assert recordings(captured).replays or name == "listed" or not EXECUTES
