"""Recordings under the exact path of recordings they followed, in one pool.

All recordings of a thread share one pool, so that a chain of functions needs no copies between them and two branches
take the larger of their sizes. The price is an order: a recording took its memory from what was free at that moment,
and is right only where the same is free again. So recordings form a tree. A **node** is one recording after one exact
path of recordings; replaying it moves the path one node on; a **step** begins at the root. Before a recording the pool
is set back to the end of the path, less what has died since.

Invariant: a node runs again only where everything that was dead when it was recorded is dead (``Node.dead_before``),
since the pool may have given that memory to it, and where it does not write in memory that outputs of earlier steps
still have (``pins``). Without either, a tensor that a user holds would change its values when another function is
called.

A recording that is dropped may be asked for by garbage collection, in the middle of a capture or in another thread:
``bury`` notes it, and ``sweep`` forgets it when this thread may.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from capture.core import config
from capture.core.data import define
from capture.core.events import Log
from capture.engines.base import Backend, Block, Pool
from capture.native import native, seen
from capture.state import body_run
from capture.torch_private.capabilities import dispatch_mode_depth
from capture.torch_private.operator_watch import is_on
from capture.tree import pins as _pins
from capture.tree import step
from capture.tree.liveness import StorageWatch, hold
from capture.tree.node import Node, Pattern, walk

_MUCH = 32 << 20  # bytes from which on a pool without recordings is given back: making one anew takes a millisecond
_TIMES_MOVED = 2  # two that get out of each other's way come to rest after the second time, mostly
_MOST_MOVED = 1000  # entries
_MOST_POOLS = 8  # of a thread on a device: each has memory that no other one uses


@define(eq=False)
class PoolChoice:
    """Which of a thread's pools the recordings of a captured function lie in, and those of its backward pass."""

    number: int = 0


@define(eq=False)
class WarmCall:
    """An eager run of a function that is to be recorded; its outputs keep the step open."""

    held: list[StorageWatch]
    _function: weakref.ref[Any]

    @property
    def function(self) -> Any:
        """The function, if it is still there."""
        return self._function()


