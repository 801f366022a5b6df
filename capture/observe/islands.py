"""Islands: functions that run eagerly in every replay, between two segments.

``perform`` runs one and gives its ``Outcome``: all that it left where a replay, or the body, goes on. An island cannot
be undone: it may have printed. So where a call stops between two segments and its body is run after all, from its begin
and on what was put back, the islands that ran are **answered**: the body gets what they gave, and finds the memory that
they wrote, and the generators that they drew from, as they left them. ``answer`` says so for the call that is under way
in this thread.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve

from capture.core.data import frozen
from capture.key import pytree
from capture.key.code_names import MISSING
from capture.key.modes import inlined
from capture.key.pytree import PLAIN_TYPES, TENSOR_TYPES
from capture.key.tensor_meta import digest
from capture.native import native
from capture.state.source import Source, lasting
from capture.torch_private import capabilities

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_DEEPEST = 30  # levels of containers


class UnsuitedError(Exception):
    """What an island gets or gives is none of what a recording can hold. The text reads after its name."""


class Given:
    """Stands for a tensor among an island's arguments, by its number, or for a view of one: dtype, offset in the
    storage, shape and strides. No attrs class, since those are containers to be opened."""

    __slots__ = ("number", "view")

    def __init__(self, number: int, view: tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]] | None) -> None:
        self.number, self.view = number, view

    def among(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that this stands for, given the arguments' tensors."""
        tensor = tensors[self.number]
        if self.view is None:
            return tensor
        dtype, offset, shape, stride = self.view
        with torch.no_grad():
            base = tensor if tensor.dtype == dtype else tensor.view(dtype)
            return base.as_strided(shape, stride, offset)


class Place:
    """An attribute that the body gave another value before an island, as a backward pass does with ``grad``. Its object
    is not kept alive. No attrs class, as above."""

    __slots__ = ("holder", "is_grad", "name", "parameter", "path")

    def __init__(self, source: Source) -> None:
        self.holder, self.name, self.path = lasting(source.holder), source.name, source.path
        self.is_grad = type(source.holder) in TENSOR_TYPES and source.name == "grad"
        self.parameter = source.holder if self.is_grad and type(source.holder) is torch.nn.Parameter else None
        """Of which it is the gradient. Most places are, and of those the plain way to it is the fastest."""

    def source(self) -> Source | None:
        """The source of the place now; None once the object is gone."""
        holder = self.holder()
        return None if holder is None else Source("attribute", holder, self.name, self.path)

    def get(self) -> Any:
        """The present value."""
        if self.is_grad and (holder := self.holder()) is not None:
            return holder.grad
        source = self.source()
        return MISSING if source is None else source.get()

    def put(self, value: Any) -> None:
        """Have this there; ``MISSING``: nothing."""
        if self.is_grad and (holder := self.holder()) is not None:
            holder.grad = value
            return
        source = self.source()
        if source is not None:
            source.put(value)


@frozen(eq=False)
class Before:
    """What the body changed in Python before an island, which is to find it so. A replay puts such changes out at its
    end; before an island it does so for as long as that runs."""

    places: tuple[Place, ...] = ()
    values: tuple[Any, ...] = ()
    """The values: tensors, flags, texts, or None."""

    @classmethod
    def now(cls, places: tuple[Place, ...]) -> Before:
        """The same places with their present values."""
        return cls(places, tuple(_values_at(places)))

    @contextlib.contextmanager
    def put_out(self) -> Iterator[list[StateChange]]:
        """In the block it is so, and afterwards as it was. Gives, once that is over, places to which the island itself
        gave other values."""
        left: list[StateChange] = []
        before = _values_at(self.places)
        try:
            _put_at(self.places, self.values, before)
            yield left
        finally:
            now = _values_at(self.places)
            if all(map(operator.is_, now, self.values)):
                _put_at(self.places, before, now)
            else:
                self._put_what_stayed(before, now, left)

    def _put_what_stayed(self, before: Sequence[Any], now: Sequence[Any], left: list[StateChange]) -> None:
        for place, value, value_before, value_now in zip(self.places, self.values, before, now, strict=True):
            if value_now is not value:
                left.append(StateChange(place, value_before, value_now))
            elif value is not value_before:
                place.put(value_before)


