"""One recording in the tree, and when it may run again.

The tree is kept for as long as its thread lives, and a function may lead to itself, as a trainer that keeps its step.
So a node of the tree does not keep what leads to objects of the user, its **parts**: the entry of the function does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import torch
from attrs import field

from capture.core.data import define
from capture.core.events import Log
from capture.engines.base import Block, BoundInput, Recording
from capture.native import native, seen
from capture.tree.liveness import StorageWatch
from capture.tree.outputs import OutputPlan

Pattern = tuple[int | None, ...]
"""For each tensor of a call: its address if it is a live output on the path, else None."""
ChildKey = tuple[int, Pattern]
_numbers = itertools.count(1)


class OwningTree(Protocol):
    """The methods of the tree that a node uses."""

    def bury(self, node: Node) -> None:
        """Drop this recording and all below it."""

    def forget(self, node: Node) -> None:
        """Drop this recording and all below it now. Outputs that are still held keep their values."""


NodeParts = Any
"""The C module's, as ``node_parts`` makes them."""
_T = TypeVar("_T")


class _Part(Generic[_T]):
    """An attribute of a node that lies in its parts. C looks it up, as a replay does many times."""

    def __new__(cls, name: str) -> Self:
        made: Self = native.NodePart(name, _NONE)
        return made

    if TYPE_CHECKING:

        def __get__(self, node: Node, _: type[Node] | None = None) -> _T: ...

        def __set__(self, node: Node, value: _T) -> None: ...


def node_parts(**given: Any) -> NodeParts:
    """The parts of a new node."""
    made = native.NodeParts()
    made.check, made.statics, made.proofs, made.generators, made.bound = _holds, {}, {}, (), ()
    for name, value in given.items():
        setattr(made, name, value)
    return made


def _holds(_: Sequence[Any]) -> int:
    return 0


_NONE = node_parts()


