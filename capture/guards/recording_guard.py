"""Recording guard: is the Python state that a recording was made with still in place?

A list of ``Guard`` records, made once and looked at in C before every replay. In the order of their verdicts: what is
``CHANGED`` if a module, attribute or container on the way to a static tensor was replaced, a submodule or hook came or
went, or a parameter that was None is none no more; ``MOVED`` if a static tensor is another one or at another address;
``OVERLAPS`` if a copied argument shares memory with a static tensor and either is written.

A tensor that moves is replaced in the list. Another recording of the same function takes the list as it is.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set, Sized
from typing import Any

import torch
from attrs import field

from capture.core.data import define
from capture.core.interned import interned
from capture.engines.base import Geometry
from capture.guards.former_values import former_values, guard_on, is_below_argument, is_in_key
from capture.guards.gradient_reads import depends_on_gradients
from capture.guards.guard import MOVED, OK, OVERLAPS, Guard, pieces_of
from capture.guards.read import Places, Read
from capture.guards.read_guards import begins_with, path_read, read_by, starts_of
from capture.key.attributes import MISSING, names_of, slot_of
from capture.key.packages import package_of
from capture.key.pytree import PLAIN_TYPES, TENSOR_TYPES
from capture.key.tensor_meta import merged, range_of, span_bytes
from capture.native import native
from capture.observe.described import DescribedRun, ImplicitInput
from capture.observe.dropped import holders_of, references_to
from capture.observe.islands import StateChange
from capture.observe.run import ObservedRun
from capture.state.amounts import number_of_place
from capture.state.call import Call
from capture.state.code_run import CodeRun
from capture.state.snapshot import Snapshot
from capture.state.source import Source
from capture.torch_private import capabilities
from capture.torch_private.tensor_reads import static_tensors

ALIGNMENT = 64  # bytes: an address that moves keeps its distance from a multiple of this
ASKS_WHO = frozenset({"id", "hash"})
"""Built-in functions whose results depend on which object they get."""
Check = Callable[[Sequence[Any]], int]
"""The function that a replay asks: from the call's leaves to a verdict (``guard.OK`` and the others)."""


def nothing_to_check(_: Sequence[Any]) -> int:
    """The check of a recording that relies on no Python state."""
    return OK


@define(eq=False)
class StaticOwner:
    """A static tensor in Python state, and how to reach it in each place that holds it."""

    path: str
    sources: tuple[Source, ...]
    tensor: torch.Tensor
    address: int

    def guards(self) -> list[Guard]:
        """Guards in all places that hold the tensor."""
        return [Guard("value", source, self.tensor, MOVED) for source in self.sources]


@define(eq=False)
class StaticArgument:
    """An argument that has to be at the recorded address."""

    position: int
    path: str
    address: int

    def guard(self) -> Guard:
        """A guard that it begins at the recorded address."""
        return Guard("address", Source("argument", None, self.position, self.path), self.address, MOVED)