def _values_at(places: Iterable[Place]) -> list[Any]:
    """Their present values."""
    return [place.get() if (parameter := place.parameter) is None else parameter.grad for place in places]


def _put_at(places: Iterable[Place], values: Iterable[Any], there: Iterable[Any]) -> None:
    """Have these values there. ``there``: the present ones."""
    for place, value, value_there in zip(places, values, there, strict=True):
        if value is value_there:
            continue
        if (parameter := place.parameter) is None:
            place.put(value)
        else:
            parameter.grad = value


_NOTHING_BEFORE = Before()


@frozen(eq=False)
class StateChange:
    """A place in Python state whose value changed."""

    place: Place | Source
    before: Any
    after: Any

    def put(self, value: Any) -> None:
        """Have this value there; ``MISSING``: nothing."""
        self.place.put(value)


@frozen(eq=False)
class Outcome:
    """What one run of an island left."""

    function: Callable[..., Any]
    result: Any
    """The result, with ``Given`` in the places of arguments."""
    text: str
    """The result as text: equal texts mean the same containers, plain values, kinds and places of tensors."""
    made: tuple[torch.Tensor, ...] = ()
    """Tensors in the result that it made, in order."""
    error: BaseException | None = None
    unsuited: str | None = None
    """Why no recording can hold the result; None if one can."""
    written: tuple[tuple[int, torch.Tensor], ...] = ()
    """Arguments that it wrote, by number, with their contents afterwards."""
    beside: tuple[tuple[torch.Tensor, torch.Tensor | None], ...] = ()
    """Other tensors that it wrote, with their contents afterwards; None as long as the tensor itself still holds
    them."""
    generators: tuple[tuple[torch.Generator, torch.Tensor | None], ...] = ()
    """Generators that it may have drawn from, with their states afterwards; None as long as the generator itself still
    has that state."""
    state: tuple[StateChange, ...] = ()
    """Its changes of Python state that the body may have read before."""
    places: tuple[Place, ...] = ()
    """Places that the body had changed before the island; their values are the last of its arguments."""
    ms: float = 0.0
    """How long it took."""

    def among(self, tensors: Sequence[torch.Tensor], made: Mapping[int, torch.Tensor] = MappingProxyType({})) -> Any:
        """The result, for arguments with these tensors. ``made``: others, by ``id`` of those that it made."""
        return pytree.rebuild(
            self.result, lambda one: one.among(tensors) if type(one) is Given else made.get(id(one), one)
        )

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that ``Given`` refers to, in a call with these arguments."""
        return list(tensors_of((args, kwargs, Before.now(self.places).values)))

    def with_contents(self) -> Outcome:
        """With the contents of what it wrote, which others may write from now on."""
        with torch.no_grad():
            beside = [(one, one.detach().clone() if contents is None else contents) for one, contents in self.beside]
        generators = [(one, one.get_state() if state is None else state) for one, state in self.generators]
        return evolve(self, beside=tuple(beside), generators=tuple(generators))

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Restore everything that it left, without running it."""
        tensors = self.given(args, kwargs)
        with torch.no_grad():
            for number, written in self.written:
                tensors[number].copy_(written)
            for tensor, contents in self.beside:
                assert contents is not None
                tensor.copy_(contents)
        for generator, state in self.generators:
            assert state is not None
            generator.set_state(state)
        for change in self.state:
            change.put(change.after)


# ------------------------------------------------------------------------------------------------------------- answers


class _Left(threading.local):
    def __init__(self) -> None:
        self.owner: Any = None
        self.outcomes: list[Outcome] = []


_left = _Left()


def answer(owner: Any, outcomes: list[Outcome]) -> None:
    """Answer these islands, which ran in this call in this order, until ``settle`` is called for the same owner. An
    outcome is removed from the list once it was used, so that nothing of it is kept alive."""
    _left.owner, _left.outcomes = owner, outcomes


def settle(owner: Any) -> None:
    """The owner's call is over: answer no more of its islands."""
    if _left.owner is owner:
        _left.owner, _left.outcomes = None, []


def pending() -> list[Outcome]:
    """The outcomes that are still to be taken in this thread. A run that is undone takes them, too; after it
    ``answer_again`` has them be taken by the run that counts."""
    return list(_left.outcomes)