@seen
@define(eq=False)
class Node:
    """One recording in the tree. The root has none."""

    parent: Node | None = None
    parts: Any = field(factory=node_parts)
    """``NodeParts``, or what refers to them without keeping them."""
    log: Log | None = None
    key: ChildKey = (0, ())
    dead_before: tuple[tuple[Node, int], ...] = ()
    dead: frozenset[tuple[int, int]] = frozenset()
    """(node number, group) of all outputs on the path that were dead when this was recorded."""
    number: int = field(factory=lambda: next(_numbers))
    live: list[StorageWatch | None] = field(factory=list)
    """The list ``outputs.live``: for each group, what watches the storage handed out last."""
    children: dict[ChildKey, list[Node]] = field(factory=dict)
    latest_children: dict[int, Node] = field(factory=dict)
    """The child that ran last, by number of its entry."""
    counts: dict[int, int] = field(factory=dict)
    """Recordings below this node, by number of the function."""
    computed: Any = None
    """The formulas of what it leaves (``observe.computed.Computed``)."""
    given: Any = None
    """Where it has what follows from numbers that the host reads (``runtime.given_numbers``)."""
    formulas: Any = None
    """The program of all these formulas (``runtime.formula_program``); False where each is computed by itself."""
    first_numbers: dict[Any, Any] = field(factory=dict)
    """The numbers of the recorded run that formulas are made of, by variable."""
    placed: tuple[tuple[Any, Any], ...] = ()
    """Places that it writes and whose numbers its formulas read, each with the effect that writes it."""
    moving: frozenset[str] = frozenset()
    """Paths of static tensors that were known to move before it was recorded: an engine which cannot bind them anew
    copies those that operators read. Of others only a kernel that no operator tells of can read any."""
    written: tuple[int, ...] = ()
    """Positions of managed inputs that the body writes: their tensors' version counters have to move, too."""
    reads: tuple[str, ...] = ()
    """What the host read at the breaks of the recording."""
    joined: set[int] = field(factory=set)
    """Numbers of the nodes with the same key that continue where this one comes to a break, and of those that this one
    continues."""
    verified: bool = False
    doubts: int = 0
    """Times it was found to be wrong where another thread may have drawn in between."""
    beside: frozenset[Block] = frozenset()
    """Blocks that were in use during the whole recording: it does not write there."""
    clear_of: tuple[Any, ...] = ()
    """The tree's pins that were last found not to overlap with its memory."""
    groups: frozenset[str] = frozenset()
    """Names of the process groups that it communicates in."""
    layout: Any = None
    """The pool as this recording left it."""
    tree: OwningTree | None = None
    function = _Part[Any]("function")
    recording = _Part[Recording | None]("recording")
    outputs = _Part[OutputPlan | None]("outputs")
    check = _Part[Callable[[Sequence[Any]], int]]("check")
    statics = _Part[dict[str, torch.Tensor]]("statics")
    guard = _Part[Any]("guard")
    """The ``RecordingGuard`` that ``check`` belongs to."""
    generators = _Part[tuple[torch.Generator, ...]]("generators")
    """Generators the body draws from that are no arguments."""
    proofs = _Part[dict[Any, Any]]("proofs")
    """Results of comparing replays with bodies of smaller sizes, and how much is cut off the results
    (``runtime.buckets``)."""
    bound = _Part[tuple[BoundInput, ...]]("bound")
    """Arguments that may lie elsewhere in every call and that the recording does not follow yet."""
    program = _Part[Any]("program")
    """How gradients of this recording's results are computed, if they need any."""
    _listed_in = _Part[Any]("listed_in")
    view = _Part[Any]("view")
    """What the C module reads of a node; fixed from then on."""

    def listed_in(self, nodes: list[Node], parts: set[NodeParts]) -> None:
        """The list by key that holds this node until it is dropped, and who keeps its parts."""
        self._listed_in = nodes, parts
        parts.add(self.parts)
        nodes.append(self)
        self.parts = native.reference_to(self.parts)

    def keep_parts(self) -> None:
        """From now on the node itself keeps its parts: it was dropped."""
        if type(self.parts) is not native.NodeParts:
            self.parts = self.parts() or _NONE

    def lose(self) -> None:
        """Nothing of this recording is used again; outputs that are still held belong to their holders."""
        self.keep_parts()
        if self.recording is not None:
            self.recording.release()
        self.recording = self.tree = None
        self.children.clear()  # which refer to it: what the parts lead to would wait for another collection
        self.latest_children.clear()
        if self.outputs is not None:
            for number in range(len(self.outputs.groups)):
                self.outputs.lose(number)
        if self._listed_in is not None:
            nodes, parts = self._listed_in
            parts.discard(self.parts)
            if self in nodes:
                nodes.remove(self)

    def see(self) -> None:
        """Make ``view``: the node is in its tree, and complete."""
        if self.outputs is not None:
            # of the state that the generator had before
            follows = self.program is not None and self.program.again.follows_draws
            in_segments = self.reads and self.outputs.in_line is None
            used, runs, in_python = self.last_used, self.runs, self.written or in_segments or follows
            self.view = native.NodeView(
                outputs=self.outputs, source=None if in_python else self.outputs.single,
                several=None if in_python else self.outputs.several(), live=self.live, pattern=self.key[1],
                before=tuple([(node.live, number) for node, number in self.dead_before]),
                tensors=self.outputs.tensors, preserving=self.outputs.preserving,
                collect=None if self.outputs.inference else self.outputs.collect,
            )  # fmt: skip
            self.view.used, self.view.runs = used, runs

    @property
    def last_used(self) -> int:
        """When it ran last, counted in runs of all recordings."""
        return 0 if self.view is None else int(self.view.used)

    @property
    def runs(self) -> int:
        """Number of runs, the recording run included."""
        return 0 if self.view is None else int(self.view.runs)

    def replaces(self, parameter: torch.Tensor) -> bool:
        """Whether every replay gives this tensor another ``grad`` without reading the former one."""
        assert self.outputs is not None
        found = self.outputs.replaced.get(id(parameter))
        return found is not None and found() is parameter

    def is_in_the_way(self, block: Block) -> bool:
        """Whether it may write to memory that somebody uses."""
        recording = self.recording
        if block in self.beside or recording is None:
            return False
        # as a whole, whatever exception comes meanwhile
        return not native.committed(bool, (), lambda _: recording.avoid(block))

    def make_owned(self, numbers: Iterable[int]) -> None:
        """From now on these groups of its outputs have fresh memory in every call."""
        assert self.outputs is not None
        assert self.recording is not None
        self.outputs.make_owned(numbers, self.recording)
        if self.view is not None:
            self.see()

    def drop(self) -> None:
        """Remove this recording and all below it from the tree, now or, from another thread, at its next call."""
        if self.tree is not None:
            self.tree.bury(self)

    def live_groups(self, but: Container[int] = ()) -> Iterator[tuple[int, Block, torch.UntypedStorage]]:
        """Number, block and storage of every output that is still used, without the groups in ``but``."""
        if self.outputs is None:
            return
        for number, (group, held) in enumerate(zip(self.outputs.groups, self.outputs.live, strict=True)):
            storage = held() if held is not None and number not in but else None
            if storage is not None:
                yield number, group.block, storage

    def __attrs_post_init__(self) -> None:
        if self.outputs is not None:
            self.live = self.outputs.live

    def may_run(self) -> bool:
        """Whether every output that was dead when this was recorded is dead now."""
        found: bool = native.may_run(self)
        return found


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        for children in list(node.children.values()):  # the garbage collector may drop recordings at any point here
            stack.extend(children)
