"""Which tree a thread records in and replays from.

Each thread has its own for each device type, and more for steps of training that would get in each other's way there
(``Tree.moves_out``). Autograd's threads use those of the thread they work for.
"""

from __future__ import annotations

import os
import sys
import threading
from contextvars import Token
from typing import Any

from capture.core import forks
from capture.core.alive import Alive
from capture.core.config import Config, current, put, put_back
from capture.core.data import frozen
from capture.engines.base import Backend
from capture.native import native, seen
from capture.torch_private.capabilities import NO_TASK, graph_task
from capture.tree.step import Marks, marks, use_marks
from capture.tree.tree import Tree


class _ThreadTrees:
    """The trees of one thread, given up when the thread ends: its fast paths, and lists of nodes by key, live
    longer."""

    def __init__(self) -> None:
        self.trees: dict[str, Tree] = {}
        self.process = os.getpid()

    def __del__(self) -> None:
        if sys.is_finalizing():  # torch no longer counts who holds a storage, and aborts where Python's count differs
            return
        if self.process != os.getpid():  # they belong to a thread of the process that forked
            _disown(self.trees)
        _give_up(self.trees)


def _disown(trees: dict[str, Tree]) -> None:
    """In a child process: leave memory on devices to the parent. Memory of the host belongs to the child."""
    for name, tree in list(trees.items()):
        if tree.backend.has_own_memory:
            forks.leave_to_parent(tree)
            tree.thread = 0  # no thread sweeps it, so that what is buried stays, too
            del trees[name]


def _give_up(trees: dict[str, Tree]) -> None:
    while trees:
        _, tree = trees.popitem()
        tree.give_up()


class Worker:
    """The thread on whose behalf code runs: this one, or the one that an autograd thread works for. Dies with that
    thread."""

    __slots__ = ("__weakref__",)


@frozen(eq=False)
class ThreadState:
    """A thread and what belongs to it."""

    thread: int
    worker: Worker
    trees: dict[str, Tree]
    marks: Marks
    config: Config


@seen
class InUse:
    """The trees that one thread uses, by ``tree_key``: its own ones, except while it works for another
    thread."""

    __slots__ = ("trees",)

    def __init__(self, trees: dict[str, Tree]) -> None:
        self.trees = trees


class _Local(threading.local):
    def __init__(self) -> None:
        self.of_thread = _ThreadTrees()
        self.in_use = InUse(self.of_thread.trees)
        self.worker = Worker()
        self.state: ThreadState | None = None
        """The state that was asked for last."""
        self.serves = (NO_TASK, 0)
        """The run of autograd that this thread works in, and the thread that was found to wait for that run."""


_trees = _Local()


@forks.in_child
def _disown_all() -> None:
    """In a forked child: leave the device memory of all threads' trees to the parent."""
    for number, tree in enumerate(_all.all()):
        _disown({str(number): tree})
    _disown(_trees.of_thread.trees)
    _trees.of_thread.process = os.getpid()
    _trees.serves = (NO_TASK, 0)


_ENGINE = "_engine_run_backward"


def thread_state() -> ThreadState:
    """The state of this thread, as it is now."""
    state, settings = _trees.state, current()
    if (
        state is None
        or state.trees is not _trees.in_use.trees
        or state.marks is not marks()
        or state.config is not settings
    ):
        state = ThreadState(
            thread=threading.get_ident(), worker=_trees.worker, trees=_trees.in_use.trees, marks=marks(),
            config=settings,
        )  # fmt: skip
        _trees.state = state
    return state


class acting_for:
    """Be in a thread that waits for autograd, whose own threads run backward passes on accelerators. Gives False in a
    thread that has to use trees of its own."""

    __slots__ = ("_before", "_settings", "_there")

    def __init__(self, there: ThreadState) -> None:
        self._there = there
        self._before: tuple[dict[str, Tree], Worker, Marks] | None = None
        self._settings: Token[Config] | None = None

    def __enter__(self) -> bool:
        there = self._there
        if there.thread == threading.get_ident():
            return True
        serves = (graph_task(), there.thread)
        if serves != _trees.serves or serves[0] == NO_TASK:
            if not _runs_for(there.thread):
                return False
            _trees.serves = serves
        self._before = _trees.in_use.trees, _trees.worker, marks()
        _trees.in_use.trees, _trees.worker = there.trees, there.worker
        use_marks(there.marks)
        if current() is not there.config:
            self._settings = put(there.config)
        return True

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            if self._settings is not None:
                put_back(self._settings)
            _trees.in_use.trees, _trees.worker, own_marks = self._before
            use_marks(own_marks)


def _runs_for(thread: int) -> bool:
    """Whether that thread waits for autograd, which started this one. The answer of a caller of autograd may be that it
    is busy."""
    frame, waiting = sys._getframe(), native.current_frames().get(thread)
    while frame.f_back is not None and frame.f_code.co_name != _ENGINE:
        frame = frame.f_back
    return frame.f_code.co_name != _ENGINE and waiting is not None and waiting.f_code.co_name == _ENGINE


def tree_for(backend: Backend, pool: int) -> Tree:
    """This thread's tree on a backend, with the pool of this number."""
    trees, key = _trees.in_use.trees, tree_key(backend, pool) if pool else backend.name
    try:
        return trees[key]
    except KeyError:
        tree = trees[key] = Tree(backend, pool)
        _all.add(tree)
        return tree


def tree_key(backend: Backend, pool: int) -> str:
    """Under which the trees of a thread have that one."""
    return f"{backend.name}, pool {pool}" if pool else backend.name


_all: Alive[Tree] = Alive()


def have_own_memory() -> bool:
    """Whether some trees lie on devices with memory of their own."""
    return any(tree.backend.has_own_memory for tree in _all.all())


def bytes_of_others(tree: Tree) -> int:
    """Bytes that all other trees take on the same device, as they counted them last."""
    return sum(one.nbytes for one in others_beside(tree))


def others_beside(tree: Tree) -> list[Tree]:
    """All other trees on the same device, mostly those of other threads."""
    return [one for one in _all.all() if one is not tree and one.backend.name == tree.backend.name]


def worker() -> Worker:
    """This thread, or the one that it works for."""
    return _trees.worker


def in_use() -> InUse:
    """The trees in use by this thread. One object for each thread."""
    return _trees.in_use


def trees_here() -> dict[str, Tree]:
    """This thread's trees, by ``tree_key``. The same dictionary but in threads that work for others."""
    return _trees.in_use.trees


def trees_of(function: Any) -> list[Tree]:
    """Trees of all threads that hold recordings of a captured function."""
    nodes = [node for entry in function.entries() for node in entry.nodes]
    return list({id(tree): tree for node in nodes if isinstance(tree := node.tree, Tree)}.values())


def forget_trees() -> None:
    """Start over in this thread."""
    _give_up(_trees.in_use.trees)
