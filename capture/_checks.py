"""Checks: is the Python state that a recording was made with still in place?

One generated function a recording, straight-line, run before every replay. It answers ``OK``; ``MOVED`` if a
static tensor is another one or at another address; ``CHANGED`` if a module, attribute or container on the way to
one was replaced, a submodule or hook came or went, or a parameter that was None is none no more; ``OVERLAPS`` if a
copied argument shares memory with a static tensor and either is written, so that the copy would hide the write.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from attrs import define, field

from capture import _torch_private
from capture._attribute_reads import Reads
from capture._describe import Implicit
from capture._fast import seen
from capture._module_checks import Value, conditions, has, module_ids, values_of
from capture._named import MISSING
from capture._native_facts import apart_of, facts_of
from capture._places import Place
from capture._state import Snapshot
from capture._tensors import merged, overlap_any, range_of, span_bytes
from capture.backends import Geometry

OK, MOVED, CHANGED, OVERLAPS = 0, 1, 2, 3
_MOST_LOOKS, _WAIT = 100, 16  # making facts takes as long as some hundred checks in Python
ALIGNMENT = 64  # bytes that the address of a tensor which moves keeps its distance from a multiple of


def nothing_to_check(_: Sequence[Any]) -> int:
    """The check of a recording that relies on no Python state."""
    return OK


@seen
@define(eq=False)
class Checker:
    """Writes the check of one recording and follows tensors that move."""

    scope: dict[str, Any] = field(factory=lambda: {"MISSING": MISSING, "has": has})
    structure: list[str] = field(factory=list)
    tensors: list[str] = field(factory=list)
    owners: list[tuple[str, tuple[How, ...], str]] = field(factory=list)
    """Path, how to get what each place that holds the tensor has now, name in ``scope`` of the tensor."""
    arguments: list[tuple[int, str, str]] = field(factory=list)
    """Position, path, name in ``scope`` of the address of each static argument."""
    function: Callable[[Sequence[Any]], int] = nothing_to_check
    kinds: dict[str, tuple[Any, ...]] = field(factory=dict)
    copied: tuple[tuple[int, int], ...] = ()
    """Position and bytes of the copied arguments that must not share memory with ``watched``."""
    watched: frozenset[str] = frozenset()
    """Paths of static tensors."""
    written: frozenset[str] = frozenset()
    """Paths that the body writes, arguments and static tensors."""
    shared: set[str] = field(factory=set)
    """Paths of ``owners`` whose memory other places hold other tensors on: one of them alone may move."""
    guard: Callable[..., bool] | None = None
    """Compares the metadata of tensors in the places of ``owners``; made when one moves first."""
    _gather: Callable[[], list[torch.Tensor] | None] | None = None
    values: list[Value] = field(factory=list)
    """Attributes that the body reads, and what they were."""
    modules: tuple[int, ...] = ()
    """``id`` of the attributes of all modules that were found, in order."""
    has_own_functions: bool = False
    """Functions in the scope look at this very scope."""
    code: types.CodeType | None = None
    facts: Any = None
    """The same for the C module: None before it is asked for, False where there is none."""
    looks: int = 0
    """How often they were made."""
    waits: int = 0
    """Replays to come until they are made, after a tensor moved: one that does so often is not worth it."""

    def see(self) -> None:
        """The check holds: make ``facts`` of what is so now. Where they were made already, what they compare beyond
        the check, such as where torch keeps a gradient, is another now."""
        if self.waits:
            self.waits -= 1
            return
        self.looks += 1
        found = None
        if self.looks <= _MOST_LOOKS:
            tensors = [self.scope[name] for _, _, name in self.owners]
            apart = apart_of(*self.scope["overlaps"].args) if self.copied else ()
            found = facts_of([*self.structure, *self.tensors], self.scope, tensors, apart)
        self.facts = False if found is None else found

    def name(self, value: Any) -> str:
        """A name for a value in the generated code."""
        name = f"v{len(self.scope)}"
        self.scope[name] = value
        return name

    def current(self) -> list[torch.Tensor] | None:
        """Tensors now held at the places of ``owners``; None if places that shared one no longer do.

        Compiled when a tensor moves first, so that a recording does not pay for it.
        """
        if self._gather is None:
            lines = ["def gather():", "    found = []"]
            for _, getters, _ in self.owners:
                first, *others = [self._call_of(getter) for getter in getters]
                lines += [
                    f"    found.append({first})",
                    *[f"    if {one} is not found[-1]: return None" for one in others],
                ]
            exec(compile("\n".join([*lines, "    return found"]), "<capture gather>", "exec"), self.scope)  # noqa: S102
            self._gather = self.scope["gather"]
        try:
            found: list[torch.Tensor] | None = self._gather()
        except (AttributeError, KeyError, IndexError, ValueError):
            return None
        return found if found is not None and all(isinstance(one, torch.Tensor) for one in found) else None

    def held_by(self, how: How) -> Any:
        """What a place has now. Compiled only when something moved, so that a recording does not pay for it."""
        return eval(how, self.scope) if isinstance(how, str) else how()  # noqa: S307 - text made in this module

    def arguments_named(self) -> list[tuple[int, str]]:
        """Positions and paths of the static arguments."""
        return [(position, path) for position, path, _ in self.arguments]

    def _call_of(self, how: How) -> str:
        return how if isinstance(how, str) else f"{self.name(how)}()"

    def same_kinds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """The tensors can take the places of the recorded ones: equal metadata."""
        return all(kind_of(one) == self.kinds[path] for (path, _, _), one in zip(self.owners, tensors, strict=True))

    def settle_now(self, tensors: dict[str, torch.Tensor], leaves: Sequence[Any]) -> None:
        """From now on these tensors, at these addresses, are the right ones."""
        for path, _, name in self.owners:
            self.scope[name], self.scope[f"{name}_at"] = tensors[path], tensors[path].data_ptr()
        for position, _, name in self.arguments:
            self.scope[name] = leaves[position].data_ptr()
        self.kinds = {path: kind_of(tensors[path]) for path, _, _ in self.owners}
        self.note_ranges(leaves)
        found = [self.scope[name] for _, _, name in self.owners]
        self.scope["metadata"] = _torch_private.metadata_check(found)
        self.scope["addresses"] = _torch_private.address_check(found)
        self.facts = None

    def follow(self, moved: dict[str, torch.Tensor], leaves: Sequence[Any]) -> None:
        """From now on these tensors, of the same kinds as before, are the right ones."""
        scope = self.scope
        for path, _, name in self.owners:
            if path in moved:
                scope[name], scope[f"{name}_at"] = moved[path], moved[path].data_ptr()
        for position, _, name in self.arguments:
            scope[name] = leaves[position].data_ptr()
        tensors = [scope[name] for _, _, name in self.owners]
        if self.guard is None and tensors and _torch_private.HAS_METADATA_GUARD:
            self.guard = _torch_private.metadata_guard(tensors)
        scope["metadata"] = (
            functools.partial(self.guard, *tensors) if self.guard else _torch_private.metadata_check(tensors)
        )
        scope["addresses"] = _torch_private.address_check(tensors)
        self.facts, self.waits = None, _WAIT
        self.note_ranges(leaves)

    def watch(self, copied: Sequence[tuple[int, int]], static: Set[str]) -> None:
        """Look out for ``copied``, as in this class, that share memory with one of the ``static`` paths."""
        self.watched = frozenset(static if self.written - static else static & self.written)
        self.copied = tuple(copied) if self.watched else ()

    def leave_out(self, paths: Set[str], leaves: Sequence[Any]) -> None:
        """These static arguments are where each call has them from now on, or in a copy where the graph cannot be
        pointed at that place."""
        left = [one for one in self.arguments if one[1] in paths]
        terms = {self._at(position, name) for position, _, name in left}
        self.arguments = [one for one in self.arguments if one not in left]
        self.tensors = [term for term in self.tensors if term not in terms]
        copied = [*self.copied, *((position, span_bytes(leaves[position])) for position, _, _ in left)]
        self.watch(copied, {path for path, _, _ in self.owners} | {path for _, path, _ in self.arguments})
        self.note_ranges(leaves)
        self.compile()

    @staticmethod
    def _at(position: int, name: str) -> str:
        return f"t[{position}].data_ptr() == {name}"

    def add_argument(self, position: int, path: str, tensor: torch.Tensor) -> None:
        """A static argument is where it was."""
        name = self.name(tensor.data_ptr())
        self.tensors.append(self._at(position, name))
        self.arguments.append((position, path, name))

    def note_ranges(self, leaves: Sequence[Any]) -> None:
        """Where the tensors lie that copied arguments must not share memory with."""
        if self.copied:
            static = [self.scope[name] for path, _, name in self.owners if path in self.watched]
            static += [leaves[position] for position, path, _ in self.arguments if path in self.watched]
            self.scope["overlaps"] = functools.partial(overlap_any, self.copied, *merged(sorted(map(range_of, static))))

    def compile(self) -> None:
        """Generate the function."""
        tensors = " and ".join(self.tensors) or "True"
        lines = ["def check(t):", "    try:"]
        lines += [f"        if not ({condition}): return {CHANGED}" for condition in self.structure]
        lines += [f"        if not ({tensors} and addresses() and metadata()): return {MOVED}"]
        lines += [f"        return {OVERLAPS} if overlaps(t) else {OK}" if self.copied else f"        return {OK}"]
        lines += ["    except (AttributeError, KeyError, IndexError, ValueError):", f"        return {CHANGED}"]
        self.code = _compiled("\n".join(lines))
        self.run()

    def run(self) -> None:
        """Define the function in the scope."""
        self.facts = None
        if not (self.structure or self.tensors or self.copied):
            self.function = nothing_to_check
            return
        assert self.code is not None
        exec(self.code, self.scope)  # noqa: S102 - text made above
        self.function = self.scope["check"]

    def copy(self, copied: tuple[tuple[int, int], ...]) -> Checker:
        """The same check of the same tensors, to follow them on its own; ``copied`` as in this class."""
        scope = {name: value for name, value in self.scope.items() if name != "check"}
        made = Checker(scope, self.structure, self.tensors, self.owners, self.arguments, code=self.code)
        made.kinds, made.copied, made.watched, made.modules = self.kinds, copied, self.watched, self.modules
        made.written, made.values = self.written, self.values
        if copied:
            scope["overlaps"] = functools.partial(overlap_any, copied, *scope["overlaps"].args[1:])
        made.run()
        return made


How = str | Callable[[], Any]
"""An expression in a checker's scope, or a function."""


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> types.CodeType:
    """Code of a check. Recordings of one function have the same, whatever their shapes."""
    return compile(source, "<capture check>", "exec")


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Metadata that a recording has frozen."""
    return (type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad,
            tensor.is_inference(), tensor.data_ptr() & (ALIGNMENT - 1))  # fmt: skip


def make_checker(
    before: Snapshot, implicit: Sequence[Implicit], static_arguments: Sequence[tuple[int, str, torch.Tensor]],
    replaced: set[str], leaves: Sequence[Any], copied: Sequence[int], written: set[str], reads: Reads,
    like: Checker | None = None,
) -> Checker:  # fmt: skip
    """``reads``: attributes that the body reads. ``replaced``: places the body itself gives new values,
    whose identity is not checked. ``copied``: positions of copied arguments. ``written``: paths the body writes,
    arguments and static tensors. ``like``: the check of another recording of the same function."""
    paths = {one.path for one in implicit} | {path for _, path, _ in static_arguments}
    checker = Checker(modules=module_ids(before), written=frozenset(written))
    checker.values = values_of(before, reads)
    checker.watch([(position, span_bytes(leaves[position])) for position in copied], paths)
    if like is not None and not replaced and _is_the_same(like, checker, implicit, static_arguments, leaves):
        return like.copy(checker.copied)
    seen: set[str] = set()
    for one in implicit:
        getters = [_add_owner(checker, before, place, replaced, seen) for place, _ in one.owners]
        expression = " and ".join(f"{checker.name(g)}() is {{0}}" if not isinstance(g, str) else f"{g} is {{0}}"
                                  for g in getters)  # fmt: skip
        name = checker.name(one.owners[0][1])
        checker.tensors.append(expression.format(name))
        checker.owners.append((one.path, tuple(getters), name))
        if one.also:
            checker.shared.add(one.path)
        for place, tensor in one.also:
            getter = _getter(checker, _add_owner(checker, before, place, replaced, seen))
            if place.path in replaced:
                looks = functools.partial(_looks_at, getter, checker.scope, name, Geometry.of(tensor))
                checker.structure.append(f"{checker.name(looks)}()")
            else:
                checker.structure.append(f"{checker.name(getter)}() is {checker.name(tensor)}")
    for position, path, tensor in static_arguments:
        if tensor.numel():
            checker.add_argument(position, path, tensor)
    checker.structure += conditions(checker.name, before, reads)
    checker.settle_now({one.path: one.owners[0][1] for one in implicit}, leaves)
    checker.compile()
    return checker


def _is_the_same(
    like: Checker, checker: Checker, implicit: Sequence[Implicit],
    static_arguments: Sequence[tuple[int, str, torch.Tensor]], leaves: Sequence[Any],
) -> bool:  # fmt: skip
    """The other check covers the same places, and all it looks at is as it was: this one would come out the same.

    Places below an argument are in another object in every call, which the other check knows nothing of.
    """
    return (
        not like.has_own_functions
        and [(id(one.holder()), one.name) for one in like.values] == [(id(o.holder()), o.name) for o in checker.values]
        and (like.modules, like.watched, bool(like.copied)) == (checker.modules, checker.watched, bool(checker.copied))
        and [(path, len(places)) for path, places, _ in like.owners] == [(o.path, len(o.owners)) for o in implicit]
        and not any(one.also for one in implicit)
        and like.arguments_named() == [(at, path) for at, path, tensor in static_arguments if tensor.numel()]
        and not any(_below_argument(place) for one in implicit for place, _ in one.owners)
        and like.function(leaves) in (OK, OVERLAPS)
    )


def _below_argument(place: Place) -> bool:
    while place.parent is not None:
        place = place.parent
    return place.kind == "root" and place.path not in ("self", "function")


def _looks_at(getter: Callable[[], Any], scope: dict[str, Any], owner: str, geometry: Geometry) -> bool:
    """A tensor that the body replaces by a view of a static one is such a view now."""
    value = getter()
    same = isinstance(value, torch.Tensor) and value.untyped_storage() is scope[owner].untyped_storage()
    return same and Geometry.of(value) == geometry


def _getter(checker: Checker, how: How) -> Callable[[], Any]:
    checker.has_own_functions = True
    return functools.partial(checker.held_by, how)


def _add_owner(checker: Checker, before: Snapshot, place: Place, replaced: set[str], seen: set[str]) -> How:
    """Checks for everything above ``place``; gives the expression, or a function, for what it holds."""
    above = [one for one in place.chain() if one.kind != "root"]
    moving = [index for index, one in enumerate(above) if index and one.path in replaced]
    stable = above[moving[-1] + 1 :] if moving else above[1:]
    for one in stable:
        if one.kind != "module" and one.path not in seen:  # submodules are compared with their module
            seen.add(one.path)
            value = before.places[one.path][1] if one.path in before.places else one.get()
            checker.structure.append(f"{_expression(checker, one)} is {checker.name(value)}")
    if not moving:
        return _expression(checker, place)
    top = _getter(checker, _expression(checker, above[moving[-1]]))
    down = above[: moving[-1] + 1][::-1]
    sizes = [len(before.places[one.path][1]) if one.path in before.rebuilt else None for one in down]
    below = [one.among(None) for one in down[1:]]

    def walk() -> Any:
        value = top()
        for one, size in zip(below, sizes, strict=False):
            if size is not None and len(value) != size:
                raise IndexError  # a container that the body rebuilds has other members
            value = one.among(value).get()
        return value

    return walk


def _expression(checker: Checker, place: Place) -> str:
    holder = place.holder
    if place.kind == "closure":
        return f"{checker.name(holder)}.cell_contents"
    if place.kind == "attribute":
        own = getattr(holder, "__dict__", None)
        if own is None or place.name not in own:
            return f"{checker.name(holder)}.{place.name}"
        if "forward" in own:  # a captured instance, which its own __dict__ would keep alive
            return f"{checker.name(weakref.ref(holder))}().__dict__.get({place.name!r}, MISSING)"
        holder = own
    key = repr(place.name) if isinstance(place.name, (str, int)) else checker.name(place.name)
    return f"{checker.name(holder)}[{key}]"  # what is gone raises, which the check takes for a change
