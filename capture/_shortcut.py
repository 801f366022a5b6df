"""Shortcut: the straight way through a call whose key equals an earlier one's, without building the key.

Loops call with the same kinds of arguments again and again. One C++ comparison of all tensors' metadata then takes
the place of reading and hashing it (1.3 us a tensor); Python values are compared as they are. What a shortcut does not
know goes the long way, which makes one. The C module takes the same steps, if it is there (``_fast``).
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from capture import _config, _torch_private
from capture._ambient import Here, terms
from capture._bind import Leaf, switches_of, training_reader
from capture._checks import nothing_to_check
from capture._containers import PLAIN_TYPES
from capture._entry import Entry
from capture._fast import MISS, MOST_VALUES, native, no_way
from capture._inputs import alias_pattern
from capture._modules import registrations
from capture._named import MISSING, same_value
from capture._native_facts import flags_of, named_fact
from capture._node import SAMPLED
from capture._step import marks, steps_begun
from capture._tensors import any_overlap, span_bytes
from capture._torch_private_layout import MOST_DIMS, alike_layout
from capture._torch_private_modes import reads_dispatch_keys
from capture._trees import in_use, trees_here

if TYPE_CHECKING:
    from capture._runtime import Captured

_KINDS = frozenset([torch.Tensor, torch.nn.Parameter])
_SAME = (PLAIN_TYPES - {slice}) | {types.BuiltinFunctionType, type, type(MISSING)}
"""The same object of these types has the same key."""
_WATCHED = (types.FunctionType, torch.nn.Module)  # so has one of these, as long as its class is not replaced
_NAMED = (*_WATCHED, torch.Tensor)  # and of a tensor that the body names, whether it needs a gradient
_KEPT = 8  # shortcuts of equal shapes: some for each thread and mode

Values = Sequence[Any]
Way = Callable[[Here, Values], Any]
"""The call's result, or ``MISS``."""


class Shortcuts:
    """All shortcuts of one captured function; the last one is tried first."""

    def __init__(self) -> None:
        self.straight: Callable[..., Any] = no_way if native is None else native.Ways(MISS)
        """Takes a call's positional arguments before anything is known of them, in C."""
        self._last: Way | None = None
        self._by_shapes: dict[tuple[torch.Size, ...], list[Way]] = {}

    def call(self, here: Here, values: Values) -> Any:
        """The call's result, if there is a shortcut to it; else ``MISS``."""
        last = self._last
        if last is None:
            return MISS
        result = last(here, values)
        if result is MISS:
            for way in self._by_shapes.get(_shapes(values), ()):
                result = way(here, values) if way is not last else MISS
                if result is not MISS:
                    self._last = way
                    break
        return result

    def add(self, captured: Captured, values: Values, leaves: Sequence[Leaf], entry: Entry, here: Here) -> None:
        """The next call like this one may take a shortcut, if it is one of plain tensors and values."""
        kinds = {type(value) for value in values}
        simple = kinds <= _KINDS | _SAME and not kinds.isdisjoint(_KINDS)
        if not simple or not _torch_private.HAS_METADATA_GUARD or captured.annotation.verify == "always":
            return
        fast = None if native is None else _native_way(captured, values, leaves, entry, here)
        if fast is None and entry.shares_memory:  # only C looks at how they do
            return
        self._last = _way(captured, values, leaves, entry, here) if fast is None else self._in_c(fast)
        alike = self._by_shapes.setdefault(_shapes(values), [])
        alike.insert(0, self._last)
        del alike[_KEPT:]

    def _in_c(self, fast: Any) -> Way:
        """Taken by values, as after keyword arguments, it is the first one from then on."""
        ways: Any = self.straight
        ways.add(fast)

        def way(here: Here, values: Values) -> Any:
            result = fast(*values)
            if result is not MISS:
                ways.add(fast)
            return result

        return way

    def clear(self) -> None:
        """Forget all: entries were dropped."""
        if self.straight is not no_way:
            self.straight.clear()  # type: ignore[attr-defined] # the ways
        self._last = None
        self._by_shapes.clear()


