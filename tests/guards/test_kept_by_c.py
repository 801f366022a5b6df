"""State that C code keeps (of functions, classes, tensors, generators and locks), and modules found by their names: a
change between two replays is seen."""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib
import inspect
import mmap
import sys
import threading
import types
import typing
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import AGAIN, DEVICE

Body = Callable[[torch.Tensor], torch.Tensor]
Made = tuple[Body, Callable[[], object]]
EAGER = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


def name_of_a_function() -> Made:
    def helper() -> None: ...

    return lambda x: x * len(helper.__name__), lambda: setattr(helper, "__name__", "another")


def doc_of_a_function() -> Made:
    def helper() -> None:
        "2"

    return lambda x: x * float(helper.__doc__ or 0), lambda: setattr(helper, "__doc__", "5")


def annotations_of_a_function() -> Made:
    def helper(x: 2) -> None: ...  # type: ignore[valid-type]

    return lambda x: x * float(helper.__annotations__["x"]), lambda: helper.__annotations__.update(x=4)


def name_of_a_class() -> Made:
    class Kind: ...

    one, table = Kind(), {"Kind": 2.0, "Other": 5.0}
    return lambda x: x * table[type(one).__name__], lambda: setattr(Kind, "__name__", "Other")


def doc_of_a_class() -> Made:
    class Kind:
        "2"

    return lambda x: x * float(Kind.__doc__ or 0), lambda: setattr(Kind, "__doc__", "5")


def hints_of_a_class() -> Made:
    class Kind:
        a: float

    return lambda x: x * len(typing.get_type_hints(Kind)), lambda: Kind.__annotations__.update(b=int)


def subclasses() -> Made:
    class Base:
        factor = 2.0

    class First(Base): ...

    kept: list[Any] = [First]
    return lambda x: x * sum(one.factor for one in Base.__subclasses__()), lambda: kept.append(type("B", (Base,), {}))


def attribute_of_a_subclass() -> Made:
    class Base:
        factor = 2.0

    class First(Base): ...

    return lambda x: x * sum(one.factor for one in Base.__subclasses__()), lambda: setattr(First, "factor", 3.0)


def _module(name: str) -> Any:
    made: Any = types.ModuleType(name)
    made.factor = 2.0
    sys.modules[name] = made
    return made


def module_by_a_computed_name() -> Made:
    module, parts = _module("capture_tests_by_name"), ["capture_tests", "by_name"]
    return lambda x: x * sys.modules["_".join(parts)].factor, lambda: setattr(module, "factor", 3.0)


def module_by_import_module() -> Made:
    module, parts = _module("capture_tests_by_import"), ["capture_tests", "by_import"]
    return (
        lambda x: x * importlib.import_module("_".join(parts)).factor, lambda: setattr(module, "factor", 3.0)
    )  # fmt: skip


def view_of_a_dict() -> Made:
    table = {"a": 1.0}
    keys = table.keys()
    return lambda x: x * len(keys), lambda: table.update(b=1.0)


def view_of_an_ordered_dict() -> Made:
    table = collections.OrderedDict(a=1.0)
    values = table.values()
    return lambda x: x * sum(values), lambda: table.update(a=3.0)


def flag_of_an_event() -> Made:
    event = threading.Event()
    return lambda x: x * 2 if event.is_set() else x * 3, event.set


def lock_that_is_taken() -> Made:
    lock = threading.Lock()
    return lambda x: x * 2 if lock.locked() else x * 3, lock.acquire


def weights_that_only_a_loop_names() -> Made:
    module = torch.nn.Linear(2, 2, device=DEVICE)
    return (
        lambda x: x * sum(one.requires_grad for one in module.parameters()), lambda: module.bias.requires_grad_(False)
    )  # fmt: skip


def attribute_of_a_weight_that_only_a_loop_names() -> Made:
    module: Any = torch.nn.Linear(2, 2, device=DEVICE)
    return (
        lambda x: x * sum(getattr(one, "factor", 1.0) for _, one in module.named_parameters()),
        lambda: setattr(module.bias, "factor", 5.0),
    )


def tensor_that_keeps_its_gradient() -> Made:
    inner = torch.ones(3, device=DEVICE, requires_grad=True) * 2
    return lambda x: x * 2 if inner.retains_grad else x * 3, inner.retain_grad


def hooks_of_a_tensor() -> Made:
    leaf = torch.ones(3, device=DEVICE, requires_grad=True)
    return lambda x: x * 2 if leaf._backward_hooks else x * 3, lambda: leaf.register_hook(lambda _: None)


