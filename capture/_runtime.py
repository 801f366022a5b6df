"""Runtime: what a captured function does when it is called.

Per key an ``Entry`` goes from ``cold`` (watch one eager run, make a plan) over ``warm`` to ``ready`` (record once per
place in the tree, then replay), or to ``eager``. The plan decides; a check that fails makes a new one, of new facts.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from capture import _config, _difference, _inputs, _planning, _rebind, _record, _state, _verify, _watched, _where
from capture._ambient import Ambient, Here, ambient, foreign, here, inlining
from capture._annotate import Annotation
from capture._autograd import BackwardCall, Region, RegionCall
from capture._bind import Binder, Key, Leaf, Unkeyable, deaths, key_of, make_binder, module_key, signature_of
from capture._call import Call
from capture._checks import OVERLAPS
from capture._compile import compile_plan
from capture._containers import result_leaves
from capture._entry import Entry, Family, drop_dead
from capture._events import Log
from capture._facts import Inlined
from capture._fast import MISS
from capture._named import NamedKey, part_of
from capture._node import Node
from capture._optimizers import Optimizers
from capture._plan import CapturePlan
from capture._remarks import Remarks
from capture._shortcut import Shortcuts
from capture._tree import Tree
from capture._trees import tree_for
from capture.backends import Backend, backend_for

_current_config = _config.current
_numbers = itertools.count(1)


class Captured(Remarks):
    """One captured function, or one method of one instance."""

    def __init__(
        self, annotation: Annotation, function: Callable[..., Any], binder: Binder, named: NamedKey, receiver: Any
    ) -> None:
        super().__init__(annotation)
        self.function = function
        self.binder = binder
        self.number = next(_numbers)
        self.families: dict[Key, Family] = {}
        self.unsettled: dict[tuple[str, str | None], tuple[int, int]] = {}
        self.copied_entries: set[int] = set()
        """Numbers of entries whose outputs are copied, as they are kept in a way that they cannot be moved."""
        self.hopeless: CapturePlan | None = None
        """Set once every call changes what its own key is made of: new keys then run eagerly at once."""
        self.named = named
        self.receiver_of = (lambda: None) if receiver is None else _weak(receiver)
        self._is_module = isinstance(receiver, torch.nn.Module)
        self._shortcuts = Shortcuts()
        self.straight = self._shortcuts.straight
        """Takes the positional arguments of a call; ``MISS`` if that is not one of the last ones again."""
        self._deaths = 0
        self.optimizers = Optimizers()
        self.is_backward = False
        """It is the backward pass of another one."""
        self.deposits: Callable[[Sequence[int]], Sequence[torch.Tensor]] | None = None
        """As in ``OutputPlan``."""
        self.keeps_plans = True
        """Plans may be of use to other processes."""
        self._is_function = isinstance(function, types.FunctionType)
        self._defaults = getattr(function, "__defaults__", None)
        self._verifies = annotation.verify != "off"
        self._is_alone = receiver is None and not annotation.guards

    @property
    def stateless(self) -> bool:
        """The key is made of modes and arguments alone."""
        return self._is_alone and self.named.is_empty() and not self.optimizers and not self.optimizers.modules()

    @property
    def receiver(self) -> Any:
        """The instance a method belongs to."""
        return self.receiver_of()

    def body(self) -> Callable[..., Any]:
        """The user's function, bound to its receiver."""
        receiver = self.receiver_of()
        return self.function if receiver is None else types.MethodType(self.function, receiver)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call. The steps are in the order of their cost."""
        now, config = here(), _current_config()
        if now is None or not config.enabled:
            return self._inline(args, kwargs)
        if self._is_function and self._defaults is not self.function.__defaults__:
            self._bind_again()
        try:
            values = self.binder.values(*args, **kwargs)
        except TypeError:
            return self.body()(*args, **kwargs)  # raises its own, better worded error
        result = MISS if config.poison or config.verify != "off" else self._shortcuts.call(now, values)
        return result if result is not MISS else self._dispatch(values, now)

    def _bind_again(self) -> None:
        """Default values were replaced after decoration."""
        self._defaults = getattr(self.function, "__defaults__", None)
        self.binder = make_binder(signature_of(self.function, method=self.receiver is not None))

    def _dispatch(self, values: tuple[Any, ...], now: Here) -> Any:
        """A call with its arguments bound: find the entry for its key."""
        try:
            entry, leaves = self._entry_for(values, now.ambient)
        except (Unkeyable, TypeError) as error:
            return self._unkeyable(values, str(error))
        runs: Captured | Region = self if entry.region is None else entry.region
        if entry.phase != "ready":
            return runs.unready(entry, values, leaves)
        self._shortcuts.add(self, values, leaves, entry, now)
        return runs.ready(entry, values, leaves)

    def entry_of(self, values: tuple[Any, ...]) -> tuple[Entry, list[Leaf]]:
        """The entry of a call as things stand now, and its dynamic leaves.

        Raises ``Unkeyable`` or ``TypeError`` for unhashable values.
        """
        return self._entry_for(values, ambient())

    def _entry_for(self, values: tuple[Any, ...], modes: Ambient) -> tuple[Entry, list[Leaf]]:
        leaves: list[Leaf] = []
        if not self.optimizers.has_looked:  # once, also where no call ever gets a key
            self.optimizers.note(_state.snapshot(self.call(values, leaves).roots()), (self.receiver, *values))
        rest = () if self.stateless else self.rest(values)
        key = (modes, tuple([key_of(value, leaves) for value in values]), *rest)
        family = self.families.get(key)
        if family is None:
            if self._deaths != deaths():
                self._deaths = drop_dead(self.families)
            family = self.families[key] = Family(tuple(_inputs.span_of(leaf) for leaf in leaves))
        pattern = _inputs.alias_pattern(leaves, family.spans) if len(leaves) > 1 else ()
        entry = family.entries.get(pattern)
        if entry is None:
            entry = family.entries[pattern] = Entry((*key, pattern), shares_memory=bool(pattern))
        return entry, leaves

    def rest(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Parts of the key beside modes and arguments."""
        receiver = self.receiver_of()
        return (
            self.named(receiver, values),
            module_key(receiver, []) if isinstance(receiver, torch.nn.Module) else None,
            tuple([part_of(guard(), limit=None) for guard in self.annotation.guards]),
            self.optimizers.part(),
        )

    def call(self, values: tuple[Any, ...], leaves: list[Leaf], entry: Entry | None = None) -> Call:
        """The bound call, for everything but replays."""
        parts = {
            "annotation": self.annotation, "function": self.function, "receiver": self.receiver, "binder": self.binder,
            "values": values, "leaves": leaves,
        }  # fmt: skip
        if self.is_backward:
            return BackwardCall(**parts)
        return Call(**parts) if entry is None or entry.region is None else RegionCall(region=entry.region, **parts)

    def entries(self) -> list[Entry]:
        """All entries, oldest first, those of backward passes after that of their forward pass."""
        own = [entry for family in self.families.values() for entry in family.entries.values()]
        return [one for entry in own for one in (entry, *(entry.region.entries() if entry.region is not None else ()))]

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, around = _watched.active_watch(), foreign()
        if watch is not None:
            watch.notes.inlined.append(Inlined(function=self.annotation.function, where=_where.here()))
        elif around is not None and _current_config().enabled:
            self.report(compile_plan(self.annotation, self.bare_facts(around=around)))
            self.log.counters.eager_calls += 1
        return self.body()(*args, **kwargs)

    def _unkeyable(self, values: tuple[Any, ...], reason: str) -> Any:
        call = self.call(values, [])
        self.report(compile_plan(self.annotation, self.bare_facts(opaque=(call.unkeyable(reason),))))
        return self.run_eagerly(call, "an argument has neither a value nor an identity to compare")

    def run_eagerly(self, call: Call, reason: str) -> Any:
        """The body itself, on the caller's own tensors."""
        self.log.counters.eager_calls += 1
        self.log.counters.body_runs += 1
        self.log.add("eager", reason)
        return call.run_plainly()

    def _overlapping(self, entry: Entry, values: tuple[Any, ...], leaves: list[Leaf]) -> Any:
        """An argument shares memory with state, and a copy of it would hide a write: watched once, then eager."""
        if entry.overlapping is None:
            entry.overlapping = Entry((*entry.key, "overlaps state"))
        if entry.overlapping.phase in ("cold", "eager"):
            runs = entry.overlapping.region or self
            return runs.unready(entry.overlapping, values, leaves)
        return self.run_eagerly(self.call(values, leaves), "an argument shares memory with state that is written")

    def run_body(self, call: Call) -> Any:
        """The body with captured functions inside it inlined."""
        self.log.counters.body_runs += 1
        with inlining():
            return call.run()

    def unready(self, entry: Entry, values: tuple[Any, ...], leaves: list[Leaf]) -> Any:
        """A call of an entry that has nothing to replay yet, or never will."""
        call = self.call(values, leaves, entry)
        if entry.phase == "eager":
            if entry.plan is not None:
                self.report(entry.plan)  # raises every time where the annotation asks for an error
            return self.run_eagerly(call, "this key cannot be recorded")
        if entry.values and _rebind.tells_apart(self, entry, entry.values):
            return self.look_again(values)
        backend = self.backend_of(entry, leaves)
        if backend is None:
            return self.unready(entry, values, leaves)
        if backend.in_capture():
            return call.run_plainly()
        tree = tree_for(backend)
        tree.begin_call(self, self.annotation.max_recordings)
        if entry.phase == "cold" and (self.hopeless is not None or self._too_many_keys()):
            return self._no_new_key(entry, call, tree)
        phase = _planning.load(self, entry, leaves) if entry.phase == "cold" else entry.phase
        if phase == "cold":
            if self._at_limit(tree):
                return self._limit_reached(entry, call, tree)
            other = entry.overlapping
            if other is not None and _inputs.shares_with_state(call, other.plan):
                return self._overlapping(entry, values, leaves)
            return _planning.observe(self, entry, call, tree)
        if phase == "eager":
            return self.unready(entry, values, leaves)
        if entry.warmups_left > 0 or tree.warm:
            entry.warmups_left = max(entry.warmups_left - 1, 0)
            return self._warm_up(call, tree)
        entry.phase = "ready"
        return self.ready(entry, values, leaves)

    def _too_many_keys(self) -> bool:
        """Keys come and go and none is seen often enough to be recorded: a value that changes on every call."""
        return len(self.families) > 2 * self.annotation.max_recordings + 8

    def _no_new_key(self, entry: Entry, call: Call, tree: Tree) -> Any:
        """Run eagerly and forget the key, which will hardly come again."""
        for key, family in list(self.families.items()):
            if entry in family.entries.values():
                del self.families[key]
        if self.hopeless is None:
            return self._limit_reached(entry, call, tree)
        self.report(self.hopeless)
        return self.run_eagerly(call, "every call changes what its key is made of")

    def backend_of(self, entry: Entry, leaves: Sequence[Leaf]) -> Backend | None:
        """The engine for this call's device; without one the entry goes eager."""
        if entry.backend is not None:
            return entry.backend
        devices = {leaf.device for leaf in leaves if isinstance(leaf, (torch.Tensor, torch.Generator))}
        if self._is_module:
            devices |= {tensor.device for tensor in self.receiver.parameters()}
        found = sorted((one for one in devices if one.type not in ("cpu", "meta")), key=str)
        device = found[0] if found else torch.device("cpu")
        entry.backend = backend_for(device)
        if entry.backend is None:
            entry.phase = "eager"
            entry.plan = compile_plan(self.annotation, self.bare_facts(backend_missing=device.type))
            self.report(entry.plan)
        return entry.backend

    def _warm_up(self, call: Call, tree: Tree) -> Any:
        """A plain eager run: asked for by ``warmup=``, or because a step that warms up is still open."""
        with self.log.timed("warm-up"), inlining():
            self.log.counters.body_runs += 1
            result = call.run_plainly()
        tensors = [leaf for _, leaf in result_leaves(result) if isinstance(leaf, torch.Tensor)]
        tree.note_warm(self, [tensor for tensor in tensors if all(tensor is not leaf for leaf in call.leaves)])
        return result

    def ready(self, entry: Entry, values: tuple[Any, ...], leaves: list[Leaf]) -> Any:
        """Match and replay, or record."""
        if entry.backend.in_capture():  # type: ignore[union-attr] # an entry is ready only with a backend
            return self.call(values, leaves).run_plainly()
        tree = tree_for(entry.backend)  # type: ignore[arg-type] # an entry is ready only with a backend
        if tree.path or tree.warm or tree.buried or tree.lingering:
            tree.begin_call(self, self.annotation.max_recordings, entry.number)
            if tree.warm:
                return self._warm_up(self.call(values, leaves), tree)
        pattern = tree.pattern(leaves)
        for node in tree.current.children.get((entry.number, pattern), ()):
            if not node.dead_before or node.may_run():
                break
        else:
            return self._miss(entry, self.call(values, leaves, entry), tree, pattern)
        verdict, config = node.check(leaves), _current_config()
        verifies = self._verifies or config.verify != "off"
        if tree.lingering and (verdict or verifies or config.poison):
            tree.let_go()
        if verdict == OVERLAPS:
            return self._overlapping(entry, values, leaves)
        if verdict:
            return _rebind.state_moved(self, entry, node, values, leaves, tree)
        if config.poison:
            tree.pool.poison([block for block, _ in tree.live_blocks()])
        if verifies and _verify.is_due(self, node):
            return _verify.verified(self, entry, node, tree, self.call(values, leaves, entry))
        return self.replay(node, tree, values, leaves)

    def replay(self, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf]) -> Any:
        """Run a recording that was found to fit."""
        recording, outputs = node.recording, node.outputs
        assert recording is not None
        assert outputs is not None
        in_place = bool(tree.lingering) and tree.let_go(node)
        recording.replay(leaves)
        if node.written:
            _record.count_writes(node.written, leaves)
        if outputs.single is not None:
            result = outputs.build_single()
        else:
            named = functools.partial(self._named_values, values, leaves)
            result = outputs.build(tree.pool, leaves, node.statics.__getitem__, named, in_place=in_place)
        tree.stand_on(node)
        self.log.counters.replays += 1
        return result

    def _named_values(self, values: tuple[Any, ...], leaves: list[Leaf]) -> dict[str, Any]:
        return {**self.call(values, leaves).named_values(), "self": self.receiver}

    def look_again(self, values: tuple[Any, ...]) -> Any:
        """Start the call over: what it found recorded is gone."""
        now = here()
        assert now is not None  # as at the beginning of the call
        return self._dispatch(values, now)

    def forget(self, entry: Entry, tree: Tree) -> None:
        """Drop all recordings of an entry and start it over."""
        for node in entry.nodes:
            tree.forget(node)
        entry.nodes.clear()
        if entry.region is not None:
            entry.region.retire()
            entry.region = None
        self._shortcuts.clear()
        entry.phase, entry.plan, entry.facts = "cold", None, None

    def release(self) -> None:
        """Drop all recordings; plans stay."""
        for entry in self.entries():
            entry.release()

    def retire(self) -> None:
        """Nobody can call this any more."""
        for entry in self.entries():
            entry.retire()
        self._shortcuts.clear()
        self.families.clear()

    def reset(self) -> None:
        """As if just decorated."""
        self.retire()
        self.findings.clear()
        self.unsettled.clear()
        self.hopeless = None
        self.optimizers = Optimizers()
        self.log = Log(self.annotation.function)

    def _at_limit(self, tree: Tree) -> bool:
        return tree.current.counts.get(self.number, 0) >= self.annotation.max_recordings

    def _limit_reached(self, entry: Entry, call: Call, tree: Tree, pattern: Any = None) -> Any:
        limit = _difference.difference(self, entry, call, tree, pattern)
        self.report(compile_plan(self.annotation, self.bare_facts(limit=limit)))
        return self.run_eagerly(call, f"{limit.num_recordings} recordings exist: {limit.difference}")

    def _miss(self, entry: Entry, call: Call, tree: Tree, pattern: Any) -> Any:
        """No recording fits: make one, within the limit."""
        if tree.lingering:  # nobody else has those gradients yet; an eager run may change that
            tree.let_go()
        if self._at_limit(tree):
            return self._limit_reached(entry, call, tree, pattern)
        if _inputs.shares_with_state(call, entry.plan):
            return self._overlapping(entry, call.values, call.leaves)
        if entry.values and _rebind.tells_apart(self, entry, entry.values):
            return self.look_again(call.values)
        if entry.nodes:
            self.log.counters.misses += 1
            self.log.add("miss", _difference.difference(self, entry, call, tree, pattern).difference)
        return _record.record(self, entry, call, tree, pattern)


def _weak(receiver: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(receiver)
    except TypeError:
        return lambda: receiver