def _shapes(values: Values) -> tuple[torch.Size, ...]:
    return tuple([value.shape for value in values if type(value) in _KINDS])


def _way(captured: Captured, values: Values, leaves: Sequence[Leaf], entry: Entry, here: Here) -> Way:
    tensors = tuple(type(value) in _KINDS for value in values)
    assert entry.backend is not None
    runs = captured if entry.region is None else entry.region
    scope: dict[str, Any] = {
        "MISS": MISS, "HERE": here, "ENTRY": entry, "NUMBER": entry.number, "BACKEND": entry.backend.name,
        "FUNCTION": captured, "LIMIT": captured.annotation.max_recordings,
        "TREES": trees_here(), "trees_here": trees_here,
        "COUNTERS": captured.log.counters, "steps_begun": steps_begun, "in_capture": entry.backend.in_capture,
        "replay": runs.replay, "ready": runs.ready,
        "check": _torch_private.metadata_guard(leaves),
        "same_value": same_value, "overlap": functools.partial(_overlap, [span_bytes(leaf) for leaf in leaves]),
    }  # fmt: skip
    scope |= {f"K{index}": value for index, value in enumerate(values) if not tensors[index]}
    scope |= {f"A{index}": leaf.data_ptr() & 63 for index, leaf in enumerate(leaves)}
    if not captured.stateless:
        scope["same_world"] = _world(captured, len(values))
    exec(_code(tensors, captured, attaches=runs is not captured), scope)  # noqa: S102 - text made below
    way: Way = scope["way"]
    return way


def _native_way(captured: Captured, values: Values, leaves: Sequence[Leaf], entry: Entry, here: Here) -> Any:
    """The same in C; None where it does not know all that has to be looked at."""
    assert entry.backend is not None
    device = entry.backend.name.partition(":")[0]
    modes, given = _modes(here, device), _given(captured, values)
    if given is None or modes is None or len(values) > MOST_VALUES:
        return None
    runs, function = captured if entry.region is None else entry.region, captured.function
    facts, receiver = None if captured.stateless else _facts(captured), captured.receiver_of
    is_weak = isinstance(receiver, weakref.ref)
    if receiver() is not None and not is_weak:  # whose class only Python looks at
        facts = None
    order, spans, shared = _layout(leaves)
    trees = in_use()
    return native.Way(
        modes=modes, miss=MISS, ok=nothing_to_check, function=captured,
        defaults_of=function if isinstance(function, types.FunctionType) else None,
        defaults=getattr(function, "__defaults__", None), entry=entry, number=entry.number,
        limit=captured.annotation.max_recordings,
        in_capture=None if entry.backend.name == "cpu" else entry.backend.in_capture,
        alike=_alike(leaves),
        check_first=None if reads_dispatch_keys(device) else _torch_private.metadata_guard(leaves[:1]),
        check=_torch_private.metadata_guard(leaves), facts=facts,
        receiver=receiver if is_weak and facts is not None else None, kind=type(receiver()),
        world=None if captured.stateless or facts is not None else _world(captured, len(values)),
        in_use=trees, trees=trees.trees,
        backend=entry.backend.name, counters=captured.log.counters, marks=marks(), replay=runs.replay,
        ready=runs.ready, constants=tuple([MISS if type(one) in _KINDS else one for one in values]),
        alignments=tuple([leaf.data_ptr() & 63 for leaf in leaves]), spans=spans,
        order=order, shared=shared, least=given[0], most=given[1], verifies=captured.annotation.verify != "off",
        attach=None if entry.region is None else entry.region.attach, registrations=registrations,
        sampled=SAMPLED if captured.annotation.checks == "sampled" else 0,
    )  # fmt: skip


