"""``native.Tape``: steps run in order, hold only what they need, and leave no references behind."""

from __future__ import annotations

import gc
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture.native import native
from capture.torch_private.capabilities import set_grad_enabled

REGISTER, LOCAL, NOTHING = "register", "local", ("nothing", None)


def step(function: Any, *args: Any, results: tuple[Any, ...] = (), single: bool = True, **kwargs: Any) -> Any:
    return function, (*args, *kwargs.values()), tuple(kwargs), results, single


def run(registers: list[Any], *steps: Any, leaves: Any = (), grad: Any = None) -> None:
    assert native.Tape(registers, steps, grad)(leaves) is None


class Seen:
    """A function that keeps what it was given."""

    def __init__(self, result: Any = None) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.result = result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.result


class Object:
    pass


def test_arguments_are_built_from_templates() -> None:
    seen, leaves, constant = Seen(), ["zero", "one"], [1]
    members = ("list", ((REGISTER, 1), ("constant", None), ("tuple", ((REGISTER, 0),))))
    run(
        ["a", "b"],
        step(seen, ("constant", constant), (REGISTER, 0), ("leaf", 1), ("leaves", None), alpha=members),
        leaves=leaves,
    )
    ((args, kwargs),) = seen.calls
    assert args == ([1], "a", "one", leaves)
    assert args[0] is constant
    assert args[3] is leaves
    assert kwargs == {"alpha": ["b", None, ("a",)]}


def test_operators_write_where_they_are_told() -> None:
    x, out, least, at = torch.randn(4), torch.empty(4), torch.empty(()), torch.empty((), dtype=torch.int64)
    run(
        [x, out, least, at],
        step(torch.exp, (REGISTER, 0), out=(REGISTER, 1)),
        step(torch.min, (REGISTER, 1), ("constant", 0), out=("tuple", ((REGISTER, 2), (REGISTER, 3)))),
    )
    assert torch.equal(out, x.exp())
    assert (least, at) == tuple(x.exp().min(0))


def test_a_text_is_a_method_of_the_first_argument() -> None:
    x, leaf = torch.zeros(2), torch.ones(2)
    run([x], step("copy_", (REGISTER, 0), ("leaf", 0)), leaves=(leaf,))
    assert torch.equal(x, leaf)
    with pytest.raises(AttributeError, match="no_such"):
        run([x], step("no_such", (REGISTER, 0)))


def test_results_are_kept_copied_or_dropped() -> None:
    values, place, seen = torch.arange(6.0), torch.zeros(2), Seen()
    run(
        [values, place],
        step(torch.split, (REGISTER, 0), ("constant", 2), results=(NOTHING, (REGISTER, 1), (LOCAL, 0)), single=False),
        step(torch.neg, (LOCAL, 0), results=((LOCAL, 1),)),
        step(seen, (LOCAL, 0), (LOCAL, 1)),
        step(torch.neg, (REGISTER, 1), results=((REGISTER, 1),)),
    )
    assert place.tolist() == [-2, -3]
    assert [tensor.tolist() for tensor in seen.calls[0][0]] == [[4, 5], [-4, -5]]


@pytest.mark.parametrize("given", [(1,), [1, 2, 3], ()])
def test_another_count_of_results_is_an_error(given: Any) -> None:
    with pytest.raises(ValueError, match=f"gave {len(given)} results where it gave 2"):
        run([], step(Seen(given), results=((LOCAL, 0), NOTHING), single=False))
    with pytest.raises(TypeError):
        run([], step(Seen(1), results=((LOCAL, 0), NOTHING), single=False))


def test_locals_live_as_long_as_the_call() -> None:
    made: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    def make() -> Object:
        made.append(weakref.ref(local := Object()))
        return local

    tape = native.Tape(
        [], (step(make, results=((LOCAL, 0),)), step(lambda: alive.append(made[-1]() is not None))), None
    )
    tape(())
    tape(())
    assert alive == [True, True]
    assert [reference() for reference in made] == [None, None]


def test_registers_may_change_during_and_between_calls() -> None:
    """What is called holds its arguments, whatever becomes of the list."""
    registers: list[Any] = [Object(), "b"]
    seen: list[Any] = []

    def change(one: Object) -> None:
        registers[0] = None
        registers[1] = "c"
        gc.collect()
        seen.append(type(one))

    tape = native.Tape(registers, (step(change, (REGISTER, 0)), step(seen.append, (REGISTER, 1))), None)
    tape(())
    assert seen == [Object, "c"]
    with pytest.raises(RuntimeError, match="released"):
        tape(())
    registers.clear()
    with pytest.raises(RuntimeError, match="released"):
        tape(())