def answer_again(outcomes: list[Outcome]) -> None:
    """Answer these as they were ``pending`` before a run, which was undone."""
    _left.outcomes[:] = outcomes


def has_answers(owner: Any) -> bool:
    """Whether outcomes of islands of this call are still to be taken by a second run."""
    return _left.owner is owner and are_answered()


def are_answered() -> bool:
    """Whether outcomes of islands are still to be taken in this thread."""
    return bool(_left.outcomes)


def taken(function: Callable[..., Any]) -> Outcome | None:
    """What the function gave, if it is the next to be answered. A body that goes another way runs its own."""
    if not _left.outcomes:
        return None
    if _left.outcomes[0].function is function:
        return _left.outcomes.pop(0)
    _left.outcomes.clear()
    return None


# ------------------------------------------------------------------------------------------------------------- running


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An island outside of any watched run."""
    outcome = taken(function)
    if outcome is None:
        return function(*args, **kwargs)
    outcome.again(args, kwargs)
    if outcome.error is not None:
        try:
            raise outcome.error
        finally:
            del outcome  # which has the error, and the error this frame
    return outcome.among(outcome.given(args, kwargs))


def perform(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    beside: Sequence[torch.Tensor] = (), generators: Sequence[torch.Generator] = (), before: Before = _NOTHING_BEFORE,
    after: Callable[[Outcome], object] = bool, *, keeps: bool = True,
) -> tuple[Outcome, Any]:  # fmt: skip
    """Run it, or answer it. Gives what the body gets, too, where it raised nothing. ``beside``: other tensors that it
    may write; ``generators``: those it may draw from; ``before``: what it is to find in Python; ``after`` is told once
    it ran, more than once perhaps. ``keeps``: what it wrote beside is to be written by others."""
    answered = taken(function)
    if answered is not None:
        answered.again(args, kwargs)
        return answered, answered.among(answered.given(args, kwargs))
    tensors = list(tensors_of((args, kwargs, before.values)))
    versions = _versions_of(tensors, beside)
    states = [generator.get_state() if keeps else None for generator in generators]
    begin, ran, made = time.perf_counter(), list[tuple[Any, BaseException | None]](), list[Outcome]()
    left: Sequence[StateChange] = ()

    def run() -> None:
        nonlocal left
        try:
            with before.put_out() as left:
                ran.append((inlined(functools.partial(function, *args, **kwargs)), None))
        except BaseException as error:  # the body's own, raised again where it stands
            if ran:
                raise
            ran.append((None, error))

    def commit(_: bool) -> None:
        """What it did is known, whoever is stopped meanwhile: it cannot run again."""
        if not ran:
            return
        error = ran[0][1]
        if error is not None:
            outcome = Outcome(function, None, f"raised {type(error).__name__}", error=error)
        elif ran[0][0] is None:
            outcome = Outcome(function, None, _NOTHING)
        else:
            holders = _holders(ran[0][0])  # first: nothing else here has the result yet
            outcome = _outcome(function, ran[0][0], holders, tensors)
        ms = (time.perf_counter() - begin) * 1e3
        now, count, seen = _versions_of(tensors, beside), len(tensors), (*tensors, *beside)
        written = [(at, seen[at]) for at in range(len(seen)) if now[at] != versions[at]]
        made[:] = [
            evolve(
                outcome,
                ms=ms,
                state=tuple(left),
                places=before.places,
                unsuited=outcome.unsuited or (f"changes {left[0].place.path}" if left else None),
                written=tuple((at, tensor.detach().clone()) for at, tensor in written if at < count),
                beside=tuple((t, t.detach().clone() if keeps else None) for at, t in written if at >= count),
                generators=_drawn_from(generators, states),
            )
        ]
        after(made[0])

    native.committed(run, (), commit)
    return made.pop(), ran.pop()[0]  # an error among them has this frame


def _drawn_from(
    generators: Sequence[torch.Generator], before: Sequence[torch.Tensor | None]
) -> tuple[tuple[torch.Generator, torch.Tensor | None], ...]:
    """Generators with their states now, but for those that are in the same one; all where that is not known."""
    now = [
        (one, state, None if state is None else one.get_state()) for one, state in zip(generators, before, strict=True)
    ]
    return tuple((one, new) for one, old, new in now if old is None or new is None or not torch.equal(old, new))


def version_of(tensor: torch.Tensor) -> int | str:
    """A value that changes when the tensor is written: its version counter, or, as tensors of inference mode have none,
    a digest of its contents."""
    return digest(tensor) if tensor.is_inference() else tensor._version


def _versions_of(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[int | str]:
    try:
        return [*map(_version, tensors), *map(_version, others)]
    except RuntimeError:  # tensors of inference mode have none
        return [version_of(tensor) for tensor in (*tensors, *others)]


_version = operator.attrgetter("_version")


def name_of(function: Callable[..., Any]) -> str:
    """Its name in messages."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Tensors among arguments, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (tuple, list) or pytree.is_namedtuple(type(value)):
        for member in value:
            yield from tensors_of(member)
    elif type(value) is dict:
        for member in value.values():
            yield from tensors_of(member)