@define(eq=False)
class RecordingGuard:
    """The guards of one recording, which follow tensors that move."""

    structure: list[Guard] = field(factory=list)
    owners: list[StaticOwner] = field(factory=list)
    arguments: list[StaticArgument] = field(factory=list)
    check: Check = nothing_to_check
    kinds: dict[str, tuple[Any, ...]] = field(factory=dict)
    copied: tuple[tuple[int, int], ...] = ()
    """Position and bytes of the copied arguments that must not share memory with ``watched``."""
    watched: frozenset[str] = frozenset()
    """Paths of the static tensors that these must not share memory with."""
    written: frozenset[str] = frozenset()
    """Paths that the body writes, arguments and static tensors."""
    shared: set[str] = field(factory=set)
    """Paths of ``owners`` that share memory with tensors in other places: if one moves alone, the sharing ends."""
    beside: list[torch.Tensor] = field(factory=list)
    """Tensors in other places that share memory with ``owners``. The body may read these in their place, so they have
    to stay where they are, too: ``.data =`` moves one without another object."""
    beside_kinds: list[tuple[Any, ...]] = field(factory=list)
    """Where these lie, and their metadata."""
    metadata: Callable[..., bool] | None = None
    """Compares the metadata of tensors in the places of ``owners``; made when a tensor moves for the first time."""
    places: Places = field(factory=Places)
    """Guards by name on what the body can have read."""
    opened: frozenset[int] = frozenset()
    """``id`` of objects that guards expect, and whose own state is in guards, too."""
    ran: frozenset[types.CodeType] = frozenset()
    """Code objects that ran in the runs up to the recorded one."""
    asks_who: frozenset[types.CodeType] = frozenset()
    """Those of the last watched run alone that ask for numbers of objects. What a first run compiles, as Triton does,
    asks for many, and no later run comes to that code."""
    lookups: frozenset[Any] = frozenset()
    """As ``CodeRun.lookups`` gives it."""
    starts: tuple[int, ...] = ()
    """``id`` of the receiver and of objects among the arguments."""
    is_its_own: bool = False
    """Some guards are about tensors of this recording alone, so that they cannot be used for another one."""
    tensors: Callable[[], bool] | None = None
    """Tells whether the tensors of ``owners`` are where they were, with the metadata that they had."""
    asks_gradient: bool = True
    """Something in the recording depends on whether the tensors of ``owners`` require gradients."""
    pieces: bytes = b""
    """Where the ``watched`` tensors lie, as in ``pieces_of``."""
    read: Read | None = None
    """What was found in the run before, if that was taken: runs with other keys find the same in most cases."""
    keys: frozenset[int] | None = None
    """``id`` of all keys and members of sets that ``structure`` is about, once somebody asked."""
    objects: frozenset[int] | None = None
    """``id`` of all tensors that ``structure`` expects as themselves, once somebody asked."""

    def guards(self) -> tuple[Guard, ...]:
        """All guards as they are now, in the order in which they are checked."""
        identities = [guard for owner in self.owners for guard in owner.guards()]
        return (*self.structure, *identities, *[argument.guard() for argument in self.arguments], *self._apart())

    def _apart(self) -> tuple[Guard, ...]:
        return tuple([
            Guard("apart", Source("argument", None, at, f"argument {at}"), (nbytes, self.pieces), OVERLAPS)
            for at, nbytes in self.copied
        ])  # fmt: skip

    def current(self) -> list[torch.Tensor] | None:
        """Tensors now held at the places of ``owners``; None if places that shared one no longer do."""
        tensors = []
        for owner in self.owners:
            first, *others = [source.get() for source in owner.sources]
            if not issubclass(type(first), torch.Tensor) or any(tensor is not first for tensor in others):
                return None
            tensors.append(first)
        return tensors

    def frozen_or_thawed(self) -> list[Source]:
        """Places of tensors that ask for gradients now and did not, or did and do not."""
        found = []
        for owner in self.owners:
            now, kind = owner.sources[0].get(), self.kinds[owner.path]
            if issubclass(type(now), torch.Tensor) and len(kind) > 1 and now.requires_grad != kind[_REQUIRES_GRAD]:
                found.append(owner.sources[0])
        return found

    def stays_beside(self) -> bool:
        """Whether the tensors that share memory with ``owners`` lie where they lay."""
        return list(map(_kind_and_place, self.beside)) == self.beside_kinds

    def same_kinds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors can take the places of the recorded ones: equal metadata."""
        if self.metadata is not None and self.metadata(*tensors):  # which does not look at what is lazily undone
            pairs = zip(self.owners, tensors, strict=True)
            return all(_lazy_bits(one) == self.kinds[owner.path][-1] for owner, one in pairs)
        return all(kind_of(one) == self.kinds[owner.path] for owner, one in zip(self.owners, tensors, strict=True))

    def looks_up(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the body finds something by which object a tensor is: one of these is a key or a member of a set that
        it can have read, or its code asks for numbers of objects. For another one it would find something else."""
        if self.asks_who:
            return True
        if self.keys is None:
            self.keys = interned(frozenset([id(one) for guard in self.structure for one in _keys_in(guard)]))
        return any(id(tensor) in self.keys for tensor in tensors)

    def expects(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether one of these is what a guard expects in another place, as itself and not by its kind."""
        if tensors and self.objects is None:
            tensor_ids = [id(one) for guard in self.structure for one in _parts_of(guard.expected) if _is_tensor(one)]
            self.objects = frozenset(tensor_ids)
        return any(id(tensor) in (self.objects or ()) for tensor in tensors)

    def settle(self, leaves: Sequence[Any]) -> None:
        """Accept the tensors as they are now."""
        self.kinds = {owner.path: kind_of(owner.tensor) for owner in self.owners}
        self.beside_kinds = list(map(_kind_and_place, self.beside))
        tensors = [*(owner.tensor for owner in self.owners), *self.beside]
        self.tensors = _as_they_are(tensors, self.asks_gradient) if tensors else None
        self._note_ranges(leaves)
        self._make_check()

    def _make_check(self) -> None:
        guards = self.guards()
        self.check = native.Guards(guards, self.tensors) if guards else nothing_to_check

    def follow(self, moved: dict[str, torch.Tensor], leaves: Sequence[Any]) -> None:
        """Expect these tensors from now on; they are of the same kinds as before."""
        check: Any = self.check
        at = len(self.structure)
        for owner in self.owners:
            if owner.path in moved:
                owner.tensor, owner.address = moved[owner.path], moved[owner.path].data_ptr()
                for number, _ in enumerate(owner.sources):
                    check.expect(at + number, owner.tensor)
            at += len(owner.sources)
        for argument in self.arguments:
            argument.address = leaves[argument.position].data_ptr()
            check.expect(at, argument.address)
            at += 1
        self._note_ranges(leaves)
        for number, (_, nbytes) in enumerate(self.copied):
            check.expect(at + number, (nbytes, self.pieces))
        tensors = [owner.tensor for owner in self.owners]
        if tensors:
            self.tensors = check.tensors = _as_they_are([*tensors, *self.beside], self.asks_gradient)
            if self.metadata is None and capabilities.HAS_METADATA_GUARD:
                self.metadata = capabilities.metadata_guard(tensors)

    def watch(self, copied: Sequence[tuple[int, int]], static: Set[str]) -> None:
        """Check that the ``copied`` arguments, as in this class, do not share memory with the ``static`` paths."""
        self.watched = frozenset(static if self.written - static else static & self.written)
        self.copied = tuple(copied) if self.watched else ()

    def leave_out(self, paths: Set[str], leaves: Sequence[Any]) -> None:
        """These static arguments are, from now on, read where each call has them, or copied where the graph cannot be
        pointed there."""
        left = [argument for argument in self.arguments if argument.path in paths]
        self.arguments = [argument for argument in self.arguments if argument not in left]
        copied = [*self.copied, *((argument.position, span_bytes(leaves[argument.position])) for argument in left)]
        self.watch(copied, {owner.path for owner in self.owners} | {argument.path for argument in self.arguments})
        self._note_ranges(leaves)
        self._make_check()

    def _note_ranges(self, leaves: Sequence[Any]) -> None:
        """Where the tensors lie that copied arguments must not share memory with."""
        if self.copied:
            static = [owner.tensor for owner in self.owners if owner.path in self.watched]
            static += [leaves[argument.position] for argument in self.arguments if argument.path in self.watched]
            self.pieces = pieces_of(*merged(sorted(map(range_of, static))))

    def copy(self, copied: tuple[tuple[int, int], ...]) -> RecordingGuard:
        """The same guards on the same tensors, to follow them on its own; ``copied`` as in this class."""
        made = RecordingGuard(
            structure=self.structure,
            owners=[StaticOwner(owner.path, owner.sources, owner.tensor, owner.address) for owner in self.owners],
            arguments=[StaticArgument(static.position, static.path, static.address) for static in self.arguments],
            kinds=self.kinds, copied=copied, watched=self.watched, written=self.written, places=self.places,
            opened=self.opened, ran=self.ran, asks_who=self.asks_who, lookups=self.lookups, starts=self.starts,
            pieces=self.pieces, tensors=self.tensors, asks_gradient=self.asks_gradient, read=self.read,
        )  # fmt: skip
        like: Any = self.check
        made.check = nothing_to_check if like is nothing_to_check else like.beside(made._apart(), made.tensors)
        return made


def _as_they_are(tensors: Sequence[torch.Tensor], asks_gradient: bool) -> Callable[[], bool]:
    """Makes a check that tensors are where they are now, with the same metadata; whether they require gradients, if
    ``asks_gradient``. Plain tensors are compared in C."""
    if all(
        type(tensor) in TENSOR_TYPES and tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors
    ):
        check: Callable[[], bool] = static_tensors(tensors, asks_gradient=asks_gradient)
        return check
    addresses, metadata = capabilities.address_check(tensors), capabilities.metadata_check(tensors)
    return lambda: addresses() and metadata()


_REQUIRES_GRAD = 5  # its place in ``kind_of``


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Metadata that a recording has frozen."""
    if torch.nn.parameter.is_lazy(tensor):  # it has none yet
        return (type(tensor),)
    return (type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad,
            tensor.is_inference(), tensor.data_ptr() & (ALIGNMENT - 1), _lazy_bits(tensor))  # fmt: skip


def _kind_and_place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), *kind_of(tensor))


