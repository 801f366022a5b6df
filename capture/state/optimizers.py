"""Settings such as the learning rate are Python values that only the optimizer's own code reads.

A recording freezes them, so those of every optimizer that takes a step in a body are part of its key. A setting kept
in a tensor is read where it lives. Whether a parameter has a gradient is such a value too: it decides what an optimizer
updates, what is clipped or zeroed, and whether a backward pass accumulates. So are a parameter's hooks, and the
training flags of modules that the body reaches and that are neither its own nor arguments.

An optimizer may do in each step what no recording does again: read its step count on the host, or compute numbers from
one that it counts in Python. Two runs show that: in the second one the same operators get other numbers, or the host
reads other values. Or a schedule gives it other settings before each step. Such a step is an **island** from then on:
it runs eagerly in each replay, and its settings are its own business.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from attrs import evolve
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from capture.core.data import frozen
from capture.key.code_names import MISSING, part_of
from capture.key.computing import holders_read
from capture.key.signature import training_reader
from capture.state.snapshot import Change, Snapshot
from capture.state.source import only_gradient, reference_to, whose_gradient
from capture.torch_private.autograd import hooks_of_accumulation
from capture.torch_private.optimizers import has_hooks

Stepping = torch.optim.Optimizer | LRScheduler


def _may_step(function: Any) -> bool:
    """Whether the function's own code mentions a ``step``, or cannot be read."""
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return type(code) is not types.CodeType or _names_step(code)


def _names_step(code: types.CodeType) -> bool:
    return "step" in code.co_names or any(
        _names_step(constant) for constant in code.co_consts if type(constant) is types.CodeType
    )


MOST_MOVES = 2  # runs in a row that each had other settings than the one before


class Trace(Protocol):
    """What a run did so far."""

    reads: list[str]
    scalars: list[tuple[Any, ...]]
    sequence: list[Any]
    work: list[Any]
    cpu_work: dict[int, Any]


def _text(number: Any) -> str:
    """What a number is, by its plain class: one that notes who reads it (``runtime.noted_numbers``) is not asked."""
    kind = next((one for one in (int, float) if issubclass(type(number), one)), object)
    return kind.__repr__(number)


def _reached(trace: Trace) -> tuple[int, ...]:
    return len(trace.reads), len(trace.scalars), len(trace.sequence), len(trace.work), len(trace.cpu_work)


@frozen
class _Steps:
    """The steps of one optimizer in one run."""

    settings: tuple[Any, ...]
    of_call: tuple[str, ...] = ()
    """Settings that each call takes as they are then, like arguments, so that they are not in the key."""
    reads: tuple[str, ...] = ()
    scalars: tuple[Any, ...] = ()
    sequence: tuple[Any, ...] = ()
    moves: int = 0
    """How many runs in a row had other settings than the one before."""
    asks_host: bool = False
    """The host reads values in them, or works on tensors of its own."""

    def and_then(self, trace: Trace, begin: tuple[int, ...]) -> _Steps:
        """The steps with one more, which began at this point."""
        reads, scalars, sequence, work, cpu_work = begin
        return _Steps(
            self.settings,
            self.of_call,
            (*self.reads, *trace.reads[reads:]),
            (*self.scalars, *trace.scalars[scalars:]),
            (*self.sequence, *map(str, trace.sequence[sequence:])),
            asks_host=self.asks_host or _reached(trace)[3:] != (work, cpu_work) or len(trace.reads) != reads,
        )

    def after(self, before: _Steps) -> _Steps:
        """The same steps, counted as those of the run after another one."""
        return evolve(self, moves=before.moves + 1 if self.settings != before.settings else 0)

    def differs(self, before: _Steps) -> bool:
        """Whether no recording of the one run does what the other run did, and the difference is expected to stay."""
        if self.reads and before.reads and self.reads != before.reads:
            return True
        if self.settings != before.settings:
            return self.moves >= MOST_MOVES
        if self.of_call != before.of_call:  # operators get other numbers for that alone, as far as this can tell
            return False
        return self.sequence == before.sequence and self.scalars != before.scalars