def _alike(leaves: Sequence[Leaf]) -> Any:
    """The metadata of all leaves as bytes; None where torch has to be asked."""
    layout = alike_layout()
    if layout is None or any(leaf.dim() > MOST_DIMS for leaf in leaves):
        return None
    return native.Alike(tuple(leaves), layout)


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
    settings, known = _config.current(), here.modes.get(device)
    if known is None or known[0] is not settings or (known[1] is not None and not known[1]()):
        found = None if settings.poison or settings.verify != "off" else terms(device)
        made = found and native.Modes(((_config.current, (), settings), *found[0]), found[1])
        known = here.modes[device] = settings, made
    return known[1]


def _given(captured: Captured, values: Values) -> tuple[int, int] | None:
    """How many of the values a call has to give, and may give, by position: the others are defaults, and no tensors."""
    most = captured.binder.positional
    least = None
    for count in range(most, -1, -1):
        left = values[count:]
        try:
            bound = captured.binder.values(*values[:count])
        except TypeError:
            break
        same = len(bound) == len(values) and all(map(operator.is_, bound, values))
        if not same or any(type(one) in _KINDS for one in left):
            break
        least = count
    return None if least is None else (least, most)


def _code(tensors: tuple[bool, ...], captured: Captured, *, attaches: bool) -> types.CodeType:
    options = captured.annotation
    return _steps(tensors, captured.stateless, options.verify != "off", options.checks == "sampled", attaches)


_REPLAY = [  # ``Captured.replay`` and ``Tree.stand_on``, for one fresh tensor as the result
    "    outputs = node.outputs",
    "    if outputs.single is None or node.written or tree.lingering:",
    "        return replay(node, tree, values, leaves)",
    "    node.recording.replay(leaves)",
    "    result = outputs.build_single()",
    "    if not path and not tree.warm:",
    "        tree.mark = steps_begun()",
    "    path.append(node)",
    "    times = tree.times",
    "    times[FUNCTION] = times.get(FUNCTION, 0) + 1",
    "    tree.current, tree.pool_is_at = node, None",
    "    COUNTERS.replays += 1",
    "    return result",
]


@functools.lru_cache(maxsize=512)
def _steps(tensors: tuple[bool, ...], stateless: bool, verifies: bool, sampled: bool, attaches: bool) -> types.CodeType:
    """The steps of a call in the order of their cost; ``tensors``: which of the values are."""
    names = [f"v{index}" for index in range(len(tensors))]
    leaves = [name for name, is_tensor in zip(names, tensors, strict=True) if is_tensor]
    begins = [f"p{index}" for index in range(len(leaves))]
    plain = [(name, f"K{index}") for index, name in enumerate(names) if not tensors[index]]
    differ = [f"({name} is not {value} and not same_value({name}, {value}))" for name, value in plain]
    differ += [f"not check({', '.join(leaves)})"]
    elsewhere = [f"{begin} & 63 != A{index}" for index, begin in enumerate(begins)]
    elsewhere += [f"overlap({', '.join(begins)})"] if len(begins) > 1 else []
    elsewhere += [] if stateless else ["not same_world()"]
    unfit = [
        "(path and addresses != node.key[1] and not node.stands(tree.pool, addresses))",
        "(node.dead_before and not node.may_run())",
    ]
    unfit += ["not node.verified"] if verifies else []
    lines = [
        "def way(here, values):",
        "    if here is not HERE or ENTRY.phase != 'ready' or in_capture():",
        "        return MISS",
        f"    {', '.join(names)}, = values",
        f"    if {' or '.join(differ)}:",
        "        return MISS",
        *[f"    {begin} = {leaf}.data_ptr()" for begin, leaf in zip(begins, leaves, strict=True)],
        f"    if {' or '.join(elsewhere)}:",
        "        return MISS",
        "    trees = trees_here()",
        "    tree = trees.get(BACKEND) if trees is TREES else None",
        "    if tree is None:",
        "        return MISS",
        "    path = tree.path",
        "    if path or tree.warm or tree.buried or tree.lingering:",
        "        tree.begin_call(FUNCTION, LIMIT, NUMBER)",
        "        if tree.warm:",
        "            return MISS",
        "    node = tree.current.followers.get(NUMBER)",
        f"    addresses = ({', '.join(begins)},)",
        f"    if node is None or {' or '.join(unfit)}:",
        "        return MISS",
        f"    leaves = [{', '.join(leaves)}]",
        "    if not node.state_holds(leaves):" if sampled else "    if node.check(leaves):",
        "        return ready(ENTRY, tuple(values), leaves)",
        *(["    return replay(node, tree, values, leaves)"] if attaches else _REPLAY),
    ]
    return compile("\n".join(lines), "<capture shortcut>", "exec")


