"""Values that a body names (globals, cells, attributes) and that modules hold: after a change no call gets a recording
that was made with the old value."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, config, recordings
from tests.support.device import REBINDS
from tests.support.keys import A, _setting, bits, check_same, norm, x_of
from tests.support.keys import fresh as fresh

# ----------------------------------------------------------------------------------------- modules and named values


class Config:
    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.inner = types.SimpleNamespace(shift=0.5)


class Block(nn.Module):
    """Reads everything a body can name on itself."""

    bonus = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.act: nn.Module = nn.Tanh()
        self.scale = 2.0
        self.cfg = Config(3.0)
        self.names = ["a", "b"]
        self.flags = {"on": True}
        self.extra: Tensor | None = None
        self.call: Callable[[Tensor], Tensor] = torch.relu

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.linear(x)))
        x = self.drop(x) * self.scale * self.cfg.scale + self.bonus + self.cfg.inner.shift
        x = self.call(x) + len(self.names) + (1.0 if self.flags["on"] else 0.0)
        return x if self.extra is None else x + self.extra


def _rename_all(block: Block) -> None:
    block.names = ["a", "b", "c"]


CHANGES: dict[str, Callable[[Block], object]] = {
    "scale": lambda block: setattr(block, "scale", 5.0),
    "int-scale": lambda block: setattr(block, "scale", 2),
    "cfg.scale": lambda block: setattr(block.cfg, "scale", 7.0),
    "cfg": lambda block: setattr(block, "cfg", Config(11.0)),
    "cfg.inner.shift": lambda block: setattr(block.cfg.inner, "shift", 1.5),
    "class-attribute-shadowed": lambda block: setattr(block, "bonus", 4.0),
    "list-member": lambda block: block.names.append("c"),
    "list": _rename_all,
    "dict-member": lambda block: block.flags.update(on=False),
    "module": lambda block: setattr(block, "act", nn.ReLU()),
    "submodule": lambda block: setattr(block, "linear", nn.Linear(4, 4, bias=False)),
    "function": lambda block: setattr(block, "call", torch.sigmoid),
    "tensor-appears": lambda block: setattr(block, "extra", x_of(9, 4)),
    "train": lambda block: block.train(),
    "train-part": lambda block: block.norm.train(),
    "weight-in-place": lambda block: block.linear.weight.mul_(2),
    "weight-replaced": lambda block: setattr(block.linear, "weight", nn.Parameter(x_of(8, 4, 4))),
    "bias-removed": lambda block: setattr(block.linear, "bias", None),
    "buffer-replaced": lambda block: setattr(block.norm, "running_mean", x_of(7, 4)),
    "data": lambda block: setattr(block.linear.weight, "data", x_of(8, 4, 4)),
    "to-and-fro": lambda block: block.linear.double().float(),
    "forward-hook": lambda block: block.act.register_forward_hook(lambda module, args, output: output * 2),
    "forward-pre-hook": lambda block: block.linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "parametrization": lambda block: torch.nn.utils.parametrizations.weight_norm(block.linear),
    "requires_grad": lambda block: block.requires_grad_(False),
    "instance-forward": lambda block: setattr(block.act, "forward", lambda x: x * 3),
}


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_body_names_is_never_old(change: str) -> None:
    block = Block().eval()
    twin = copy.deepcopy(block)
    captured = capture(block)
    x = x_of(1)
    torch.manual_seed(0)
    for _ in range(3):
        assert bits(captured(x)) == bits(twin(x))
    torch.manual_seed(1)
    CHANGES[change](block)
    torch.manual_seed(1)
    CHANGES[change](twin)
    if change == "submodule":
        twin.linear.load_state_dict(block.linear.state_dict())
    for seed in range(4):
        torch.manual_seed(seed)
        got = captured(x)
        torch.manual_seed(seed)
        assert bits(got) == bits(twin(x)), seed


def test_a_changed_scale_goes_back_to_its_old_recording() -> None:
    block = capture(Block().eval())
    twin = copy.deepcopy(block)
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0, 3.0, 2.0):
        block.scale = twin.scale = scale
        assert bits(block(A)) == bits(Block.forward(twin, A))
    assert (recordings(block.forward).observations, recordings(block.forward).recordings) == (2, 2)


def test_a_class_attribute_changed_on_the_class() -> None:
    class Net(nn.Module):
        scale = 2.0

        @override
        @capture
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) * self.scale

    net = Net()
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0):
        Net.scale = scale
        check_same(net, lambda x: torch.relu(x) * Net.scale, A, times=1)


def test_an_attribute_that_appears_and_goes() -> None:
    class Net(nn.Module):
        scale: float

        @override
        @capture
        def forward(self, x: Tensor) -> Tensor:
            return x * (self.scale if hasattr(self, "scale") else 1.0) + 1

    net = Net()
    check_same(net, lambda x: x + 1, A)
    net.scale = 3.0
    check_same(net, lambda x: x * 3.0 + 1, A)
    del net.scale
    check_same(net, lambda x: x + 1, A)


SCALE = 2.0
OFFSETS = [1.0, 2.0]
SETTINGS = types.SimpleNamespace(scale=2.0)


@pytest.mark.parametrize("value", [3.0, 2, -2.0, float("nan")])
def test_a_global_that_changes(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(x: Tensor) -> Tensor:
        return torch.relu(x) * SCALE + 1

    captured = capture(use)
    check_same(captured, use, A)
    monkeypatch.setitem(globals(), "SCALE", value)
    check_same(captured, use, A)
    monkeypatch.undo()
    check_same(captured, use, A)


def test_members_of_a_global_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(x: Tensor) -> Tensor:
        result: Tensor = torch.relu(x) * OFFSETS[0] + OFFSETS[-1] + SETTINGS.scale
        return result

    captured = capture(use)
    check_same(captured, use, A)
    monkeypatch.setitem(globals(), "OFFSETS", [4.0, 5.0])
    check_same(captured, use, A)
    OFFSETS.append(9.0)
    check_same(captured, use, A)
    monkeypatch.setattr(SETTINGS, "scale", 8.0)
    check_same(captured, use, A)


def test_a_closure_cell_that_changes() -> None:
    scale, table = 2.0, {"shift": 1.0}

    def use(x: Tensor) -> Tensor:
        return torch.relu(x) * scale + table["shift"]

    captured = capture(use)
    check_same(captured, use, A)
    scale = 3.0
    check_same(captured, use, A)
    table["shift"] = 5.0
    check_same(captured, use, A)
    table = {"shift": 6.0}
    check_same(captured, use, A)


def test_a_value_named_in_a_nested_function_that_changes() -> None:
    scale = 2.0

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = 1.0

        @override
        @capture
        def forward(self, x: Tensor) -> Tensor:
            parts = [part * scale + self.shift for part in x.unbind()]
            return torch.stack([(lambda part: part + self.shift * scale)(part) for part in parts])

    net = Net()

    def expected(x: Tensor) -> Tensor:
        parts = [part * scale + net.shift for part in x.unbind()]
        return torch.stack([part + net.shift * scale for part in parts])

    check_same(net, expected, A)
    net.shift = 4.0
    check_same(net, expected, A)
    scale = 7.0
    check_same(net, expected, A)


def test_a_default_that_changes() -> None:
    def use(x: Tensor, scale: float = 2.0) -> Tensor:
        return torch.relu(x) * scale

    captured = capture(use)
    check_same(captured, use, A)
    use.__defaults__ = (3.0,)
    check_same(captured, use, A)


def test_a_tensor_in_a_closure_that_is_replaced() -> None:
    weight = x_of(1)

    def use(x: Tensor) -> Tensor:
        return torch.relu(x) * weight

    captured = capture(use)
    check_same(captured, use, A)
    weight = x_of(2)
    check_same(captured, use, A)
    weight.mul_(3)
    check_same(captured, use, A)
    weight = x_of(2).double()
    check_same(captured, use, A)
    assert recordings(captured).rebinds == (1 if REBINDS else 0)


# ------------------------------------------------------------------------------------------------- guards and floats


def test_guards_see_what_nothing_else_can() -> None:
    hidden = types.SimpleNamespace(factors=list(range(100)))

    def deep(x: Tensor) -> Tensor:
        result: Tensor = x * hidden.factors[50]
        return result

    captured = capture(lambda x: deep(x) + 1, guards=[lambda: hidden.factors[50], lambda: "constant"])
    for factor in (2, 2, 2, 3, 3, 3, 2):
        hidden.factors[50] = factor
        check_same(captured, lambda x: deep(x) + 1, A, times=1)
    assert recordings(captured).recordings == 2


def test_guards_tell_types_apart() -> None:
    state: list[Any] = [1]
    whole = torch.arange(4)

    read = state.__getitem__

    def deep(x: Tensor) -> Tensor:
        return x * read(0)  # type: ignore[no-any-return]

    captured = capture(lambda x: deep(x) + 1, guards=[lambda: state[0]])
    for value in (1, 1, 1, 1.0, 1.0, 1.0, True, True, True, 0.0, 0.0, 0.0, -0.0, -0.0, -0.0):
        state[0] = value
        check_same(captured, lambda x: deep(x) + 1, whole, times=1)


def test_a_guard_that_raises_says_so() -> None:
    def broken() -> int:
        raise LookupError("no such setting")

    with pytest.raises(LookupError, match="no such setting"):
        capture(norm, guards=[broken])(A)


def test_floats_that_change_on_every_call_are_a_finding() -> None:
    def use(x: Tensor, rate: float) -> Tensor:
        return torch.relu(x) * round(1 - rate, 3)

    captured = capture(use, max_recordings=3)
    with pytest.warns(CaptureWarning) as warned:
        got = [bits(captured(A, 1.0 / (step // 3 + 1))) for step in range(150)]
    assert got == [bits(use(A, 1.0 / (step // 3 + 1))) for step in range(150)]
    assert len(warned) == 1
    message = str(warned[0].message)
    assert "CG901" in message
    assert "rate" in message
    assert recordings(captured).recordings <= 3
    assert recordings(captured).observations <= 10


def test_an_attribute_that_changes_on_every_call_is_a_finding() -> None:
    class Net(nn.Module):
        temperature = 1.0

        @override
        @capture(max_recordings=3)
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x / round(self.temperature, 3), -1)

    net = Net()

    def run(step: int) -> Any:
        net.temperature = 1.0 + step // 3
        return bits(net(A))

    with pytest.warns(CaptureWarning) as warned:
        got = [run(step) for step in range(90)]
    assert got == [bits(torch.softmax(A / (1.0 + step // 3), -1)) for step in range(90)]
    assert len(warned) == 1
    assert "temperature" in str(warned[0].message)
    assert recordings(net.forward).recordings <= 3


def test_keys_that_never_come_back_do_not_pile_up() -> None:
    captured = capture(lambda x, step: x * step, max_recordings=2)
    with pytest.warns(CaptureWarning, match="CG901"):
        got = [bits(captured(A, step // 2)) for step in range(60)]
    assert got == [bits(A * (step // 2)) for step in range(60)]
    assert recordings(captured).observations <= 5


def test_old_and_new_precision_settings_may_be_mixed() -> None:
    """torch's getters that cover both raise after such a mix."""
    captured = capture(lambda x, w: x @ w)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    matmul = torch.backends.cuda.matmul
    with _setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"):
        try:
            for precision in ("tf32", "ieee"):
                matmul.fp32_precision = precision
                for _ in range(3):
                    assert torch.equal(captured(x, w), x @ w)
        finally:
            matmul.fp32_precision = "none"