_MOST_ENDED = 6  # of the last two runs


class Optimizers:
    """Optimizers, modules, and parameters whose ``grad`` was read, that one captured function was seen to use."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[torch.optim.Optimizer]] = []
        self._parameters: list[Callable[[], torch.Tensor | None]] = []
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        """Modules whose training flags are in the key, with all their submodules."""
        self.has_looked = False
        """Whether Python state was searched for optimizers."""
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
        """The steps of the last run."""
        self._islands: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._schedules: weakref.WeakSet[LRScheduler] = weakref.WeakSet()
        """Learning-rate schedules that took a step. Where an optimizer's step is an island, so is that of its
        schedule."""
        self._refused: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers whose steps cannot be islands."""
        self._unsteady: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stopped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers whose step had begun and not ended when the last run stopped."""
        self._lifted: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[tuple[int, str]]] = (
            weakref.WeakKeyDictionary()
        )
        """Settings that are arguments of the call, in effect: number of the group, and name."""
        self.numbers_of_call: list[Callable[[], Any]] = []
        """Read numbers in Python state, such as counts of steps, that are arguments of the call, in effect."""
        self._ended: list[RemovableHandle] = []
        """The hooks of watched runs that ended last."""
        self.is_lost = False
        """The step of an optimizer reads another value in each run, and cannot be an island."""

    def __bool__(self) -> bool:
        return bool(self._found or self._parameters)

    def search(self, state: Snapshot, function: Any, inputs: Sequence[Any]) -> None:
        """Look for more of them in what a body can reach. ``inputs``: the receiver and the arguments.

        An optimizer that is only near, as one that a trainer keeps, is none of the body's: its own code tells before
        the first run whether one may take a step. Which ones do, ``watching`` sees."""
        self.has_looked = True
        may_step = _may_step(function)
        for _, value in state.entered:
            if may_step and issubclass(type(value), torch.optim.Optimizer):
                self._add(value)
            elif issubclass(type(value), LRScheduler):  # counts only beside an optimizer that takes a step
                self._schedules.add(value)
        above = [value for value in (*inputs, *self.modules()) if issubclass(type(value), torch.nn.Module)]
        covered = {id(member) for module in above for member in module.modules()}
        for module in state.modules:
            if id(module) not in covered:
                self._modules.append(weakref.ref(module))
                covered |= {id(member) for member in module.modules()}

    def modules(self) -> list[torch.nn.Module]:
        """Modules whose flags are part of the key, without their submodules."""
        return [module for one in self._modules if (module := one()) is not None]

    def flags(self) -> list[bool]:
        """Training flags of all modules."""
        return [flag for module in self.modules() for flag in training_reader(module)()]

    def _add(self, optimizer: torch.optim.Optimizer) -> None:
        if all(one() is not optimizer for one in self._found):
            self._found.append(weakref.ref(optimizer))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In the block, note every optimizer that takes a step, whatever keeps it."""
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._add(optimizer))
        try:
            yield
        finally:
            self._end_hooks(hook)

    def _end_hooks(self, *hooks: RemovableHandle) -> None:
        self._ended = [*self._ended, *hooks][-_MOST_ENDED:]
        for hook in hooks:
            hook.remove()

    def leave_no_hooks(self) -> None:
        """After state was put back as it was in a watched run: the hooks of that run are part of it."""
        for hook in self._ended:
            hook.remove()

    @contextlib.contextmanager
    def steps_noted(self, trace: Trace) -> Iterator[None]:
        """In the block, compare what optimizers do with what they did in the run before."""
        thread, begun = threading.get_ident(), list[tuple[torch.optim.Optimizer, tuple[int, ...]]]()
        steps_by_optimizer: dict[torch.optim.Optimizer, _Steps] = {}

        def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if threading.get_ident() == thread and optimizer not in self._islands:
                begun.append((optimizer, _reached(trace)))

        def end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if threading.get_ident() == thread and begun and begun[-1][0] is optimizer:
                steps_before = steps_by_optimizer.get(optimizer) or self._begun(optimizer)
                steps_by_optimizer[optimizer] = steps_before.and_then(trace, begun.pop()[1])

        hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
        try:
            yield
        finally:
            self._end_hooks(*hooks)
            self._stopped = weakref.WeakSet(optimizer_begun for optimizer_begun, _ in begun)
            begun.clear()
        for optimizer, steps in steps_by_optimizer.items():
            before = self._steps.get(optimizer)
            self._steps[optimizer] = steps = steps if before is None else steps.after(before)
            if before is not None and steps.differs(before):
                if optimizer not in self._refused:
                    self._unsteady.add(optimizer)
                elif steps.reads:
                    self.is_lost = True

    def _begun(self, optimizer: torch.optim.Optimizer) -> _Steps:
        lifted = self._lifted.get(optimizer, ())
        of_call = [one for one in _settings_of(optimizer) if one[:2] in lifted]
        counts = [_text(read()) for read in self.numbers_of_call]
        return _Steps(tuple(_numbers(self._settings_of(optimizer))), (*_numbers(of_call), *counts))

    def make_islands(self, *, those_of_host: bool, those_stopped: bool) -> bool:
        """Make steps that differed in the last run islands from now on; or all that ask the host, where no recording
        holds what it does; or the one in which a recording stopped. False if there are none."""
        asking = [optimizer for optimizer, steps in self._steps.items() if steps.asks_host] if those_of_host else []
        asking += self._stopped if those_stopped else ()
        settled = (*self._refused, *self._islands)
        new_islands = {
            id(optimizer): optimizer
            for optimizer in (*self._unsteady, *asking)
            if all(optimizer is not done for done in settled)
        }.values()
        self._unsteady.clear()
        for optimizer in new_islands:
            self._islands.add(optimizer)
        return bool(new_islands)

    def settings_move(self) -> bool:
        """Whether one of them had other settings in its last step than in the one before."""
        return any(steps.moves for steps in self._steps.values())

    def are_scheduled(self) -> bool:
        """Whether the body can reach schedules of learning rates."""
        return bool(self._schedules)

    def ask_host(self) -> bool:
        """Whether the host reads values in a step that is no island."""
        return any(steps.asks_host for optimizer, steps in self._steps.items() if optimizer not in self._islands)

    def refuse_islands(self) -> bool:
        """Have no islands for these steps any more: no recording can be cut at them, so they belong to what is recorded
        again. False if none was an island."""
        found = list(self._islands)
        for optimizer in found:
            self._refused.add(optimizer)
        self._islands.clear()
        return bool(found)

    def names_of_islands(self) -> tuple[str, ...]:
        """Classes of the optimizers whose steps are islands."""
        return tuple(sorted({type(island).__name__ for island in list(self._islands)}))

    def groups_of_islands(self) -> list[dict[str, Any]]:
        """Their groups of parameters with the settings, which other code may read by name."""
        return [group for island in self._islands for group in _groups(island)]

    @contextlib.contextmanager
    def steps_apart(self, island: Callable[..., Any]) -> Iterator[None]:
        """In the block and in this thread, call steps that are islands through ``island(function, args, kwargs)``."""
        with contextlib.ExitStack() as around:
            islands = list(self._islands)
            schedules = [
                schedule
                for schedule in list(self._schedules)
                if any(schedule.optimizer is island for island in islands)
            ]
            several: list[Stepping] = [*islands, *schedules]
            for stepping in several:
                around.enter_context(_through(stepping, island))
            yield

    def note_gradients(
        self, read: Iterable[Any], changed: Iterable[Change], before: Snapshot, stand_ins: Collection[int]
    ) -> None:
        """After a run: whether a tensor has a gradient is part of the key from now on, if the body looked at it, or if
        it came or went, and the tensor was there before: in Python state, or as an argument that is always the same.

        ``read``: tensors whose ``grad`` was looked at; ``stand_ins``: ``id`` of tensors that stood for arguments."""
        came = [change.source.holder for change in changed if change.source.name == "grad" and not change.container]
        tensors = [value for value in (*read, *came) if issubclass(type(value), torch.Tensor)]
        candidates = {id(tensor): tensor for tensor in tensors if tensor.is_leaf or tensor.retains_grad}
        if not candidates:
            return
        there = {id(tensor) for owners in before.tensors.values() for _, tensor in owners}
        there |= self.parameter_ids()
        there.difference_update(stand_ins)
        there -= {id(parameter()) for parameter in self._parameters}
        owners = {id(tensor): several for several in before.tensors.values() for _, tensor in several}
        have = {id(one) for reference in self._parameters if (one := whose_gradient(reference)) is not None}
        for key, candidate in candidates.items():
            if key in there:
                sources = [source for source, tensor in owners.get(key, ()) if tensor is candidate]
                gradient = only_gradient(sources)
                if gradient is None or id(gradient.holder) not in have:
                    self._parameters.append(reference_to(candidate, sources))

    def tables(self) -> set[int]:
        """``id`` of the dicts that hold what optimizers keep of parameters: each step has other values there."""
        return {id(held) for one in self._alive() for held in getattr(one, "state", {}).values()}

    def parameter_ids(self) -> set[int]:
        """``id`` of the parameters of all optimizers that were found."""
        return {id(p) for one in self._alive() for group in _groups(one) for p in group["params"]}

    def keeper_of(self, part: int) -> tuple[Callable[[], Any], str, str] | None:
        """Where the value of one of the key's parts is kept, its name there, and its path; None if that is no
        setting."""
        places = [
            (schedule, number, name) for schedule in self._counting() for number, name, _ in self._settings_of(schedule)
        ]
        if part >= len(places):
            return None
        optimizer, number, name = places[part]
        path = f"{type(optimizer).__name__}.param_groups[{number}][{name!r}]"
        return functools.partial(_group_of, weakref.ref(optimizer), number), name, path

    def leave_out(self, keeper: Any, name: Any) -> None:
        """A setting is no part of the key any more: it is an argument of the call, in effect."""
        for one in self._alive():
            for number, group in enumerate(_groups(one)):
                if group is keeper:
                    self._lifted.setdefault(one, set()).add((number, name))
                    self._steps.pop(one, None)
                    self._unsteady.discard(one)

    def follow(self, numbers: Iterable[Callable[[], Any]]) -> None:
        """What steps compute may follow from these numbers, which are arguments of the call from now on."""
        self.numbers_of_call += numbers
        self._steps.clear()
        self._unsteady.clear()

    def part(self) -> tuple[Any, ...]:
        """The key's part: all settings as they are now, without the parameters, which gradients there are, flags."""
        return (*self._setting_parts(), *self._other_parts())

    def _setting_parts(self) -> list[Any]:
        return [part_of(value, limit=None) for _, value in self._settings()]

    def _other_parts(self) -> list[Any]:
        return [*[(one.grad is None, *_hooks_of(one)) for one in self._watched()], *self.flags()]

    def same_part(self) -> Callable[[], bool]:
        """A function that tells whether the key's part is as it is now. Settings are mostly the very objects that they
        were in the call before, and then need no look into them."""
        settings, others = self._setting_parts(), self._other_parts()
        latest = self._lasting_values()

        def is_same() -> bool:
            nonlocal latest
            now = self._values()
            if latest is None or len(latest) != len(now) or not all(map(operator.is_, now, latest)):
                if self._setting_parts() != settings:
                    return False
                latest = self._lasting_values()
            return self._other_parts() == others

        return is_same

    def _values(self) -> list[Any]:
        """All that the groups of parameters have, but for those."""
        groups = [group for one in self._counting() for group in _groups(one)]
        return [value for group in groups for name, value in group.items() if name != "params"]

    def _lasting_values(self) -> list[Any] | None:
        """The same; None where one may change in place."""
        found = self._values()
        return found if all(map(_lasts, found)) else None

    def labels(self) -> list[str]:
        """Names of the parts."""
        names = [
            *[name for name, _ in self._settings()],
            *["the lack of a gradient, or hooks" for _ in self._watched()],
        ]
        return [*names, *["a module's training flag" for _ in self.flags()]]

    def _watched(self) -> list[torch.Tensor]:
        return [parameter for one in self._parameters if (parameter := one()) is not None]

    def _alive(self) -> list[torch.optim.Optimizer]:
        return [optimizer for one in self._found if (optimizer := one()) is not None]

    def _counting(self) -> list[torch.optim.Optimizer]:
        return [one for one in self._alive() if one not in self._islands]

    def _settings(self) -> Iterable[tuple[str, Any]]:
        for one in self._counting():
            several = len(_groups(one)) > 1
            for number, name, value in self._settings_of(one):
                yield f"{name} of {f'param_groups[{number}]' if several else type(one).__name__}", value

    def _settings_of(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, str, Any]]:
        """The settings of one optimizer that are part of the key: number of the group, name, value."""
        lifted = self._lifted.get(optimizer, ())
        return [one for one in _settings_of(optimizer) if one[:2] not in lifted]


