"""Fast path: the straight way through a call that repeats an earlier one, in C, without building the key.

Loops call with the same kinds of arguments again and again. What such a call has to be like is put together here once;
then C compares it with every call: modes, the arguments' metadata as bytes, Python values, where arguments lie and how
they share memory, and the guards of the rest of the key. A call that differs goes the general way, which adds a path.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from capture.core import config
from capture.guards.guard import Guard, itself
from capture.guards.key_guards import SAME, call_guard, named_guards, switch_guards
from capture.guards.recording_guard import nothing_to_check
from capture.key import pytree
from capture.key.argument_numbers import left_out
from capture.key.code_names import SMALL, part_of
from capture.key.modes import Here, modes_like_now
from capture.key.opened_values import ById, Opened, opened_values
from capture.key.signature import Leaf, switches_of, weak_switches_of
from capture.key.tensor_meta import leading_ones, span_bytes
from capture.native import MISS, MOST_PATHS, MOST_VALUES, native
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.inputs import alias_pattern
from capture.torch_private import capabilities
from capture.tree.node import Node
from capture.tree.step import marks
from capture.tree.thread_trees import in_use, tree_key
from capture.tree.tree import Tree

_KINDS = frozenset([torch.Tensor, torch.nn.Parameter])
_ANYWHERE = 64  # the alignment of a tensor whose address does not matter
_KEPT = 8  # paths for equal shapes: several for each thread and mode
_FORMS = 3  # paths of one entry in one thread, whose calls differ in something that is not in the key
_NO_POSITION = (1, 0)  # at least one value and at most none: no call by position alone fits

Values = Sequence[Any]


class GoesOn(Protocol):
    """What happens in Python after a fast path; implemented by ``dispatch``."""

    @property
    def attach(self) -> Callable[[Any, list[Leaf], Node], Any] | None:
        """A function that makes the call's result of what C replayed; None where that is the result already."""

    def replay(self, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf]) -> Any:
        """Run a recording that was found to fit."""

    def tell(self, errors: list[BaseException]) -> None:
        """A replay was completed, and this exception came meanwhile."""

    def raised(
        self, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf], error: BaseException
    ) -> Any:  # fmt: skip
        """A replay raised. Gives the call's result, if the body goes on."""

    def ready(self, entry: Entry, values: tuple[Any, ...], leaves: list[Leaf]) -> Any:
        """The recording that follows relies on state that has changed."""