def test_streams_and_events_are_never_referenced_weakly() -> None:
    """A device's streams and events die without clearing weak references to them (torch 2.11), which then lead to freed
    memory."""
    stream, event = torch.Stream(device="cpu"), torch.Event()
    named = capture(lambda x: x + (1 if repr(stream) else 0))
    given = capture(lambda x, mark: x + (1 if repr(mark) else 0))
    for _ in range(4):
        assert bits(named(A)) == bits(A + 1)
        assert bits(given(A, event)) == bits(given(A, stream)) == bits(A + 1)
    assert (weakref.getweakrefcount(stream), weakref.getweakrefcount(event)) == (0, 0)
    assert recordings(named).recordings == 1
    assert recordings(given).recordings == 2


class Doubling(nn.Module):
    """A module that refers to itself, by a bound method among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.act = self.twice

    def twice(self, x: Tensor) -> Tensor:
        return x * 2

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.lin(x))
        return y


class Above(nn.Module):
    """Two levels below it a module has a hook that leads back here, as ``fully_shard`` makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])
        self.layers[0].register_forward_hook(self.after)

    def after(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output * 2

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y


def parametrized() -> nn.Module:
    """A parametrized module: it has a class of its own, whose properties lead to the weight."""

    class Twice(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    module = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(module, "weight", Twice())
    return nn.Sequential(module)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("keeps_plans", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        parametrized,
        Doubling,
        lambda: nn.Sequential(Doubling()),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))),
        Above,
    ],
    ids=["a class of its own", "a bound method", "below", "a graph module", "a hook far below"],
)
def test_modules_that_name_themselves_die(make: Callable[[], nn.Module], keeps_plans: bool, tmp_path: Path) -> None:
    def use() -> weakref.ref[nn.Module]:
        module = make()
        captured = capture(lambda x: module(x))
        x = x_of()
        for training in (True, False, True, False):
            module.train(training)
            assert bits(captured(x)) == bits(module(x))
        assert recordings(captured).observations == 2
        return weakref.ref(module)

    with config.patch(cache=keeps_plans, cache_dir=tmp_path):
        alive = use()
    gc.collect()
    gc.collect()
    assert alive() is None
