"""The rest of a call whose replay ended because an operator raised.

A replay runs no Python, so what the body did in Python before that operator is missing: attributes, containers, the
places where it would catch the error. So the body runs, on the caller's own arguments, and each operator up to that one
is answered with what the tape made. Nothing runs twice: memory that the tape wrote stays written, and its random
numbers stay drawn. The operator that raised does so again; whatever follows, if the body goes on, is eager.

Why the tape's memory is enough: a tensor that the body can still reach when the operator raises was alive at that place
during the recording, so nothing was written over it by then. Any other tensor gets whatever lies in its memory now, and
nothing reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from capture.core.data import frozen
from capture.core.interrupts import is_interrupt
from capture.engines.base import Geometry
from capture.engines.cpu.tape import Ran, Stop, TapeStep
from capture.engines.staging import over
from capture.observe import islands
from capture.observe.dispatch_mode import ObserveMode
from capture.observe.operator_schema import Operator, tensors_in, traits
from capture.observe.returned_value import RETURNED
from capture.torch_private.capabilities import unseen


class Answers(ObserveMode):
    """Runs a body up to where a tape stopped without running operators."""

    notes_code = False

    def __init__(self, stop: Stop) -> None:
        super().__init__()
        self._stop = stop
        self._number = 0
        self._goes_on = False
        """True after the operator that raised was reached: the body goes on eagerly."""
        self._missed = False
        """What the body read now is not what the tape read."""
        self._was_read: list[Any] | None = None
        """All members of the list that the tape read instead."""
        self._handed_out: list[int] = []
        """Registers whose new tensors the present operator's answer has."""
        self._unknown: list[torch.UntypedStorage] = []
        """Storages of results that no step reads, and that the tape did not keep."""

    def again(self) -> Answers:
        """Another watch from the same replay, where the body has not begun under this one."""
        return Answers(self._stop)

    @override
    def execute(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An answer that was not made, as something went wrong here, is looked for again (``_unseen``)."""
        number = self._number
        try:
            return self._answer(op, args, kwargs)
        except Exception as error:
            if not is_interrupt(error) and self._ran is None:
                self._number = number
            raise

    def _answer(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._goes_on:
            if any(
                tensor.untyped_storage() is storage for tensor in tensors_in(args, kwargs) for storage in self._unknown
            ):
                self._end()
            return self.operate(op, args, kwargs)
        ran = self._found(op)
        if ran is None or ran.step is None:
            return self.operate(op, args, kwargs)
        if ran.step is self._stop.step:
            self._goes_on = True
            if ran.step.acts or is_interrupt(self._stop.error):
                self._end()  # it may have written a part of its results
            return self.operate(op, args, kwargs)
        self._handed_out = []
        result = self._answered(ran.result, ran.step, tensors_in(args, kwargs))
        self._ran = (result,)
        for register in self._handed_out:
            self._stop.fresh.pop(register, None)
        return result

    @override
    def _unseen(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Something went wrong in the watch. What the tape did is not done again all the same."""
        return super()._unseen(op, args, kwargs) if self._goes_on else self.execute(op, args, kwargs)

    @override
    def read_on_host(
        self, name: str, tensor: torch.Tensor, read: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._begin_read()
        result = super().read_on_host(name, tensor, read, args, kwargs)
        if self._was_read is not None:
            return _lists(self._was_read, tensor.shape)
        if self._missed:
            raise self._ended()
        return result

    def _begin_read(self) -> None:
        self._missed, self._was_read = False, None

    @override
    def end_at_read(self, name: str, text: str, describe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The tape may have written the memory since it read it: a list that it read is given as it was then."""
        if self._goes_on:
            return
        ran = self._found(name)
        is_list = text.startswith(RETURNED)
        if ran is not None and (repr(describe(*args)) if is_list else text) == (
            repr(ran.result) if is_list else ran.result
        ):
            return
        self._was_read = ran.result if ran is not None and is_list and type(ran.result) is list else None
        self._missed = self._was_read is None  # raised by ``read_on_host``: nobody hears of an error in here

    @override
    def island(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._goes_on or self.is_aside:
            return super().island(function, args, kwargs)
        ran, outcome = self._found(f"island.{islands.name_of(function)}"), islands.taken(function)
        if ran is None or ran.step is None or outcome is None:
            raise self._ended()
        with unseen():
            tensors = outcome.given(args, kwargs)
            made = {id(tensor): self._made(ran.step, number) for number, tensor in enumerate(outcome.made)}
            return outcome.among(tensors, made)

    def _found(self, op: Any) -> Ran | None:
        """The answer for one operator. Views are made as they come: saving a tensor for a backward pass makes some, or
        none."""
        ran, at = self._stop.ran, self._number
        while at < len(ran) and ran[at].op != op and ran[at].step is None and _is_view(ran[at].op):
            at += 1
        if at < len(ran) and ran[at].op == op:
            self._number = at + 1
            return ran[at]
        if not _is_view(op):
            self._end()
        return None

    def _end(self) -> None:
        """Stop answering: the body did something else, or the operator that raised was reached, and raises here."""
        raise self._ended()

    def _ended(self) -> BaseException:
        self._goes_on = True
        self._raised = self._stop.error
        return self._stop.error

    def _answered(self, form: Any, step: TapeStep, given: Sequence[torch.Tensor]) -> Any:
        if isinstance(form, Made):
            return self._made(step, form.number)
        if isinstance(form, Argument):
            return given[form.number]
        if isinstance(form, (tuple, list)):
            return type(form)([self._answered(member, step, given) for member in form])
        if form is UNKNOWN:
            self._end()
        return form

    def _made(self, step: TapeStep, number: int) -> torch.Tensor:
        out = step.outs[number]
        assert out is not None
        root, register = out
        if register not in self._stop.fresh and root.storage is not None:
            return over(root.storage.clone(), Geometry.of(self._stop.registers[register]))
        fresh = self._stop.fresh.get(register)  # a new tensor, for torch: nobody else has it
        if fresh is not None:
            self._handed_out.append(register)
            return fresh
        geometry = next(
            geometry_of_register for geometry_of_register, number in root.registers.items() if number == register
        )
        made = torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype, device="cpu")
        self._unknown.append(made.untyped_storage())
        return made


def _lists(members: list[Any], shape: Sequence[int]) -> Any:
    """These members as ``tolist`` gives those of a tensor of this shape."""
    for size in reversed(shape[1:]):
        members = [members[at : at + size] for at in range(0, len(members), size)] if size else members
    return members


def _is_view(op: Any) -> bool:
    return not isinstance(op, str) and traits(op).view


@frozen
class Made:
    """A tensor that an operator makes, by its position among its results."""

    number: int


@functools.lru_cache(maxsize=64)
def _made(number: int) -> Made:
    """One object for equal ones: each operator of each recording has one."""
    return Made(number)


@frozen
class Argument:
    """A tensor that an operator gets, by its position among its arguments."""

    number: int


class _Unknown:
    """Stands for any other object with memory."""


UNKNOWN = _Unknown()


def form_of(result: Any, made: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]) -> Any:
    """A result so that it can be given again. ``made``: what is new among its members."""
    if isinstance(result, torch.Tensor):
        for number, tensor in enumerate(made):
            if tensor is result:
                return _made(number)
        for number, tensor in enumerate(inputs):
            if tensor is result:
                return Argument(number)
        return UNKNOWN
    if isinstance(result, (tuple, list)):
        return type(result)([form_of(member, made, inputs) for member in result])
    return result