class Shortcuts:
    """All fast paths of one captured function; those taken last are tried first."""

    def __init__(self) -> None:
        self._paths: Any = native.FastPaths(MISS)
        self.straight: Callable[..., Any] = self._paths
        """The function to try first: it takes a call's positional arguments as given."""
        self._by_shapes: dict[tuple[torch.Size, ...], list[tuple[Entry, int, Any]]] = {}
        """By shapes of the tensors: the entry, ``id`` of the trees that the path uses, and the path."""
        self._added = 0

    @property
    def are_there(self) -> bool:
        """Whether there are fast paths."""
        return bool(self._by_shapes)

    def call(self, values: tuple[Any, ...]) -> Any:
        """The result of a call with these bound values, if there is a path to it; else ``MISS``."""
        result = self._paths.bound(values)
        if result is MISS and self._added > MOST_PATHS:  # else all paths were tried already
            for *_, path in self._by_shapes.get(_shapes(values), ()):
                result = path.bound(values)
                if result is not MISS:
                    self._paths.add(path)
                    break
        return result

    def add(
        self, captured: Captured, values: Values, leaves: Sequence[Leaf], entry: Entry, here: Here, goes_on: GoesOn, *,
        on_trial: bool = False,
    ) -> None:  # fmt: skip
        """The next call like this one may take a fast path, if it is one of plain tensors and values. ``on_trial``:
        until it is known whether replays pay."""
        if not capabilities.HAS_METADATA_GUARD or captured.annotation.verify == "always":
            return
        kinds = {type(value) for value in values}
        opened = values if kinds <= _KINDS | SAME else None
        nodes: tuple[Opened, ...] | None = None
        # C opens no objects that are named there, and does not know which containers the body changes
        if opened is None and not captured.annotation.static and not _may_be_changed(captured, values):
            without = left_out(captured.binder.places, values) if captured.binder.places else ()
            nodes, opened = opened_values(values, leaves, without) or (None, None)
            nodes = nodes if nodes and any(nodes) else None
        if opened is None or len(opened) > MOST_VALUES:
            return
        path = _path(captured, values, leaves, entry, here, goes_on, opened, nodes)
        if path is None:
            return
        if on_trial:
            entry.payoff.try_out(path)
        # recordings go in many ways, as with the thread that made them
        self._drop(lambda one: one is not entry and not one.nodes)
        self._paths.add(path)
        self._added += 1
        alike = self._by_shapes.setdefault(_shapes(values), [])
        whose = entry, id(in_use())
        ours = [path_of_shape for path_of_shape in alike if path_of_shape[:2] == whose]
        stale = ours[_FORMS - 1 :]  # a path that still fitted would have taken this call
        for *_, gone in stale:
            self._paths.remove(gone)  # C would keep it, and look at it, until many others have come
        alike[:] = [
            (*whose, path),
            *[path_of_shape for path_of_shape in alike if all(path_of_shape is not stale_path for stale_path in stale)],
        ]
        del alike[_KEPT:]

    def pause(self) -> None:
        """Take no call until ``resume``."""
        self._paths.clear()

    def resume(self) -> None:
        """Take calls again."""
        for paths in reversed(list(self._by_shapes.values())):
            for *_, path in reversed(paths):
                self._paths.add(path)

    def times(self) -> list[tuple[int, int]]:
        """Begin and length of the replays that were timed last, in nanoseconds of ``time.perf_counter_ns``; one of 64
        is."""
        return [time for paths in list(self._by_shapes.values()) for *_, path in paths for time in path.times()]

    def forget(self, entry: int) -> None:
        """The entry with this number has no recording any more."""
        self._drop(lambda one: one.number == entry)

    def _drop(self, is_gone: Callable[[Entry], bool]) -> None:
        """Forget the paths of these entries."""
        for shapes, paths in list(self._by_shapes.items()):
            gone = [known for known in list(paths) if is_gone(known[0])]
            for *_, path in gone:
                self._paths.remove(path)
            if gone:
                paths[:] = [known for known in paths if all(known is not dropped for dropped in gone)]
            if not paths:
                self._by_shapes.pop(shapes, None)

    def clear(self) -> None:
        """Forget all paths: entries were dropped."""
        self._paths.clear()
        self._added = 0
        self._by_shapes.clear()


def _may_be_changed(captured: Captured, values: Values) -> bool:
    """Whether an argument may be, or hold, a container or object of Python state that the body changes."""
    changed = list(captured.changed.values())
    todo, seen = list(values) if changed else [], set[int]()
    while todo:
        value = todo.pop()
        if id(value) in seen or not pytree.is_container(value) or issubclass(type(value), torch.Tensor):
            continue
        if any(_may_be_one(value, one) for one in changed):
            return True
        seen.add(id(value))
        todo += [member for _, member in pytree.children(value)]
    return False


def _may_be_one(value: Any, changed: Any) -> bool:
    """Whether another call may give the second one in the place of the first: a log is no batch, as a rule."""
    if type(value) is not type(changed):
        return False
    if issubclass(type(value), dict):
        return not changed or not value.keys().isdisjoint(changed.keys())
    return not issubclass(type(value), list) or not value or not changed or type(value[0]) is type(changed[0])


def _shapes(values: Values) -> tuple[torch.Size, ...]:
    return tuple([value.shape for value in values if type(value) in _KINDS])