def size_of_a_storage() -> Made:
    held = torch.ones(3, device=DEVICE)
    return lambda x: x * held.untyped_storage().nbytes(), lambda: held.untyped_storage().resize_(40)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", [
    name_of_a_function, doc_of_a_function, annotations_of_a_function, name_of_a_class, doc_of_a_class,
    hints_of_a_class, subclasses, attribute_of_a_subclass, module_by_a_computed_name, module_by_import_module,
    view_of_a_dict, view_of_an_ordered_dict, flag_of_an_event, lock_that_is_taken, weights_that_only_a_loop_names,
    attribute_of_a_weight_that_only_a_loop_names, tensor_that_keeps_its_gradient, hooks_of_a_tensor, size_of_a_storage,
])  # fmt: skip
def test_a_change_of_what_is_kept_elsewhere_is_seen(make: Callable[[], Made]) -> None:
    body, change = make()
    captured = capture(body)
    with torch.no_grad():
        for number in range(10):
            if number == 5:
                assert recordings(captured).replays > 0
                change()
            x = torch.arange(3.0, device=DEVICE) + number
            assert torch.equal(captured(x), body(x)), number
    assert recordings(captured).replays > 4


def _method_of(name: str, method: Any) -> Made:
    def change() -> None:
        setattr(torch.Tensor, name, method)

    return lambda x: x.relu() * 2, change


@pytest.mark.parametrize(("name", "method"), [
    ("relu", lambda self: torch.add(self, 5)), ("__mul__", lambda self, other: torch.add(self, other)),
])  # fmt: skip
def test_a_method_of_all_tensors_that_is_replaced_is_seen(name: str, method: Any) -> None:
    own = vars(torch.Tensor).get(name)
    body, change = _method_of(name, method)
    captured = capture(body)
    try:
        for number in range(8):
            if number == 5:
                assert recordings(captured).replays > 0
                change()
            x = torch.arange(3.0, device=DEVICE) + number
            assert torch.equal(captured(x), body(x)), number
    finally:
        if own is None:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, own)


def test_an_inference_tensor_is_one_for_the_recorded_body_too() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.is_inference() and torch.is_inference(x) else x * 3

    captured = capture(body)
    for number in range(12):
        with torch.inference_mode(number % 2 == 1):
            x = torch.arange(3.0, device=DEVICE) + number
        assert torch.equal(captured(x), body(x)), number
    assert recordings(captured).replays > 0


def _counting() -> Generator[float, None, None]:
    number = 1.0
    while True:
        yield number
        number += 1


@EAGER
def test_a_generator_that_stands_at_the_same_line_again_has_moved() -> None:
    ours, eagers = _counting(), _counting()
    next(ours), next(eagers)
    captured = capture(lambda x: x * next(ours))
    for _ in range(6):
        x = torch.ones(3, device=DEVICE)
        assert torch.equal(captured(x), x * next(eagers))


@pytest.mark.parametrize("is_set_before", [False, True])
def test_an_event_is_set_by_a_replay(is_set_before: bool) -> None:
    event = threading.Event()

    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        event.set()
        return x * 2

    for number in range(10):
        if number % 3 == 0 or not is_set_before:
            event.clear()
        body(torch.ones(3, device=DEVICE))
        assert event.is_set(), number
    assert recordings(body).replays > 0


@pytest.mark.filterwarnings("ignore:CG202")  # a run that is watched beside a thread that waits: calls are eager then
def test_who_waits_for_an_event_is_woken() -> None:
    event = threading.Event()

    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        event.set()
        return x * 2

    for number in range(8):
        event.clear()
        woken: list[bool] = []
        waits = threading.Thread(target=lambda kept=woken: kept.append(event.wait(10)))
        if number % 3 == 2:
            waits.start()
            while not event._cond._waiters:  # type: ignore[attr-defined]
                pass
        body(torch.ones(3, device=DEVICE))
        if number % 3 == 2:
            waits.join()
            assert woken == [True]


@EAGER
def test_a_semaphore_that_the_body_takes_is_taken_in_every_call() -> None:
    semaphore = threading.Semaphore(6)
    captured = capture(lambda x: x * (2 if semaphore.acquire(blocking=False) else 3))
    for number in range(10):
        assert torch.equal(
            captured(torch.ones(3, device=DEVICE)), torch.full((3,), 2.0 if number < 6 else 3.0).to(DEVICE)
        )


class Doubles(torch.nn.Module):
    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Adds(Doubles):
    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def test_a_captured_module_of_another_class_runs_that_ones_forward() -> None:
    module: Any = capture(Doubles())
    x = torch.ones(3, device=DEVICE)
    for kind in (Doubles, Adds, Doubles, Adds):
        module.__class__ = kind
        for _ in range(5):
            assert torch.equal(module(x), x * 2 + (kind is Adds))
    assert recordings(module).replays > 8