@seen
class Tree:
    """All recordings of one thread on one device type.

    Its lists and dicts stay the same objects.
    """

    __slots__ = (
        "__weakref__", "awaited", "backend", "base", "beside", "buried", "checkpoints", "count", "current",
        "in_place", "lingering", "mark", "moved", "moved_out", "nbytes", "number", "path", "pins", "pool",
        "pool_is_at", "recording", "root", "thread", "times", "warm",
    )  # fmt: skip

    def __init__(self, backend: Backend, number: int = 0) -> None:
        self.backend, self.number = backend, number
        self.pool: Pool = backend.new_pool()
        self.root = Node()
        self.current = self.root
        self.path: list[Node] = []
        self.times: dict[int, int] = {}
        """How often each function is on the path, by its number."""
        self.warm: list[WarmCall] = []
        self.lingering: list[tuple[Node, int]] = []
        """Gradients of the last step, by node and group, that only their parameter holds: the next replay of that node
        replaces them. If another call comes first, they are pinned."""
        self.pins: tuple[_pins.Pin, ...] = ()
        """Memory that outputs of earlier steps hold. Replaced as a whole at each change."""
        self.base: Any = None
        """The pool's layout in which all pins, and gradients that linger, are taken."""
        self.beside: frozenset[Block] = frozenset()
        """Blocks that were taken when the present recording began."""
        self.awaited: Node | None = None
        """The node whose replay is to replace the lingering gradients; set during the call that found them, as later
        somebody may have got hold of one."""
        self.in_place = False
        """The gradients that the next replay writes are exactly those that the same node wrote in its last run."""
        self.moved: dict[int, list[int]] = {}
        """By number of the entry: the recordings that were made again beside outputs of others."""
        self.moved_out = 0
        """How many steps have pools of their own by now."""
        self.mark = step.steps_begun()
        self.pool_is_at: Node | None = self.root
        self.nbytes = 0
        """Bytes of the pool and the graphs at the last count."""
        self.count = 0
        """Number of recordings at the last count."""
        self.checkpoints = 0
        self.buried: list[Node] = []
        self.recording = False
        self.thread = threading.get_ident()

    def bury(self, node: Node) -> None:
        """Forget a recording as soon as this thread may. Garbage collection asks for it at any time, in the middle of
        a recording or a look through the tree, too. When the process ends, all goes anyway."""
        if sys.is_finalizing():
            return
        node.keep_parts()  # who let it go keeps them no more
        self.buried.append(node)
        calls = body_run.current() is not None or native.is_on_the_way()
        busy = calls or self.recording or dispatch_mode_depth() or is_on() or self.backend.in_capture()
        if threading.get_ident() == self.thread and not busy:
            self.sweep()

    def recordings(self) -> list[Node]:
        """All recordings that were not buried. Other threads call this, too."""
        return [node for node in walk(self.root) if node.recording is not None and node not in self.buried]

    def is_leaf(self, node: Node) -> bool:
        """Whether no recording is below the node, apart from buried ones."""
        return all(below in self.buried for several in list(node.children.values()) for below in list(several))

    def sweep(self) -> None:
        """Forget the recordings that were buried. An empty tree gives up its pool."""
        while self.buried:
            node = self.buried[0]
            self.forget(node)  # an interrupt is raised after it
            with contextlib.suppress(ValueError):  # the garbage collector has done it meanwhile
                self.buried.remove(node)
        if not self.root.children and self.pool.reserved_bytes() and not self.path:
            self.retire()

    def begin_call(self, function: Any, limit: int, entry: int | None = None) -> None:
        """End the step if it is over: before anything is matched or recorded for ``function``. ``entry``: the number
        of its entry, where a replay of it is to come."""
        if native.begins_simply(self, step.marks(), function, limit):
            return
        if self.lingering:
            self._take_up()
        if self.buried:
            self.sweep()
        if not self.path and not self.warm:
            return
        if native.is_path_used(self.path):
            self._end_if_over(function, limit, self.root.latest_children.get(entry or 0))
        elif self.warm and any(held() is not None for warm in self.warm for held in warm.held):
            self._end_if_over(function, limit)
        else:
            self._end()

    def _end_if_over(self, function: Any, limit: int, successor: Node | None = None) -> None:
        """The step ends, if its outputs are still used, only by a mark, by a function that comes again, or when it
        grows too long."""
        marks = step.steps_begun()
        if marks != self.mark:
            self.end_path("step", successor)
            return
        times = self.times.get(function.number, 0)
        if self.warm:
            times += sum(warm.function is function for warm in self.warm)
        if marks == 0 and (times or self._lost_its_forward(function)):
            self.end_path("again", successor)
        elif times > limit:
            self.end_path("limit")

    def _lost_its_forward(self, function: Any) -> bool:
        """Whether the step began with a backward pass, whose forward pass was in none: a forward pass begins one of its
        own, as all steps to come would end between the two."""
        first = self.path[0].function if self.path else self.warm[0].function
        return first is not None and bool(first.is_backward) and not function.is_backward

    def may_start_over(self, recorded: Sequence[Node], number: int, pattern: Pattern) -> bool:
        """Whether a call that no recording fits here takes nothing from this step, and was recorded in another place:
        it begins a step of its own, rather than that there is a recording of it behind each one that it may come after.
        ``recorded``: the recordings of its entry; ``number``: that of the entry."""
        if step.steps_begun() or any(one is not None for one in pattern) or not (self.path or self.warm):
            return False
        key = (number, pattern)
        return any(one.tree is self and one.key == key and one.parent is not self.current for one in recorded)

    def has_warm(self, leaves: Sequence[Any]) -> bool:
        """Whether one of these leaves is the result of an eager run of this step."""
        return bool(self._warm_behind(leaves))

    def note_chain(self, function: Any, leaves: Sequence[Any]) -> None:
        """What eager runs of this step gave are arguments of ``function``. Alone, a function that gets its own result
        begins a step, which ends that of the call before."""
        for warm in self._warm_behind(leaves) if self.warm else ():
            behind = warm.function
            if behind is not None and (behind is not function or step.steps_begun()):
                behind.is_chained = True

    def _warm_behind(self, leaves: Sequence[Any]) -> list[WarmCall]:
        """Eager runs of this step of which one of these leaves is a result."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        return [
            warm
            for warm in self.warm
            if any((storage := held()) is not None and storage._cdata in given for held in warm.held)
        ]

    def end_path(self, reason: str, successor: Node | None = None) -> None:
        """End the step. Outputs that are still used are pinned, or turn stale if they were borrowed. Gradients that the
        ``successor`` replaces stay; those that their own recording replaces rest until it comes again."""
        lingering, resting, leaving, in_place = [], [], [], False
        for node in self.path:
            assert node.outputs is not None
            stays = node.outputs.gradients if node is successor and node.outputs.keeps_gradients() else {}
            lingering += [(node, number) for number in stays]
            in_place = in_place or bool(stays)
            # no variable may hold a storage here
            for number in [number for number, _, _ in node.live_groups(but=stays)]:
                if node.outputs.policy == "borrow" and reason in ("step", "again") and _pins.invalidate(node, number):
                    continue
                if successor is not None and self._is_replaced(node, number, successor):
                    lingering.append((node, number))
                elif self._is_replaced(node, number, node):
                    resting.append((node, number))
                else:
                    leaving.append((node, number))
        if lingering or resting or leaving:
            self.base = self.path[-1].layout
        self._pin(leaving, resting)
        self.lingering[:], self.awaited, self.in_place = lingering, successor, in_place
        self._end()  # last, so that an exception before it leaves the step as it is

    def _take_up(self) -> None:
        """Pin the lingering gradients where the call that found them was stopped before its replay."""
        self.awaited = None
        self._linger_no_more(self.lingering)

    def _pin(self, groups: Sequence[tuple[Node, int]], resting: Sequence[tuple[Node, int]] = ()) -> None:
        """Pin outputs that are in use. An exception in between leaves them pinned, perhaps twice, but never
        unprotected. ``resting``: of these their recording still knows who uses them."""
        found = [*_pins.pins_of(groups), *_pins.pins_of(resting, rests=True)]
        if found:
            self.pins, self.pool_is_at = (*self._pins_in_use(), *found), None
        _pins.leave(groups)

    def pin(self, kept: Sequence[tuple[Block, StorageWatch]]) -> None:
        """Pin memory of the pool that somebody holds and that is no output."""
        self.pins, self.pool_is_at = (*self._pins_in_use(), *[_pins.Pin(*one) for one in kept]), None

    def _pins_in_use(self) -> list[_pins.Pin]:
        return [pin for pin in self.pins if pin.is_used]

    def is_clear(self, node: Node) -> bool:
        """Whether the node may run beside all pins. It is recorded again beside those that are in its way. Outputs that
        are in the way of their own recording, or of others again and again, are owned from now on."""
        if node.clear_of is self.pins:
            return True
        if not all(pin.is_used for pin in self.pins):
            self.pins = tuple(self._pins_in_use())
        self._take_back(node)
        for pinned in {pin.node for pin in self.pins if node.is_in_the_way(pin.block)}:
            if pinned is not None and pinned.tree is self:
                numbers = self._longer_used(pinned, node)
                if not numbers or not self._moves_out(pinned, node):
                    self._make_owned(pinned, numbers)
        if self.backend.owns_in_place and node.outputs is not None:
            blocks = [pin.block for pin in self.pins]
            self._make_owned(
                node, [at for at, group in enumerate(node.outputs.groups) if any(map(group.block.overlaps, blocks))]
            )
        if node.tree is not self or any(node.is_in_the_way(pin.block) for pin in self.pins):
            return False
        if node.parent is not self.current:  # the step ended with a recording that was dropped
            return False
        node.clear_of = self.pins
        return True

    def _take_back(self, node: Node) -> None:
        """Gradients of this recording rest, and it replaces them, as nobody but their parameters has them: they are no
        pins any more. Without this a step of training between other captured work would get fresh memory for each of
        its gradients, call after call."""
        resting = [pin for pin in self.pins if pin.rests and pin.node is node]
        if not resting or self.path or self.lingering:
            return
        assert node.outputs is not None
        in_place = node.outputs.keeps_gradients()
        untouched = node.outputs.gradients if in_place else {}
        resting = [pin for pin in resting if pin.number in untouched or self._is_replaced(node, pin.number, node)]
        # lingering first, so that an exception in between leaves them protected
        self.lingering[:], self.awaited, self.in_place = [(node, pin.number) for pin in resting], node, in_place
        self.pins = tuple([pin for pin in self.pins if pin not in resting])

    def _longer_used(self, pinned: Node, node: Node) -> list[int]:
        """The pinned outputs of a recording that are to be owned, as ``node`` needs their memory. Those of another
        recording are not the first times: what needs it is recorded again all the same, beside them. Where that
        recording was itself made again for others, the two would go on getting into each other's way."""
        if pinned is not node and pinned.key[0] not in self.moved:
            if len(self.moved) > _MOST_MOVED:
                self.moved.clear()
            numbers = self.moved.setdefault(node.key[0], [])
            if node.number in numbers or len(numbers) < _TIMES_MOVED:
                numbers += [] if node.number in numbers else [node.number]
                return []
        return [pin.number for pin in self.pins if pin.node is pinned]

    def _moves_out(self, pinned: Node, node: Node) -> bool:
        """Have the step whose gradients stay in the way of others, and theirs in its way, be recorded in a pool of its
        own from now on: two networks that are trained in turn. Else each step would copy all its gradients."""
        assert pinned.function is not None
        gradients = pinned.function.is_backward or all(pin.rests for pin in self.pins if pin.node is pinned)
        if not gradients or pinned is node or self.backend.owns_in_place or self.number:
            return False
        first = pinned
        while first.parent is not None and first.parent is not self.root:
            first = first.parent
        step_nodes = list(walk(first))
        if self.moved_out >= _MOST_POOLS or first in self.path or node in step_nodes:
            return False
        self.moved_out += 1
        for one in step_nodes:
            one.function.pool.number = self.moved_out
        assert pinned.log is not None
        pinned.log.add("step", "its gradients are in the way of other steps: it has a pool of its own from now on")
        self.forget(first)
        return True

    def _make_owned(self, node: Node, numbers: Sequence[int]) -> None:
        """Make these outputs owned. Recordings that take such an output as an argument in the pool do not fit any
        more."""
        assert node.outputs is not None
        assert node.log is not None
        new = [number for number in numbers if number not in node.outputs.owned]
        groups = [node.outputs.groups[number] for number in new]
        if not groups:
            return
        # a replay that goes back to Python pins its own gradients first, for calls of any shape
        lasting = bool(node.reads) and node.outputs.gradients.keys() >= set(new)
        native.committed(bool, (), lambda _: node.make_owned(new))  # as a whole, whatever exception comes meanwhile
        node.function.note_kept(node.key[0], [group.paths for group in groups], lasting=lasting)
        node.log.counters.kept_outputs += len(groups)
        paths = ", ".join(path for group in groups for path in group.paths)
        node.log.add("step", f"{paths}: kept, so with fresh memory in every call from now on")
        for below in [below_node for below_node in walk(node) if below_node is not node]:
            addresses = [address for address in below.key[1] if address is not None]
            if below.tree is not None and any(group.block.holds(address) for group in groups for address in addresses):
                self.forget(below)

    def _linger_no_more(self, pinned: Sequence[tuple[Node, int]]) -> None:
        """Pin the gradients that linger. An exception in between leaves memory pinned rather than unprotected."""
        self._pin(pinned)
        self.lingering.clear()

    def _is_replaced(self, node: Node, number: int, successor: Node) -> bool:
        assert node.outputs is not None
        parameters, _ = node.outputs.gradients_of(number)
        return bool(parameters) and all(map(successor.replaces, parameters))

    def let_go(self, successor: Node | None = None) -> bool:
        """Pin the gradients that the next replay, of ``successor`` or of something else, does not write. True if all
        gradients that the replay writes are in place already, those of its last run, which nobody else has."""
        if successor is not None and successor is self.awaited:
            self.lingering.clear()
            return self.in_place
        self._linger_no_more([one for one in self.lingering if not (successor and self._is_replaced(*one, successor))])
        return False

    def settle_gradients(self, successor: Node) -> None:
        """Another replay than the awaited one may come: what it does not replace is pinned."""
        self.awaited = None
        stays = [one for one in self.lingering if self._is_replaced(*one, successor)]
        self._pin([one for one in self.lingering if one not in stays])
        self.lingering[:] = stays

    def _end(self) -> None:
        native.end_step(self)

    def pattern(self, leaves: Sequence[Any]) -> Pattern:
        """Which leaves are live outputs on the path, by address."""
        if not self.path:
            return (None,) * len(leaves)
        addresses = [leaf.data_ptr() if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
        find, block_of = self.pool.find, self.block_of
        return tuple([address if find(address) and block_of(address) is not None else None for address in addresses])

    def block_of(self, address: int) -> Block | None:
        """The block of the live output on the path that this address lies in."""
        for node in reversed(self.path):
            assert node.outputs is not None
            for group, held in zip(node.outputs.groups, node.live, strict=True):
                block = group.block
                if block.address <= address < block.address + block.nbytes and held is not None and held() is not None:
                    return block
        return None

    def live_blocks(self) -> list[tuple[Block, torch.UntypedStorage]]:
        """Blocks on the path, of gradients that linger, and pins, which must not be given away."""
        pinned = [(pin.block, pin.held()) for pin in self.pins]
        found = [(block, storage) for block, storage in pinned if storage is not None]
        found += [(block, storage) for node in self.path for _, block, storage in node.live_groups()]
        for node, wanted in self.lingering:
            found += [(block, storage) for number, block, storage in node.live_groups() if number == wanted]
        return found

    def make_room(self, log: Log) -> None:
        """Give memory that eager code left unused back to the device."""
        begin = time.perf_counter()
        if self.pool.make_room():
            log.add("checkpoint", "unused memory given back", ms=(time.perf_counter() - begin) * 1e3)

    def give_back_empty(self, log: Log) -> None:
        """Give the memory of a pool without recordings back to the device, where that is much: a recording came to
        nothing, and eager code cannot use what lies in the pool."""
        if self.root.children or not self.backend.has_own_memory or self.pool.reserved_bytes() < _MUCH:
            return
        self.retire()
        self.make_room(log)

    def may_record(self, log: Log) -> bool:
        """Whether the next recording can keep out of the memory that somebody holds. False: it cannot, and the pool was
        given up.

        Asked before a recording, not after one that was stopped: until its exception is gone, frames hold what the body
        made. Replays go on meanwhile: nobody may use what a capture that never ran would have written."""
        if not self.put_away(log, "a stopped recording"):
            return False
        if self.pool.can_restore(self._layout(), [block for block, _ in self.live_blocks()]):
            return True
        log.add("drop", "memory that was lent is kept: the pool is given up")
        self.retire()
        return False

    def _layout(self) -> Any:
        """The pool as the current path left it."""
        return self.base if self.current is self.root else self.current.layout

    def before_recording(self, log: Log) -> None:
        """Set the pool to its state at the end of the path, without the outputs that died since."""
        self.let_go()
        switched = self.pool_is_at is not self.current
        if switched or self.pool.free_between_recordings:
            with log.timed("checkpoint", f"{len(self.path)} recordings on the path"):
                self.pool.restore(self._layout(), self.live_blocks())
        if switched and self.current is not self.root:
            self.checkpoints += 1
            log.counters.checkpoints += 1
        live = [block for block, _ in self.live_blocks()]
        self.beside = frozenset(live)
        if config.current().poison:
            self.pool.poison(live)

    def attach(self, node: Node) -> None:
        """Add a recording below the current node and stand on it. Memory that somebody used when it began, and let go
        of meanwhile, may be the recording's own by now."""
        dead = set(self.current.dead)
        before = []
        for ancestor in self.path:
            assert ancestor.outputs is not None
            alive = {number for number, _, _ in ancestor.live_groups()}
            for number in range(len(ancestor.outputs.groups)):
                if number not in alive and (ancestor.number, number) not in dead:
                    before.append((ancestor, number))
                    dead.add((ancestor.number, number))
        node.beside = self.beside.intersection([block for block, _ in self.live_blocks()])
        node.tree, node.clear_of = self, self.pins
        node.parent, node.dead_before, node.dead = self.current, tuple(before), frozenset(dead)
        siblings, counts = self.current.children.setdefault(node.key, []), self.current.counts
        if node not in siblings:  # else an attempt was stopped
            if not (node.reads and siblings):  # branches of a body count as one recording
                counts[node.function.number] = counts.get(node.function.number, 0) + 1
            siblings.append(node)
        node.see()
        self.stand_on(node)
        self.pool_is_at = (
            node  # its children find the pool as the recording leaves it; a replay does not touch the layout
        )

    def stand_on(self, node: Node) -> None:
        """This node ran last: the path ends here."""
        self.current.latest_children[node.key[0]] = node
        native.stand_on(self, node, step.marks(), node.function)

    def note_warm(self, function: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Note an eager run of a function that is to be recorded: what follows in this step is recorded after it."""
        if not self.path and not self.warm:
            self.mark = step.steps_begun()
        storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self.warm.append(WarmCall([hold(storage) for storage in storages.values()], weakref.ref(function)))

    def keep_used(self) -> None:
        """Pin what is still used of a run in the pool that came to no recording."""
        known = {block for block, _ in self.live_blocks()}
        found = [_pins.Pin(block, hold(storage)) for block, storage in self.pool.used() if block not in known]
        if found:
            self.pins = (*self._pins_in_use(), *found)
        self.pool_is_at = None

    def put_away(self, log: Log, what: str) -> bool:
        """After ``what``: have no memory of the pool taken but by outputs on the path. Gives the pool up, else."""
        if self.pool.is_tidy():
            return True
        log.add("drop", f"a tensor of {what} is kept: the pool is given up")
        self.retire()
        return False

    def retire(self) -> None:
        """Give up this pool and all recordings; whoever still holds memory of it keeps it alive."""
        old, pool = self.root, self.backend.new_pool()
        self.pool.keep_for([storage for _, storage in self.live_blocks()])
        self.root = self.pool_is_at = Node()  # first, so that an exception below leaves nothing that could run
        self.pool, self.pins, self.base = pool, (), None
        self._end()
        self._lose(old)

    def give_up(self) -> None:
        """Drop all recordings. Only the holders of outputs keep memory of the pool then."""
        self.pool.keep_for([storage for _, storage in self.live_blocks()])
        self._lose(self.root)

    def forget(self, node: Node) -> None:
        """Drop a recording and all below it. Outputs still held keep their memory. One of another thread's tree goes at
        that thread's next call, as it may be running."""
        if node.tree is not self:
            node.drop()
            return
        native.committed(bool, (), lambda _: self._forget(node))  # as a whole, whatever exception comes meanwhile

    def _forget(self, node: Node) -> None:
        self.let_go()
        if node in self.path:
            self.end_path("drop")
        self.take_out(node)
        self._lose(node)

    def take_out(self, node: Node) -> None:
        """Have no call find a recording any more. It keeps what it has until it is forgotten."""
        if node.parent is None:
            return
        siblings = node.parent.children.get(node.key, [])
        node.parent.latest_children.clear()
        if node in siblings:
            siblings.remove(node)
            for sibling in siblings:
                sibling.joined.discard(node.number)
            if not (node.reads and siblings):
                self._count_one_less(node.parent.counts, node.function.number)
            if not siblings:
                del node.parent.children[node.key]

    @staticmethod
    def _count_one_less(counts: dict[int, int], function: int) -> None:
        left = counts.pop(function, 0) - 1
        if left > 0:  # functions come and go for as long as the thread lives
            counts[function] = left

    def _lose(self, node: Node) -> None:
        """Drop what the recordings from this one on keep. A second attempt still finds those that are left."""
        for below in reversed(list(walk(node))):
            below.lose()
            if below is self.awaited:  # what it leads to would stay until another call comes
                self.awaited = None