def _path(
    captured: Captured, values: Values, leaves: Sequence[Leaf], entry: Entry, here: Here, goes_on: GoesOn,
    opened: Values, nodes: tuple[Opened, ...] | None,
) -> Any:  # fmt: skip
    """The path of calls like this one; None where C does not compare all modes that are in force. ``opened``: the
    values, or what is in containers among them, as ``nodes`` tell."""
    assert entry.backend is not None
    device = entry.backend.name.partition(":")[0]
    modes = _modes(here, device if any(leaf.device.type == device for leaf in leaves) else "")
    if modes is None:
        return None
    least, most = _given(captured, values) or _NO_POSITION
    function = captured.function
    receiver = captured.receiver_of
    guards = _guards_of_defaults(function)
    if not captured.stateless:
        guards += _key_guards(captured, len(values))
    held: list[Any] = [leaf[0]() for leaf in opened if type(leaf) is ById]
    for value in held:
        if issubclass(type(value), torch.nn.Module):
            guards += switch_guards(weak_switches_of(value))
    order, spans, shared = _layout(leaves)
    trees = in_use()
    family = entry.family
    any_form = family is not None and family.takes_any_form
    leading = tuple([leading_ones(leaf.shape, leaf.stride()) if any_form else 0 for leaf in leaves])
    anywhere = family.may_begin_anywhere if family is not None else _nowhere
    begins = [_ANYWHERE if leaf.numel() < 2 or anywhere(i) else leaf.data_ptr() & 63 for i, leaf in enumerate(leaves)]
    return native.FastPath(
        modes=modes, miss=MISS, ok=nothing_to_check, function=captured,
        defaults_of=function if isinstance(function, types.FunctionType) else None,
        defaults=getattr(function, "__defaults__", None), entry=entry, number=entry.number,
        limit=captured.annotation.max_recordings,
        in_capture=entry.backend.capture_look(),
        check=_comparison_of(leading, *_firsts(leaves)), guards=native.Guards(tuple(guards)) if guards else None,
        receiver=receiver if isinstance(receiver, weakref.ref) else None,
        kind=type(receiver()), in_use=trees, trees=trees.trees,
        tree=tree_key(entry.backend, captured.pool.number), counters=captured.log.counters, marks=marks(),
        replay=goes_on.replay, ready=goes_on.ready,
        constants=tuple([MISS if type(leaf) in _KINDS else leaf for leaf in opened]), nodes=nodes,
        names=_names_of_attributes(leaves),
        alignments=tuple(begins), leading=leading, spans=spans,
        order=order, shared=shared, least=least, most=most, verifies=captured.annotation.verify != "off",
        attach=goes_on.attach, tell=goes_on.tell, raised=goes_on.raised,
        others=functools.partial(_comparison_of, leading), static=_static_ones(captured, opened),
    )  # fmt: skip