_LASTING = frozenset({bool, int, float, complex, str, type(None)})


def _lasts(value: Any) -> bool:
    """Whether it is what it was if it is the same object."""
    return type(value) in _LASTING or (type(value) is tuple and all(map(_lasts, value)))


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its groups of parameters. A wrapper around another optimizer may have none of its own."""
    groups = getattr(optimizer, "param_groups", None)
    return groups if isinstance(groups, list) else []


def _settings_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, Any]]:
    for number, group in enumerate(_groups(optimizer)):
        yield from ((number, name, value) for name, value in group.items() if name != "params")


def reach_of_step(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, Any] | None:  # fmt: skip
    """By ``id``, all that a step of an optimizer of torch's own sees and may write: the optimizer, its groups,
    parameters and state; or that of a schedule: itself, and settings of its optimizer. None for all other functions,
    and where code of users runs in it that may do more than compute: a closure, or a hook."""
    if len(args) != 1 or kwargs or _kinds.get(type(args[0])) is not function:
        return None
    stepping, kind = args[0], type(args[0])
    if not (kind.__module__.startswith("torch.optim.") and kind.step.__module__.startswith("torch.optim.")):
        return None
    if issubclass(kind, LRScheduler):
        reached = _reach_of_schedule(stepping)
    elif issubclass(kind, torch.optim.Optimizer) and not has_hooks(stepping):
        reached = {id(stepping): stepping, **_reached_from([stepping.__dict__])}
    else:
        return None
    values = () if reached is None else reached.values()
    if any(issubclass(type(value), torch.Tensor) and value.layout is not torch.strided for value in values):
        return None
    return reached


def _reached_from(stack: list[Any]) -> dict[int, Any]:
    """By ``id``, these values and what is in their containers, with the gradients of tensors."""
    reached: dict[int, Any] = {}
    while stack:
        value = stack.pop()
        if id(value) in reached:
            continue
        reached[id(value)] = value
        if issubclass(type(value), dict):
            stack += value.values()
            stack += [key for key in value if isinstance(key, torch.Tensor)]
        elif issubclass(type(value), (list, tuple)):
            stack += value
        elif issubclass(type(value), torch.Tensor) and value.is_leaf and value.grad is not None:
            stack.append(value.grad)
    return reached


def _reach_of_schedule(schedule: LRScheduler) -> dict[int, Any] | None:
    """None where the step may warn, as the first one does, where the schedule has others of its own, and where a
    function that it was given may do more than compute."""
    own, optimizer, kind = vars(schedule), schedule.optimizer, type(schedule)
    may_warn = kind.step is LRScheduler.step and own.get("_step_count", 0) <= 1
    if may_warn or not kind.get_lr.__module__.startswith("torch.optim."):
        return None
    reached = _reached_from([*own.values(), *[value for *_, value in _settings_of(optimizer)]])
    holders: list[Any] = [schedule, own, optimizer, vars(optimizer), _groups(optimizer), *_groups(optimizer)]
    for value in reached.values():
        if issubclass(type(value), LRScheduler):
            return None
        if callable(value):
            read = holders_read(value)
            if read is None:
                return None
            holders += read
    return reached | {id(holder): holder for holder in holders}


def set_by_schedule(function: Callable[..., Any], args: tuple[Any, ...]) -> list[dict[str, Any]]:
    """The dicts in which the step of a schedule, as an island, may give names other values: those of the schedule, of
    schedules that it has, and the settings of their optimizers. Empty for all other functions."""
    is_step = len(args) > 0 and issubclass(type(args[0]), LRScheduler) and _kinds.get(type(args[0])) is function
    todo, found = [args[0]] if is_step else [], dict[int, dict[str, Any]]()
    while todo:
        own = vars(todo.pop())
        if id(own) not in found:
            found[id(own)] = own
            values = [*own.values(), *[one for value in own.values() if type(value) in (list, tuple) for one in value]]
            todo += [value for value in values if issubclass(type(value), LRScheduler)]
            found |= {id(group): group for group in _groups(own["optimizer"])} if "optimizer" in own else {}
    return [*found.values()]


def is_stand_in(value: Any) -> bool:
    """Whether this replaces an optimizer's ``step`` while a body is watched."""
    return issubclass(type(value), types.FunctionType) and value in _stand_ins