def place_of(change: Any) -> Place | None:
    """Where an island of a replay can find what the body changed: a plain tensor, a flag, a text, or none, that is now
    an attribute of an object that can be told from others, and is the same in each call. A number may be one that each
    call counts up."""
    source, value = change.source, change.after
    if source.is_in_argument():
        return None
    if change.container or source.kind != "attribute" or isinstance(source.holder, type):
        return None
    if not type(source.holder).__weakrefoffset__ or value is not source.get():
        return None
    if isinstance(value, torch.Tensor):
        try:
            _check_tensor(value)
        except UnsuitedError:
            return None
        return None if value.requires_grad else Place(source)
    return Place(source) if type(value) in (bool, str, type(None)) else None


def check_arguments(value: Any, is_same: Callable[[Any], bool], depth: int = 0) -> None:
    """Raises ``UnsuitedError`` for what a recording cannot hold. ``is_same``: whether an object is so in every call."""
    if isinstance(value, torch.Tensor):
        _check_tensor(value)
        if value.requires_grad and not value.is_leaf:
            raise UnsuitedError("gets a tensor that needs gradients: pass it with .detach()")
    elif type(value) in (tuple, list, dict) or pytree.is_namedtuple(type(value)):
        for member in value.values() if type(value) is dict else value:
            check_arguments(member, is_same, _deeper(depth))
    elif type(value) not in PLAIN_TYPES and not (is_object(type(value)) and is_same(value)):
        raise UnsuitedError(f"gets an object of type {type(value).__qualname__}")


def _check_tensor(value: torch.Tensor) -> None:
    if type(value) not in TENSOR_TYPES or value.layout is not torch.strided or value.is_nested or value.is_quantized:
        raise UnsuitedError("gets or gives a tensor of another kind than a plain one")
    if value.is_neg() or value.is_conj():
        raise UnsuitedError("gets or gives a lazily conjugated or negated tensor")


def is_object(kind: type) -> bool:
    """Whether objects of this class can be told from others without being kept alive."""
    return bool(kind.__weakrefoffset__) and not issubclass(kind, (torch.Tensor, type))


def _deeper(depth: int) -> int:
    if depth > _DEEPEST:
        raise UnsuitedError("gets or gives containers that are nested too deeply")
    return depth + 1


def _outcome(
    function: Callable[..., Any], result: Any, holders: list[tuple[int, int]], inputs: Sequence[torch.Tensor]
) -> Outcome:
    made: list[torch.Tensor] = []
    try:
        text = _text_of(result, inputs, made)
        template = pytree.rebuild(result, lambda leaf: _template(leaf, inputs)) if inputs else result
    except UnsuitedError as unsuited:
        return Outcome(function, result, "", unsuited=str(unsuited))
    fresh, leaves = {id(tensor) for tensor in made}, list(tensors_of(result))
    is_tensor = isinstance(result, torch.Tensor)

    def is_held(alone: tuple[int, int]) -> bool:
        pairs = zip(leaves, holders, strict=True)
        return any(id(leaf) in fresh and any(map(operator.gt, by, alone)) for leaf, by in pairs)

    # where somebody evaluates frames, as Dynamo does, a call has references of its own to what it passes
    kept = is_held(_ALONE[is_tensor]) and is_held(_probe(_MAKES[is_tensor]))
    return Outcome(function, template, text, tuple(made), unsuited="keeps a tensor that it gives" if kept else None)