def test_a_call_within_a_call_has_locals_of_its_own() -> None:
    seen: list[Any] = []

    def nested(value: int) -> None:
        if value:
            tape((value - 1,))

    tape = native.Tape(
        [], (step(int, ("leaf", 0), results=((LOCAL, 0),)), step(nested, (LOCAL, 0)), step(seen.append, (LOCAL, 0))),
        None,
    )  # fmt: skip
    tape((3,))
    assert seen == [0, 1, 2, 3]


def fails(*_: Any) -> None:
    raise KeyError("as it was")


@pytest.mark.parametrize(
    "steps", [(step(fails),), (step(Seen(), ("leaf", 5)),), (step(Seen(1), results=((REGISTER, 0),)),)]
)
def test_errors_end_the_replay_and_put_grad_mode_back(steps: tuple[Any, ...]) -> None:
    after, modes = Seen(), Seen()
    with pytest.raises((KeyError, IndexError, AttributeError)) as error:
        run(["text"], *steps, step(after), grad=modes)
    assert not after.calls
    assert [args for args, _ in modes.calls] == [(False,), (True,)]
    assert error.value.args != ()


def test_grad_mode_is_off_during_the_steps_alone() -> None:
    seen: list[bool] = []
    weight, out = torch.ones(2, requires_grad=True), torch.empty(2)
    asked = step(lambda: seen.append(torch.is_grad_enabled()))
    run([weight, out], asked, step(torch.exp, (REGISTER, 0), out=(REGISTER, 1)), grad=set_grad_enabled)
    assert torch.is_grad_enabled()
    run([], asked)
    assert seen == [False, True]


def test_what_fails_to_set_grad_mode_is_an_error() -> None:
    def refuse(mode: bool) -> None:
        if mode is refused:
            raise LookupError(str(mode))

    after = Seen()
    for refused in (False, True):
        with pytest.raises(LookupError, match=str(refused)):
            run([], step(after), grad=refuse)
    assert len(after.calls) == 1


def test_an_interrupt_ends_a_replay() -> None:
    after = Seen()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run([], step(signal.raise_signal, ("constant", signal.SIGINT)), step(after))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not after.calls


def test_reading_a_local_that_nobody_gave_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="none before it gave"):
        run([], step(Seen(), (LOCAL, 0)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "wrong",
    [
        1,
        (),
        step(Seen(), 1),
        step(Seen(), (1, 2)),
        step(Seen(), ("other", 1)),
        step(Seen(), (REGISTER, -1)),
        step(Seen(), (LOCAL, "a")),
        step(Seen(), ("list", 1)),
        step(Seen(), ("list", (("constant", 1), ("list", (1,))))),
        step("copy_", alpha=("constant", 1)),
        step(Seen(), results=(NOTHING, NOTHING)),
        (Seen(), (), ("names", "without"), (), True),
    ],
)
def test_what_is_no_step_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError, SystemError)):
        native.Tape([], (step(Seen(), ("constant", [])), wrong), None)


def test_a_tape_takes_the_leaves_alone() -> None:
    tape = native.Tape([], (), None)
    for call in (tape, lambda: tape((), ()), lambda: tape(leaves=())):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(TypeError):
        native.Tape((), (), None)


@pytest.mark.parametrize("place", ["function", "constant", "list", "register", "grad"])
def test_circles_through_a_tape_are_collected(place: str) -> None:
    owner: Any = Seen()
    constant = ("constant", owner)
    steps = {"function": step(owner), "constant": step(Seen(), constant), "list": step(Seen(), ("list", (constant,)))}
    owner.tape = native.Tape(
        [owner] if place == "register" else [],
        (steps[place],) if place in steps else (),
        owner if place == "grad" else None,
    )
    gone = weakref.ref(owner)
    del owner, constant, steps
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("function", [fails, lambda *args: list(args)])
def test_calls_leave_no_references(function: Callable[..., Any]) -> None:
    """All references are given back, also where a step raises."""
    held = Object()
    members = ("list", ((REGISTER, 0), ("constant", held)))
    first = step(lambda *args: list(args), (REGISTER, 0), members, results=((LOCAL, 0), (LOCAL, 1)), single=False)
    tape = native.Tape([held], (first, step(function, (LOCAL, 0), members), step(Seen([held]), ("leaf", 9))), None)
    before = sys.getrefcount(held)
    for _ in range(10):
        with pytest.raises((KeyError, IndexError)):
            tape([held])
    tape.left = None  # kept for whoever goes on where the last call raised
    gc.collect()
    assert sys.getrefcount(held) == before