def _lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether its memory holds conjugated or negated values."""
    return tensor.is_conj(), tensor.is_neg()


def make_recording_guard(
    described: DescribedRun, watched: ObservedRun, call: Call, static: Sequence[int], copied: Sequence[int],
    ran: CodeRun, like: RecordingGuard | None = None, read: Read | None = None,
    asks: frozenset[types.CodeType] | None = None,
) -> RecordingGuard:  # fmt: skip
    """Guards on what a watched run relied on. ``static`` and ``copied``: positions of arguments that are read where
    they are, and that are copied. ``ran``: code that the body runs. ``like``: the guard of another recording of the
    same function. ``read``: what was found after the run before. ``asks``: as ``asks_who``. The identity of what
    the body itself gives new values is not guarded."""
    before, leaves = watched.before, call.leaves
    implicit = [*described.implicit, *described.guarded]
    replaced = {effect.change.source.path for effect in described.effects} | before.rebuilt
    written = frozenset(
        placeholder.path for placeholder in described.facts.placeholders if placeholder.mutation is not None
    )
    paths_of = [path for path, _ in call.paths()]
    static_arguments = [(at, paths_of[at], leaves[at]) for at in static if issubclass(type(leaves[at]), torch.Tensor)]
    paths = {input_.path for input_ in implicit} | {path for _, path, _ in static_arguments}
    starts = tuple([id(start) for start, _ in starts_of(call)])
    asks = asking_who(ran) if asks is None else asks
    guard = RecordingGuard(
        ran=frozenset(ran.codes), asks_who=asks, lookups=ran.lookups(), starts=starts, written=written
    )
    guard.asks_gradient = depends_on_gradients(described.facts, ran)
    guard.watch([(position, span_bytes(leaves[position])) for position in copied], paths)
    as_they_were = _numbers_as_they_were(described, watched, call)
    if (
        like is not None
        and not (replaced or watched.by_islands or as_they_were)
        and _is_the_same(like, guard, implicit, static_arguments, leaves)
    ):
        return like.copy(guard.copied)
    seen: set[str] = set()
    for tensor_read in implicit:
        owner = add_owner(guard, before, tensor_read.path, tensor_read.owners, replaced, seen)
        if tensor_read.also:
            guard.shared.add(tensor_read.path)
            guard.is_its_own = True
        for source, beside in tensor_read.also:
            place = _add_place(guard, before, source, replaced, seen)
            _add_beside(guard, owner, place, beside, is_replaced=source.path in replaced)
    held = [
        _Held(_add_place(guard, before, before.sources[path][0], replaced, seen)) for path in sorted(before.dropped)
    ]
    guard.structure += [
        Guard("value", Source("call", container, None, container.place.path), True) for container in held
    ]
    guard.arguments = [
        StaticArgument(position, path, tensor.data_ptr())
        for position, path, tensor in static_arguments if tensor.numel()
    ]  # fmt: skip
    read = _read_anew(read, described, watched, call, ran)
    guard.structure += read.guards
    _add_former(guard, watched, call, read.set_only, replaced, seen)
    guard.structure += as_they_were
    if (path := path_read(read, watched.by_islands)) is not None:  # no replay: the next watched run says why
        guard.structure.append(Guard("value", Source("call", bool, None, path), True))
    guard.places, guard.opened, guard.read = read.places, read.opened, read
    guard.is_its_own = guard.is_its_own or bool(watched.changed)
    guard.asks_gradient = guard.asks_gradient or read.has_compiled
    guard.settle(leaves)
    return guard


def _read_anew(
    read: Read | None, described: DescribedRun, watched: ObservedRun, call: Call, ran: CodeRun
) -> Read:  # fmt: skip
    """What a run read: that of the run before where nothing else was read since, and all is as it was."""
    tensors, rebuilt = own_tensors(described, call.leaves), watched.rebuilt()
    if read is not None and not (watched.changed or rebuilt):
        places = places_of(tensors, watched.before, call.leaves)
        if read.still_holds(begins_with(ran, call), tensors, places):
            return read
    return read_by(ran, call, watched.changed, rebuilt, tensors, watched.before)


def _numbers_as_they_were(described: DescribedRun, watched: ObservedRun, call: Call) -> list[Guard]:
    """Guards on numbers that count as arguments, and that this run left as they were where others changed them: it may
    have set them to what they were."""
    places = call.binder.places
    changed = {number_of_place(places, change.source) for change in watched.changed}
    return [
        Guard("value", Source("call", places[at].read, None, places[at].path), call.values[at - len(places)])
        for at in sorted(call.changes(described.facts.reads) - changed)
    ]


def _add_former(
    guard: RecordingGuard, watched: ObservedRun, call: Call, set_only: frozenset[str], replaced: set[str],
    seen: set[str],
) -> None:  # fmt: skip
    """Guards on what the body found in places in which it left other objects."""
    for source, value in former_values(watched.changed, watched.rebuilt(), set_only):
        if is_in_key(source, watched.before, call):
            continue
        place = _add_place(guard, watched.before, source, replaced, seen)
        guard.structure.append(guard_on(place, value, watched.before))


def add_owner(
    guard: RecordingGuard, state: Snapshot, path: str, places: Sequence[tuple[Source, torch.Tensor]],
    replaced: set[str], seen: set[str],
) -> StaticOwner:  # fmt: skip
    """Guards on the way to a static tensor in all places that hold it."""
    sources = [_add_place(guard, state, source, replaced, seen) for source, _ in places]
    tensor = places[0][1]
    owner = StaticOwner(path, tuple(sources), tensor, tensor.data_ptr())
    guard.owners.append(owner)
    return owner


def _add_beside(
    guard: RecordingGuard, owner: StaticOwner, place: Source, tensor: torch.Tensor, *, is_replaced: bool
) -> None:
    """Guards on a tensor in another place that shares memory with a static one."""
    if is_replaced:
        looks = functools.partial(_is_view_of, owner, place, Geometry.of(tensor))
        guard.structure.append(Guard("value", Source("call", looks, None, place.path), True))
        return
    guard.structure.append(Guard("value", place, tensor))
    guard.beside.append(tensor)


def own_tensors(described: DescribedRun, leaves: Sequence[Any]) -> set[int]:
    """``id`` of what has guards of its own: implicit inputs, and arguments."""
    implicit = [*described.implicit, *described.guarded]
    return {id(tensor) for one in implicit for _, tensor in (*one.owners, *one.also)} | {id(leaf) for leaf in leaves}


def places_of(tensors: Collection[int], state: Snapshot, leaves: Sequence[Any]) -> frozenset[tuple[int, str]]:
    """Where tensors are that have guards of their own: of these places, guards on what was read tell the class alone.
    An argument is another tensor in each call."""
    numbers = {id(leaf): -at for at, leaf in enumerate(leaves, 1)}
    return frozenset([
        (numbers.get(id(tensor), id(tensor)), source.path)
        for owners in state.tensors.values() for source, tensor in owners
        if id(tensor) in tensors and source.kind != "root"
    ])  # fmt: skip


def asking_who(ran: CodeRun) -> frozenset[types.CodeType]:
    """The code that asks for numbers of objects, but for torch's own methods that dicts and sets call to look up a
    tensor or an operator: what is in those is looked at itself."""
    asking = [(code, scopes) for code, scopes in ran.codes.items() if ASKS_WHO.intersection(code.co_names)]
    return frozenset([code for code, scopes in asking if not _is_hash_of_torch(code, scopes)])


def _is_hash_of_torch(code: types.CodeType, scopes: Iterable[dict[str, Any]]) -> bool:
    return code.co_name == "__hash__" and all(package_of(scope.get("__name__")) == "torch" for scope in scopes)


def changes_of_state(guard: RecordingGuard) -> list[StateChange]:
    """Differences from what the guard expects, where the former value is known."""
    differing = []
    for place in guard.places.all:
        namespace = place.namespace()
        for name, before, after in place.others() if namespace is not None else ():
            weak = type(before) is weakref.ref
            value = before() if weak else before
            if value is after or (type(before) is dict and getattr(after, "__dict__", None) is before):
                continue  # an object is compared by a reference, or by its content
            if weak or type(value) in PLAIN_TYPES or value is MISSING or place.guard.kind == "members":
                differing.append(
                    StateChange(Source("item", namespace, name, place.guard.source.path, None), value, after)
                )
    for owner in guard.owners:
        places = [(source, source.get()) for source in owner.sources]
        differing += [StateChange(place, owner.tensor, now) for place, now in places if now is not owner.tensor]
    return differing


def _is_the_same(
    like: RecordingGuard, guard: RecordingGuard, implicit: Sequence[ImplicitInput],
    static_arguments: Sequence[tuple[int, str, torch.Tensor]], leaves: Sequence[Any],
) -> bool:  # fmt: skip
    """Whether the other guard covers the same places, and everything that it checks is as it was, so that this one
    would turn out equal. Places below an argument are left aside: they are in another object in every call."""
    return (
        not like.is_its_own
        and guard.ran <= like.ran
        and (guard.asks_who, guard.lookups) == (like.asks_who, like.lookups)
        and guard.asks_gradient <= like.asks_gradient
        and (like.starts, like.watched, bool(like.copied)) == (guard.starts, guard.watched, bool(guard.copied))
        and [(owner.path, len(owner.sources)) for owner in like.owners] == [(o.path, len(o.owners)) for o in implicit]
        and not any(input_.also for input_ in implicit)
        and [(argument.position, argument.path) for argument in like.arguments]
        == [(at, path) for at, path, tensor in static_arguments if tensor.numel()]
        and not any(is_below_argument(source) for input_ in implicit for source, _ in input_.owners)
        and like.check(leaves) in (OK, OVERLAPS)
    )


def _keys_in(guard: Guard) -> Iterator[Any]:
    """What dicts and sets that a guard is about have as keys and members."""
    yield guard.source.name
    if guard.kind == "table":
        yield from guard.expected[0]
    todo = [guard.source.holder if guard.kind == "sequence" else None, guard.expected]
    while todo:
        value = todo.pop()
        if type(value) is tuple:
            todo.extend(value)
        elif issubclass(type(value), (set, frozenset)):
            yield from value


def _parts_of(expected: Any) -> Iterator[Any]:
    """What a guard expects: itself, or the parts of its tuples."""
    todo = [expected]
    while todo:
        value = todo.pop()
        if type(value) is tuple:
            todo.extend(value)
        else:
            yield value


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)


def _is_view_of(owner: StaticOwner, place: Source, geometry: Geometry) -> bool:
    """Whether the tensor in a place is a view of this static tensor now, as after the recorded run, which replaced it
    by one."""
    value = place.get()
    same = issubclass(type(value), torch.Tensor) and value.untyped_storage() is owner.tensor.untyped_storage()
    return same and Geometry.of(value) == geometry


@define(eq=False)
class _Held:
    """A container that the body fills and then puts an equal one in the place of. A replay does neither, so nobody may
    have it but the place itself. Who has it is looked up once, and what is counted then has to stay so."""

    place: Source
    count: int = 0

    def __call__(self) -> bool:
        count = sys.getrefcount(self.place.get())
        if self.count == 0 and _is_held_by_one(self.place):
            self.count = count
        return count == self.count


def _is_held_by_one(place: Source) -> bool:
    """Whether only this place has the object that it leads to, besides guards: as many references to it are not seen as
    to a new dict that only a list has."""
    values = [place.get(), {}]
    holders = [[holder for holder in holders_of(value) if holder is not values] for value in values]
    others = [holder for holder in holders[0] if type(holder) not in (native.Guards, Guard, Source)]
    unseen = {sys.getrefcount(values[at]) - references_to(values[at], held) for at, held in enumerate(holders)}
    return len(others) == 1 and len(unseen) == 1


def _add_place(guard: RecordingGuard, before: Snapshot, source: Source, replaced: set[str], seen: set[str]) -> Source:
    """Guards on everything above a place; gives the source of what it holds."""
    above = [step for step in source.chain() if step is source or step.kind != "root"]
    moving = [index for index, step in enumerate(above) if index and step.path in replaced]
    stable = above[moving[-1] + 1 :] if moving else above[1:]
    for step in stable:
        if step.kind != "module" and step.path not in seen:  # submodules are compared with their module
            seen.add(step.path)
            value = before.sources[step.path][1] if step.path in before.sources else step.get()
            guard.structure.append(Guard("value", _reached(step), value))
    if not moving:
        return _reached(source)
    guard.is_its_own = True
    top = _reached(above[moving[-1]])
    down = above[: moving[-1] + 1][::-1]
    sizes = [len(before.sources[step.path][1]) if step.path in before.rebuilt else None for step in down]
    below = [step.among(None) for step in down[1:]]

    def walk() -> Any:
        value = top.get()
        for step, size in zip(below, sizes, strict=False):
            if value is MISSING or (size is not None and not (issubclass(type(value), Sized) and len(value) == size)):
                return MISSING  # a container that the body rebuilds has other members
            value = step.among(value).get()
        return value

    return Source("call", walk, None, source.path)


def _reached(source: Source) -> Source:
    """The same place for a guard, which keeps no more alive than it looks at."""
    holder = source.holder
    if source.kind != "attribute":
        return Source(source.kind, holder, source.name, source.path)
    slot, attributes = slot_of(type(holder), source.name), names_of(holder)
    if slot is not None:
        return Source("slot", holder, slot, source.path)
    if type(attributes) is not dict or source.name not in attributes:
        return Source("attribute", holder, source.name, source.path)
    if "forward" in attributes:  # a captured instance, which its own __dict__ would keep alive
        return Source("weak", weakref.ref(holder), source.name, source.path)
    return Source("item", attributes, source.name, source.path)
