"""Run the same calls eagerly and captured, and compare all they leave, bit for bit.

Both passes run on the very same objects, put back in between. A copy of them would not do: a function reaches tensors
through closures and globals, and a recording is bound to their addresses.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import field

from capture.api.decorator import all_states
from capture.api.inspect import state_of, values_of_call
from capture.api.warmup import split_case
from capture.core import config
from capture.core.data import define, frozen
from capture.core.errors import CaptureWarning
from capture.key import pytree, tensor_meta
from capture.key.pytree import PLAIN_TYPES
from capture.runtime.captured import Captured
from capture.state import diff
from capture.state.snapshot import Snapshot, snapshot
from capture.torch_private import generators

_KINDS = ("replays", "recordings", "observations", "eager_calls")


def assert_equal_to_eager(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...] | Mapping[str, Any]], *, rounds: int = 3,
    backward: bool = True,
) -> int:  # fmt: skip
    """Run ``calls`` eagerly, put everything back, run them captured, and compare after every call, bit for bit.

    Compared are results (values, dtype, shape, stride, device, ``requires_grad``), exceptions, arguments, the Python
    state that the function can reach (modules, optimizers, closures, globals, attributes of objects, ``.grad``), and
    the generators of torch, Python and NumPy. Afterwards the state is as after the captured calls.

    Args:
        function: a captured function, module or method, or any function that calls captured ones (a loop, a step).
        calls: as ``warmup(fn).cases`` takes them: a tuple of positional arguments, a mapping of keyword arguments,
            or ``(args, kwargs)`` each.
        rounds: how often the whole list is run. Three let each call be watched, recorded and replayed.
        backward: run a backward pass through each result that needs gradients, with fixed random gradients, so that
            gradients are compared. Where the function ran one itself, as a training step does, none is run.

    Returns:
        How many replays the captured pass made: ``assert assert_equal_to_eager(fn, calls) > 0`` where it must.

    Raises:
        AssertionError: at the first difference. It names the call, what differs, both values and whether the call
            was a replay, and says so where the function differs from itself in a second eager run.
        TypeError: a call has another form, or the function does not take its arguments.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    cases = [split_case(number, case) for number, case in enumerate(calls)] * rounds
    program = _Program(function, state_of(function), cases, backward)
    start = _Start.take(program.snapshots(len(cases) // max(rounds, 1)))
    with config.patch(enabled=False):
        try:
            eager = program.run()
        except _GraphIsFreedError:
            start.put_back()
            program.backward = False
            eager = program.run()
    start.put_back()
    before = _counts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        difference = program.first_difference(eager)
    if difference is None:
        return _risen(before)["replays"]
    position, what, kind = difference
    start.put_back()
    with config.patch(enabled=False):
        again = program.run()[: position + 1]
    varies = _first_different(eager[: position + 1], again) is not None
    remark = (
        "\n  note: two eager runs of these calls differ as well: the function is not deterministic" if varies else ""
    )
    number = f"call {position + 1} of {len(cases)} ({kind}) differs from eager in {what}"
    raise AssertionError(f"{program.captured.annotation.function}: {number}\n  call: {program.text(position)}{remark}")


class _GraphIsFreedError(Exception):
    """The function has run the backward pass of its result itself."""


@frozen
class _TensorValue:
    """A tensor as it was at one moment."""

    info: str
    requires_grad: bool
    stride: tuple[int, ...]
    contents: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorValue:
        """The tensor as it is now, with a copy of its values."""
        info = tensor_meta.tensor_info(tensor)
        dense = tensor.detach()
        if tensor.layout is not torch.strided:
            dense = dense.to_dense()
        return cls(str(info), tensor.requires_grad, info.stride, dense.clone())

    def difference(self, replayed: _TensorValue) -> str | None:
        """How the captured tensor ``replayed`` differs from this one, the eager tensor; None where it does not."""
        if self.info != replayed.info:
            return f"{replayed.info}, eager {self.info}"
        if self.stride != replayed.stride:
            return f"strides {replayed.stride}, eager {self.stride}"
        if self.requires_grad != replayed.requires_grad:
            return f"requires_grad={replayed.requires_grad}, eager {self.requires_grad}"
        if _same_contents(self.contents, replayed.contents):
            return None
        if self.contents.is_nested or (self.contents.is_floating_point() and self.contents.element_size() == 1):
            return "other numbers"  # no comparison of elements for these
        ours, theirs = replayed.contents.reshape(-1), self.contents.reshape(-1)
        unequal = ((ours != theirs) & ~(ours.isnan() & theirs.isnan())).nonzero()
        if not unequal.numel():
            return "the bits of a zero's sign or of a NaN"
        first = int(unequal[0])
        place = tuple(int(index) for index in torch.unravel_index(unequal[0, 0], self.contents.shape))
        count = f"{unequal.numel()} of {ours.numel()} elements differ"
        return f"{count}, the first at {place}: {ours[first].item()!r}, eager {theirs[first].item()!r}"


def _same_contents(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_nested:
        return all(_same_contents(a, b) for a, b in zip(one.unbind(), other.unbind(), strict=True))
    return tensor_meta.same_bits(one, other)


_Values = dict[str, Any]
"""What there is after a call, by path: a ``_TensorValue``, a plain value, or the name of a type."""


@define(eq=False)
class _Program:
    """The calls, and how one pass over them is run."""

    function: Callable[..., Any]
    captured: Captured
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]]
    backward: bool
    bound: list[tuple[Any, ...]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.bound = [values_of_call(self.captured, self.function, *case) for case in self.cases]

    def snapshots(self, count: int) -> list[Snapshot]:
        """What each of the first calls can reach. One walk each: arguments of different calls have the same paths."""
        return [snapshot(self.captured.call(values, []).roots()) for values in self.bound[:count]]

    def run(self) -> list[_Values]:
        """One pass: what there is after each call."""
        return [self._after(position) for position in range(len(self.cases))]

    def first_difference(self, eager: list[_Values]) -> tuple[int, str, str] | None:
        """One pass that ends at the first difference: the call's position, what differs, what kind of call it was."""
        for position in range(len(self.cases)):
            before = _counts()
            values = self._after(position)
            different = _first_different([eager[position]], [values])
            if different is not None:
                kinds = [name.removesuffix("s").replace("_", " ") for name, rise in _risen(before).items() if rise]
                return position, different, ", ".join(kinds) or "not captured"
        return None

    def _after(self, position: int) -> _Values:
        args, kwargs = self.cases[position]
        values: _Values = {}
        try:
            result = self.function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - compared with the exception of the other pass
            values["the exception"] = f"{type(error).__name__}: {error}"
        else:
            values["the type of the result"] = type(result).__qualname__
            leaves = pytree.result_leaves(result)
            values.update((f"result `{path}`", _frozen(leaf)) for path, leaf in leaves)
            if self.backward:
                _run_backward([leaf for _, leaf in leaves], position)
        call = self.captured.call(self.bound[position], [])
        values.update(_state_values(snapshot(call.roots())))
        values.update(_generator_values())
        return values

    def text(self, position: int) -> str:
        """A call as a reader would write it."""
        named = self.captured.call(self.bound[position], []).named_values()
        leaves = [(path, leaf) for name, value in named.items() for path, leaf in pytree.leaves(value, name)]
        return ", ".join(f"{path}={_short(_frozen(leaf))}" for path, leaf in leaves)


def _run_backward(leaves: list[Any], seed: int) -> None:
    """A backward pass through all results that need gradients at once, as several may share a graph."""
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    outputs = list({id(output): output for output in outputs}.values())
    if not outputs:
        return
    generator = torch.Generator("cpu").manual_seed(seed)
    gradients = []
    for output in outputs:
        kind = torch.complex64 if output.is_complex() else torch.float32
        drawn = torch.randn(output.shape, generator=generator, dtype=kind, device="cpu")
        gradients.append(drawn.to(device=output.device, dtype=output.dtype))
    try:
        torch.autograd.backward(outputs, gradients)
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise _GraphIsFreedError from error
        raise


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _TensorValue.of(value)
    return value if type(value) in PLAIN_TYPES else f"<{type(value).__qualname__}>"


def _short(value: Any) -> str:
    return value.info if isinstance(value, _TensorValue) else str(value)


def _state_values(state: Snapshot) -> _Values:
    values: _Values = {f"`{path}`": _frozen(value) for path, (_, value) in state.sources.items()}
    for source, container, members in state.members:
        plain = [repr(member) for member in members if type(member) in PLAIN_TYPES]
        unordered = isinstance(container, (set, frozenset))
        values[f"the members of `{source.path}`"] = ", ".join(sorted(plain) if unordered else plain)
    return values


def _generator_values() -> _Values:
    states = {
        f"the state of {generator.device}'s generator": generator.get_state()
        for generator in generators.default_generators()
    }
    values: _Values = {name: _TensorValue.of(state) for name, state in states.items()}
    values["the state of Python's random"] = random.getstate()
    if "numpy.random" in sys.modules:
        values["the state of numpy.random"] = repr(sys.modules["numpy.random"].get_state())
    return values


def _first_different(eager: list[_Values], captured: list[_Values]) -> str | None:
    for theirs, ours in zip(eager, captured, strict=True):
        for name in {**theirs, **ours}:
            if name not in ours:
                return f"{name}: there is none, eager {_short(theirs[name])}"
            if name not in theirs:
                return f"{name}: {_short(ours[name])}, eager has none"
            difference = _difference(theirs[name], ours[name])
            if difference is not None:
                return f"{name}: {difference}"
    return None


def _difference(theirs: Any, ours: Any) -> str | None:
    if isinstance(theirs, _TensorValue) and isinstance(ours, _TensorValue):
        return theirs.difference(ours)
    same = type(theirs) is type(ours) and (theirs == ours or repr(theirs) == repr(ours))  # NaN is itself here
    return None if same else f"{_short(ours)}, eager {_short(theirs)}"


def _counts() -> dict[int, dict[str, int]]:
    """Counters of all captured functions, by the functions' numbers."""
    return {state.number: state.log.counters.items() for state in all_states()}


def _risen(before: dict[int, dict[str, int]]) -> dict[str, int]:
    """By how much each counter rose since ``before``, summed over all functions that are still alive."""
    now = _counts()
    return {name: sum(now[one][name] - before.get(one, {}).get(name, 0) for one in now) for name in _KINDS}


@define(eq=False)
class _Start:
    """All that the calls can reach, as it was before the first."""

    before: list[Snapshot]
    """One snapshot for each call."""
    tensors: list[tuple[torch.Tensor, torch.Tensor, bool, bool]]
    """Each tensor, one on the same memory, whether it needs gradients, whether it has a graph."""
    contents: list[tuple[torch.UntypedStorage, torch.UntypedStorage]]
    """Each storage and a copy of it."""
    generators: list[tuple[torch.Generator, torch.Tensor]]
    host_random: Any

    @classmethod
    def take(cls, before: list[Snapshot]) -> _Start:
        """Note everything as it is now."""
        owners = [owner for snapshot in before for owned in snapshot.tensors.values() for owner in owned]
        tensors = {id(tensor): tensor for _, tensor in owners}
        storages = {id(storage): storage for snapshot in before for storage in snapshot.storages}
        drawn = [source.get() for snapshot in before for source in snapshot.generators.values()]
        return cls(
            before=before,
            tensors=[
                (tensor, tensor.detach(), tensor.requires_grad, tensor.grad_fn is not None)
                for tensor in tensors.values()
            ],
            contents=[(storage, storage.clone()) for storage in storages.values()],
            generators=[(generator, generator.get_state()) for generator in (*generators.default_generators(), *drawn)],
            host_random=generators.host_random_state(),
        )

    def put_back(self) -> None:
        """Put everything back as it was."""
        for before in self.before:
            diff.restore(before, diff.changes(before))
        with torch.no_grad():
            for tensor, same, requires_grad, has_graph in self.tensors:
                if tensor.grad_fn is not None and not has_graph:
                    tensor.detach_()
                if not _is_in_place(tensor, same):
                    tensor.data = same
                if tensor.is_leaf and tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
            for storage, contents in self.contents:
                if storage.nbytes() != contents.nbytes():
                    storage.resize_(contents.nbytes())
                storage.copy_(contents, False)
        for generator, state in self.generators:
            generator.set_state(state)
        generators.restore_host_random(self.host_random)


def _is_in_place(tensor: torch.Tensor, same: torch.Tensor) -> bool:
    shapes = tensor.shape == same.shape and tensor.stride() == same.stride() and tensor.dtype == same.dtype
    return shapes and tensor.data_ptr() == same.data_ptr()