def _text_of(value: Any, inputs: Sequence[torch.Tensor], made: list[torch.Tensor], depth: int = 0) -> str:
    if isinstance(value, torch.Tensor):
        return _text_of_tensor(value, inputs, made)
    kind = type(value)
    if kind in (tuple, list) or pytree.is_namedtuple(kind):
        return f"{kind.__qualname__}[{', '.join(_text_of(member, inputs, made, _deeper(depth)) for member in value)}]"
    if kind is dict:
        members = (f"{key!r}: {_text_of(member, inputs, made, _deeper(depth))}" for key, member in value.items())
        if any(type(key) not in PLAIN_TYPES for key in value):
            raise UnsuitedError("gives a dict whose keys are no plain values")
        return f"{{{', '.join(members)}}}"
    if kind in PLAIN_TYPES:
        return f"{kind.__name__} {value!r}"
    raise UnsuitedError(f"gives an object of type {kind.__qualname__}")


def _text_of_tensor(value: torch.Tensor, inputs: Sequence[torch.Tensor], made: list[torch.Tensor]) -> str:
    _check_tensor(value)
    template = _template(value, inputs)
    if type(template) is Given:
        return f"argument {template.number} {template.view or ''}"
    if value.requires_grad:
        raise UnsuitedError("gives a tensor that needs gradients: return it with .detach()")
    storage = value.untyped_storage()._cdata
    if any(tensor.untyped_storage()._cdata == storage for tensor in made):
        raise UnsuitedError("gives tensors that share memory")
    made.append(value)
    return f"{value.dtype}{list(value.shape)}{list(value.stride())} {value.device.type}"


def _template(value: Any, inputs: Sequence[torch.Tensor]) -> Any:
    found = given_among(value, inputs) if isinstance(value, torch.Tensor) else None
    return value if found is None else found


def given_among(value: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Given | None:
    """Which of these it is, or is a view of."""
    for number, tensor in enumerate(inputs):
        if tensor is value:
            return Given(number, None)
    for number, tensor in enumerate(inputs):
        if tensor.untyped_storage()._cdata == value.untyped_storage()._cdata and value.numel():
            geometry = value.dtype, int(value.storage_offset()), tuple(value.shape), tuple(value.stride())
            return Given(number, geometry)
    return None


def _holders(result: Any) -> list[tuple[int, int]]:
    """Of each tensor in a result: who has it in Python, and in C++, its memory included. A view has the tensor that it
    is a view of, which counts as held where others have that, too."""
    leaves, uses_of = list(tensors_of(result)), []
    for at in range(len(leaves)):
        count = sys.getrefcount(leaves[at]) - sum(leaf is leaves[at] for leaf in leaves)
        uses = capabilities.use_count(leaves[at]) + capabilities.storage_use_count(leaves[at].untyped_storage())
        if leaves[at]._is_view():
            base: Any = leaves[at]._base
            uses += -1 if sys.getrefcount(base) <= _ALONE_BASE and capabilities.use_count(base) <= _BASE_USES else 0
            del base
        uses_of.append((count, uses))
    return uses_of


def _probe_base() -> tuple[int, int]:
    view = torch.zeros(2, device="cpu")[:1]
    base: Any = view._base
    return sys.getrefcount(base), capabilities.use_count(base)


_NOTHING = _text_of(None, (), [])
GIVES_NOTHING = repr(_NOTHING)
"""``Facts.reads`` has this of one that gives None, as an optimizer's step does."""
_ALONE_BASE, _BASE_USES = _probe_base()


def _probe(make: Callable[[], Any]) -> tuple[int, int]:
    ran = [(make(),)]  # as where an island ran: from Python 3.14 on a local name that is passed counts once, not twice
    (found,) = _holders(ran[0][0])
    return found


_MAKES: Mapping[bool, Callable[[], Any]] = {
    True: lambda: torch.zeros(1, device="cpu"),
    False: lambda: [torch.zeros(1, device="cpu")],
}
_ALONE = {is_tensor: _probe(make) for is_tensor, make in _MAKES.items()}
"""Reference counts of a tensor that nobody else holds: one that is the result, and one inside the result."""