def test_a_forward_that_is_replaced_in_the_class_of_a_captured_module_is_called(monkeypatch: Any) -> None:
    module: Any = capture(Doubles())
    x = torch.ones(3, device=DEVICE)
    for factor in (2, 5, 2):
        monkeypatch.setattr(Doubles, "forward", functools.partialmethod(lambda _, x, by: x * by, by=factor)
                            if factor == 5 else lambda _, x, by=factor: x * by)  # fmt: skip
        for _ in range(4):
            assert torch.equal(module(x), x * factor)


def test_a_call_that_is_replaced_in_the_class_of_a_captured_object_is_called() -> None:
    class Scales:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Adds:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    target: Any = Scales()
    captured = capture(target)
    x = torch.ones(3, device=DEVICE)
    for _ in range(4):
        assert torch.equal(captured(x), x * 2)
    target.__class__ = Adds
    for _ in range(4):
        assert torch.equal(captured(x), x + 1)


def number_of_ctypes() -> Made:
    number = ctypes.c_double(2.0)
    return lambda x: x * number.value, lambda: setattr(number, "value", 3.0)


def array_of_ctypes() -> Made:
    numbers = (ctypes.c_double * 2)(2.0, 3.0)
    return lambda x: x * numbers[1], lambda: numbers.__setitem__(1, 5.0)


def map_of_memory() -> Made:
    memory = mmap.mmap(-1, 16)
    memory[0] = 2
    return lambda x: x * memory[0], lambda: memory.__setitem__(0, 5)


def member_that_a_protocol_asks_for() -> Made:
    @typing.runtime_checkable
    class Moves(typing.Protocol):
        def move(self) -> None: ...

    class Kind: ...

    member = Kind()
    return lambda x: x * 2 if isinstance(member, Moves) else x * 3, lambda: setattr(Kind, "move", lambda self: None)


def signature_of_a_function() -> Made:
    def helper(a: int) -> None: ...

    def with_two_parameters(a: int, b: int) -> None: ...

    return (
        lambda x: x * len(inspect.signature(helper).parameters),
        lambda: setattr(helper, "__signature__", inspect.signature(with_two_parameters)),
    )


def attribute_in_a_format() -> Made:
    config = types.SimpleNamespace(factor=2)
    return lambda x: x * float("{.factor}".format(config)), lambda: setattr(config, "factor", 5)  # noqa: UP032


def class_of_a_module_of_python() -> Made:
    module = _module("capture_tests_class")

    class Kind(types.ModuleType):
        other = 9.0

    return lambda x: x * getattr(module, "other", 2.0), lambda: setattr(module, "__class__", Kind)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", [
    number_of_ctypes, array_of_ctypes, map_of_memory, member_that_a_protocol_asks_for, signature_of_a_function,
    class_of_a_module_of_python, attribute_in_a_format,
])  # fmt: skip
def test_a_change_of_what_the_standard_library_reads_is_seen(make: Callable[[], Made]) -> None:
    test_a_change_of_what_is_kept_elsewhere_is_seen(make)


@EAGER
def test_a_number_of_ctypes_that_the_body_counts_up_counts_in_every_call() -> None:
    number = ctypes.c_long(0)

    @capture
    def body(x: torch.Tensor) -> torch.Tensor:
        number.value += 1
        return x * 2

    for count in range(6):
        body(torch.ones(3, device=DEVICE))
        assert number.value == count + 1


def _trained(wrap: Callable[[Any], Any], hooked: bool) -> list[torch.Tensor]:
    """Weights after each of ten steps; from the fifth on a hook doubles each accumulated gradient."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @wrap
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    weights = []
    for number in range(10):
        if number == 5 and hooked:
            model.weight.register_post_accumulate_grad_hook(_double)
        step(torch.arange(3.0, device=DEVICE) / 4)
        weights.append(model.weight.detach().clone())
    return weights


def _double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def test_a_hook_on_an_added_up_gradient_that_comes_later_is_called() -> None:
    eager, captured = _trained(lambda one: one, hooked=True), _trained(capture, hooked=True)
    assert all(map(torch.equal, eager, captured))
    assert not torch.equal(eager[-1], _trained(capture, hooked=False)[-1])


@EAGER
def test_a_lazy_module_is_recorded_once_it_knows_its_sizes() -> None:
    torch.manual_seed(0)
    model: Any = capture(torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.ReLU()).to(DEVICE))
    with torch.no_grad():
        for number in range(14):
            if number == 8:
                model[0] = torch.nn.LazyLinear(3).to(DEVICE)
            x = torch.arange(3.0, device=DEVICE) + number
            given = model(x)
            assert torch.equal(given, torch.nn.functional.linear(x, model[0].weight, model[0].bias).relu()), number
    assert recordings(model).replays >= 5 - AGAIN
    assert not any(finding.code == "CG905" for finding in recordings(model).findings)