def _comparison_of(leading: Sequence[int], tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> Any:
    """The comparison of the metadata of some of the tensors."""
    return capabilities.metadata_guard(tensors, [leading[position] for position in positions])


def _firsts(leaves: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[int]]:
    """The tensors, each once, and their positions: torch's comparison fails where one comes twice."""
    positions = sorted({id(leaf): position for position, leaf in reversed(list(enumerate(leaves)))}.values())
    return [leaves[position] for position in positions], positions


def _names_of_attributes(leaves: Sequence[Leaf]) -> tuple[frozenset[str] | None, ...] | None:
    """Of each tensor, as the key has them; None where none has attributes."""
    names = [frozenset(leaf.__dict__) or None for leaf in leaves]
    return tuple(names) if any(names) else None


def _static_ones(captured: Captured, opened: Values) -> tuple[bool, ...]:
    """Of each tensor, whether it is an argument that is declared static: mostly the same object in every call."""
    static = frozenset(captured.annotation.static)
    names = captured.binder.names if static else ()  # containers are not opened then
    return tuple([bool(names) and names[at] in static for at, leaf in enumerate(opened) if type(leaf) in _KINDS])


def _nowhere(position: int) -> bool:
    del position
    return False


def _guards_of_defaults(function: Any) -> list[Guard]:
    """Default values of names can be changed in place. Those by position are a tuple, at which C looks by itself."""
    named = function.__kwdefaults__ if isinstance(function, types.FunctionType) else None
    if not named:
        return []
    parts = function.__code__, function.__defaults__, named
    members = tuple(named), tuple(named.values()), (None,) * len(named)
    return [
        Guard("functions", itself((function,), "a function's defaults"), parts),
        Guard("table", itself(named, "defaults by name"), members),
    ]


def _key_guards(captured: Captured, count: int) -> list[Guard]:
    """Guards on all parts of the key that do not come from arguments, but for the class of a receiver that takes a
    weak reference, which C looks at by itself. Keeps nothing alive."""
    receiver, named = captured.receiver, captured.named
    receiver_of = captured.receiver_of
    guards: list[Guard] = []
    for value, source in zip(named.read(receiver), named.sources(receiver_of), strict=True):
        guards_on_name = named_guards(value, source)
        guards += [_part_guard(source.read, source.name or "a name")] if guards_on_name is None else guards_on_name
    guards += [_part_guard(guard, "a guard of the annotation", limit=None) for guard in captured.annotation.guards]
    if captured.optimizers:
        guards.append(call_guard(captured.optimizers.same_part(), True, "settings of optimizers"))
    if receiver is not None and not isinstance(receiver_of, weakref.ref):
        guards.append(call_guard(lambda: type(receiver_of()), type(receiver), "the class of self"))
    modules = [receiver] if issubclass(type(receiver), torch.nn.Module) else []
    for module in (*modules, *captured.optimizers.modules()):
        guards += switch_guards(switches_of(module))
    return guards


def _part_guard(read: Callable[[], Any], path: str, *, limit: int | None = SMALL) -> Guard:
    """A guard that a value still has the same part of the key. ``read`` gives the value."""
    part = part_of(read(), limit=limit)
    return call_guard(lambda: part_of(read(), limit=limit) == part, True, path)


def _layout(leaves: Sequence[Leaf]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Tensors in the order in which they lie, of those that share memory the one where it begins; the bytes of each, of
    such a one to the end of all; and for each, where memory is shared, that one, the distance from it in bytes, and the
    first that is the same object."""
    spans = [span_bytes(leaf) for leaf in leaves]
    begins = [leaf.data_ptr() for leaf in leaves]
    pattern = alias_pattern(leaves, spans)
    alone = (None,) * len(leaves)
    heads = {part[0]: number for number, part in reversed(list(enumerate(pattern))) if part and not part[1]}
    shared: list[int] = []
    for number, part in enumerate(pattern):
        head = number if part is None else heads[part[0]]
        shared += [head, 0 if part is None else part[1], number if part is None else part[2]]
        spans[head] = max(spans[head], begins[number] - begins[head] + spans[number])
    leading = [n for n, part in enumerate(pattern or alone) if spans[n] and (part is None or heads[part[0]] == n)]
    return tuple(sorted(leading, key=begins.__getitem__)), tuple(spans), tuple(shared)


def _modes(here: Here, device: str) -> Any:
    """The modes of this thread and the settings now, for the C module; None where it does not compare all of them."""
    settings, kept = config.current(), here.modes.get(device)
    if kept is None or kept[0] is not settings or kept[1] is None or not kept[1]():
        plain = not settings.poison and settings.verify == "off"
        made = modes_like_now(device, [(config.current, (), settings)]) if plain else None
        kept = here.modes[device] = settings, made
    return kept[1]


def _given(captured: Captured, values: Values) -> tuple[int, int] | None:
    """How many of the values a call has to give, and may give, by position: the others are defaults, and no tensors."""
    binder = captured.binder
    if binder.by_position is not None:
        exactly = binder.by_position(tuple(values))
        are_given = exactly is not None and exactly <= binder.positional
        simple = are_given and all(type(value) in SAME for value in values[exactly:])
        return (exactly, exactly) if simple and exactly is not None else None
    most, least = binder.positional, None
    for count in range(most, -1, -1):
        left = values[count:]
        try:
            bound = binder.values(*values[:count])
        except TypeError:
            break
        same = len(bound) == len(values) and all(map(operator.is_, bound, values))
        if not same or any(type(value) not in SAME for value in left):
            break
        least = count
    return None if least is None else (least, most)