def _overlap(spans: Sequence[int], *begins: int) -> bool:
    """Two arguments share memory. Looked at in full only where they lie as close as the largest is long."""
    widest = max(spans)
    if len(begins) == 2:
        near = abs(begins[0] - begins[1]) < widest
    else:
        ordered = sorted(begins)
        near = min(map(operator.sub, ordered[1:], ordered)) < widest
    return near and any_overlap(begins, spans)


def _facts(captured: Captured) -> Any:
    """What ``_world`` looks at beside the receiver's class, as it is now, for the C module; None where that does not
    look at all of it."""
    receiver, named = captured.receiver, captured.named
    known = named.read(receiver)
    simple = all(type(one) in _SAME or isinstance(one, _NAMED) for one in known)
    if captured.annotation.guards or captured.optimizers or not simple:
        return None
    sources = named.sources(captured.receiver_of)
    facts = [named_fact(*one, weakly=isinstance(one[0], _NAMED)) for one in zip(known, sources, strict=True)]
    modules = [*([receiver] if isinstance(receiver, torch.nn.Module) else []), *captured.optimizers.modules()]
    for module in modules:
        flags = flags_of(switches_of(module))
        if flags is None:
            return None
        facts += flags
    return native.Facts(tuple(facts), None)


def _world(captured: Captured, count: int) -> Callable[[], bool]:
    """Tells whether the key's parts that do not come from arguments are as they are now. Keeps nothing alive."""
    receiver_of, named = captured.receiver_of, captured.named
    receiver = receiver_of()
    known = named.read(receiver)
    if (
        captured.annotation.guards
        or captured.optimizers
        or not all(type(one) in _SAME or isinstance(one, _NAMED) for one in known)
    ):
        nothing = (None,) * count  # what is named below arguments is in the key of objects only
        parts = captured.rest(nothing)
        return lambda: captured.rest(nothing) == parts
    plain = [None if isinstance(one, _NAMED) else one for one in known]
    watched = [(index, weakref.ref(one), type(one)) for index, one in enumerate(known) if isinstance(one, _NAMED)]
    tensors = [(one, known[index].requires_grad) for index, one, _ in watched if isinstance(known[index], torch.Tensor)]
    read, kind = named.read, type(receiver)
    own: Callable[[], list[bool]] = list
    if isinstance(receiver, torch.nn.Module):
        own = training_reader(receiver)
    others = captured.optimizers.flags

    def all_flags() -> list[bool]:
        return own() + others()

    training = all_flags if captured.optimizers.modules() else own
    flags = training()
    if not known:
        return lambda: type(receiver_of()) is kind and training() == flags

    def same() -> bool:
        current = receiver_of()
        if type(current) is not kind or training() != flags:
            return False
        now = read(current)
        for index, alive, its_kind in watched:
            if now[index] is not alive() or type(now[index]) is not its_kind:
                return False
            now[index] = None
        if tensors and any(one().requires_grad is not needs for one, needs in tensors):  # type: ignore[union-attr]
            return False  # they are alive, as they were found just now
        return all(map(same_value, now, plain))

    return same