def _group_of(optimizer: weakref.ref[torch.optim.Optimizer], number: int) -> dict[str, Any] | None:
    held = optimizer()
    groups = [] if held is None else _groups(held)
    return groups[number] if number < len(groups) else None


def _numbers(settings: Iterable[tuple[int, str, Any]]) -> Iterator[str]:
    """Settings that are numbers, as a text."""
    return (repr(value) for *_, value in settings if type(value) in (int, float, tuple))


@contextlib.contextmanager
def _through(stepping: Stepping, island: Callable[..., Any]) -> Iterator[None]:
    """In the block, an attribute of the object replaces its method ``step``, except while ``step`` itself runs. A
    schedule may have put such an attribute there already; that one is called then."""
    attributes, thread, method = vars(stepping), threading.get_ident(), stepping.step
    step_before = attributes.get("step", MISSING)
    is_open = True

    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return method(*args, **kwargs)
        take()
        try:
            return island(_step_of(type(stepping)), (stepping, *args), kwargs)
        finally:
            if is_open:
                attributes["step"] = step

    def take() -> None:
        if attributes.get("step") is not step:
            return
        if step_before is MISSING:
            del attributes["step"]
        else:
            attributes["step"] = step_before

    _stand_ins.add(step)
    attributes["step"] = step
    try:
        yield
    finally:
        is_open = False
        take()


_stand_ins: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
_kinds: weakref.WeakKeyDictionary[type, Callable[..., Any]] = weakref.WeakKeyDictionary()


def _hooks_of(parameter: torch.Tensor) -> tuple[int, ...]:
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return (*(hooks[0] or ()), -1, *(hooks[1] or ()), -1, *hooks_of_accumulation(parameter))


def _step_of(kind: type) -> Callable[..., Any]:
    """The function that replaces the step of all optimizers, or schedules, of this class."""
    step_function = _kinds.get(kind)
    if step_function is None:

        def step_function(stepping: Stepping, *args: Any, **kwargs: Any) -> Any:
            return stepping.step(*args, **kwargs)

        step_function.__qualname__ = f"{kind.__name__}.step"
        step_function = _kinds.setdefault(kind, step_function)
    return step_function
