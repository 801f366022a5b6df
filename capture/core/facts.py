"""Facts: what watched runs of one function, under one key, showed.

Written by ``observe`` (and by the recording run), read by ``rules``. Plain frozen
data without torch: dtypes and devices are strings, so that facts dumped from a job replay in a test.
Paths are the user's words: ``"ids"``, ``"cache.0.k"``, ``"self.layers[3].weight"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attrs import field
from typing_extensions import override

from capture.core.data import frozen

PlaceholderKind = Literal["argument", "implicit"]
Owner = Literal["argument", "parameter", "buffer", "attribute", "closure", "global", "item", "constant", "unknown"]
MutationEvidence = Literal["schema", "version", "norm"]
EffectKind = Literal["tensor", "value", "count", "members", "python", "container", "call"]
OutputKind = Literal["fresh", "input", "input-view", "static", "static-view", "python", "foreign"]


@frozen(kw_only=True)
class CodeLocation:
    """A place in the user's code."""

    file: str
    line: int
    function: str
    code: str = ""
    """The source line, stripped; empty if the source is not available."""

    @override
    def __str__(self) -> str:
        text = f"{self.file}:{self.line} in {self.function}"
        return f"{text}: {self.code}" if self.code else text


@frozen(kw_only=True)
class TensorInfo:
    """Metadata of one tensor. ``nbytes`` counts the bytes its elements span in memory."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    requires_grad: bool = False
    layout: str = "strided"
    nbytes: int = 0

    @override
    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}] {self.device}"


@frozen(kw_only=True)
class Mutation:
    """An in-place write. ``evidence`` tells how it was seen; ``where`` is the first write's line."""

    evidence: MutationEvidence
    op: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class PlaceholderInfo:
    """One tensor-like input of the body: an argument, or an implicit input found by watching."""

    path: str
    kind: PlaceholderKind
    tensor: TensorInfo
    owner: Owner
    static: bool = False
    """The annotation promises a fixed address (a name in ``static=`` matched), or it is an implicit input."""
    alias_group: int | None = None
    """Placeholders that share memory carry the same number; None: shares with nobody."""
    used: bool = True
    mutation: Mutation | None = None
    replaced: bool = False
    """The body stored another tensor under this very path (see ``Effect``), so its address moves every call."""
    first_use: CodeLocation | None = None


@frozen(kw_only=True)
class Effect:
    """What the body left in Python state: an attribute, item, cell or global that differs after the run.

    ``kind``: what a replay does again is a place that gets a ``tensor`` or a plain ``value``, a number to which the
    body adds (``count``), and a list or dict whose members it knows (``members``). ``python`` is another value and
    ``container`` other members: both would stay frozen. ``call`` is a function that leaves something outside, with its
    name as ``path``.
    """

    path: str
    kind: EffectKind
    before: str
    after: str
    where: CodeLocation | None = None

    @property
    def compared(self) -> tuple[str, EffectKind, str]:
        """The part that has to be equal in each run: path, kind and, for plain values, the value; of a tensor only
        where it is put."""
        return (self.path, self.kind, self.after if self.kind in ("value", "count", "members") else "")


@frozen(kw_only=True)
class OutputInfo:
    """One leaf of the returned structure. ``source`` is the placeholder's path for inputs and views of them."""

    path: str
    kind: OutputKind
    source: str | None = None
    tensor: TensorInfo | None = None
    value: str | None = None
    """``repr`` of a Python output."""

    @property
    def compared(self) -> tuple[str, OutputKind, str | None, str | None]:
        """The part that has to be equal in each run. The metadata of new tensors are in ``made``."""
        return (self.path, self.kind, self.source, self.value)

    @property
    def made(self) -> tuple[str, tuple[int, ...], str] | None:
        """Dtype, shape and device of a tensor that the body made; None for other outputs."""
        tensor = self.tensor if self.kind == "fresh" else None
        return (tensor.dtype, tensor.shape, tensor.device.partition(":")[0]) if tensor is not None else None


@frozen(kw_only=True)
class HostSync:
    """The host read a tensor's values, or an operator's result size depends on them."""

    op: str
    where: CodeLocation | None = None
    data_dependent_shape: bool = False
    is_compared: bool = False
    """A recording may end a segment here. Each replay reads the value again, and goes on with the branch of that
    value."""
    device: str = ""
    """Type of the device that is read, where it is known."""
    through: str = ""
    """The library's function that the line called and that read, as ``torch.optim.adam.Adam.step``; empty where the
    line itself read."""


@frozen(kw_only=True)
class HostWork:
    """Work a recording cannot hold: an operator on CPU tensors beside an accelerator, a copy between the two, an
    operator tagged as unsafe for graphs; a tensor made of an array; or the address of a tensor, given as a number."""

    op: str
    kind: Literal["compute", "copy", "unsafe", "array", "address"]
    where: CodeLocation | None = None


@frozen
class AlteredOperator:
    """Something that torch computes in another way where a dispatch mode watches, to other last bits."""

    what: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Island:
    """A function that runs eagerly in every replay, between two segments. ``obstacle``: why it cannot, after its name;
    ``fix``: what helps, by a word (``rules.cg208_island``). ``is_undoable``: all that it leaves is known, and can be
    taken back."""

    name: str
    where: CodeLocation | None = None
    obstacle: str | None = None
    fix: str = ""
    is_undoable: bool = False


@frozen(kw_only=True)
class Break:
    """What lies between two segments. ``kind``: ``value`` that the host reads, ``size`` that follows from values, or
    ``island``, which took ``ms``; ``operators``: those that run in the segment before it."""

    kind: Literal["value", "size", "island"]
    what: str
    operators: int
    where: CodeLocation | None = None
    ms: float | None = None


@frozen(kw_only=True)
class Unkeyed:
    """Something about a tensor that the body used, that is no part of the key, and that no guard checks."""

    name: str
    """``Tensor._version``, or an operator."""
    kind: Literal["answer", "place", "beside"]
    """``answer``: what Python asked the tensor for. ``place``: an offset that Python code counts from the storage's
    begin. ``beside``: memory of the storage outside of the tensor, which an operator reads."""
    paths: tuple[str, ...]
    """Whose storage it is."""
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Collective:
    """An operator by which the ranks of a process group exchange something."""

    op: str
    group: str
    """The group's name; empty if torch does not tell."""
    all_wait: bool
    """No rank is done before all have begun."""
    obstacle: str | None = None
    """Why the engine does not record it. Reads after the operator's name."""
    registers_segments: bool = False
    """NCCL would register memory of expandable segments with a graph of it."""
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Draw:
    """Random numbers drawn by ``op`` from ``generator`` (``"default"`` or the placeholder's path)."""

    generator: str
    device: str
    op: str
    count: int = 1
    where: CodeLocation | None = None


@frozen(kw_only=True)
class OpaqueLeaf:
    """A leaf the library cannot open (``role`` says where) and the number of tensors found inside it."""

    path: str
    type: str
    role: Literal["argument", "output"]
    num_tensors: int
    also: str | None = None
    """Another place that holds it, while the body changes it: a copy would not be changed there."""
    keyless: bool = False
    """An argument that neither compares by value nor can be referred to weakly, so that no key holds it."""
    endless: bool = False
    """A container that contains itself, or too many in one another."""


@frozen(kw_only=True)
class SubclassLeaf:
    """A tensor that is no plain strided ``torch.Tensor``: a subclass, sparse, quantized or nested.

    ``path`` is empty where nobody knows what holds it; ``where`` is then the line that reads it.
    """

    path: str
    type: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Escape:
    """A tensor made by the body that is still alive after it and is neither output nor effect."""

    tensor: TensorInfo
    op: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Drift:
    """A Python value that differed between two runs under one key; a recording would freeze the last.

    ``path``: ``"output.1"``, an operator's scalar argument (``"aten.mul.Tensor argument 1"``) or an argument.
    """

    path: str
    first: str
    second: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class SequenceChange:
    """Two runs under one key issued different operators from position ``index`` on."""

    index: int
    first: str
    second: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class GradientUse:
    """An operator whose result requires grad; ``path`` names the placeholder that asks for it, if known.

    ``op`` is empty where a result has a graph that no operator of the body made.
    """

    path: str | None
    op: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class GradientObstacle:
    """Why forward and backward cannot be recorded apart. ``reason`` reads after "and"."""

    path: str | None
    reason: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Inlined:
    """A captured function called inside the watched body; it runs as part of it."""

    function: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Moved:
    """A static or implicit tensor found at another address than before."""

    path: str
    before_addr: int
    after_addr: int
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Unbound:
    """A static or implicit tensor that moved, and to whose new address the recording could not be bound."""

    path: str
    reason: str
    kernel: str | None = None
    """The device function that stands in the way, where there is one."""


@frozen(kw_only=True)
class LimitReached:
    """``max_recordings`` recordings exist under one node; ``difference`` says what asked for one more."""

    num_recordings: int
    difference: str
    path: str | None = None
    before: str = ""
    after: str = ""
    where: CodeLocation | None = None


@frozen(kw_only=True)
class SlowReplay:
    """Replays of a recording take longer than the body, in microseconds."""

    replay: float
    body: float
    where: CodeLocation | None = None
    optimizers: tuple[str, ...] = ()
    """Classes whose step runs eagerly in each replay."""
    operators: int = 0
    """Operators that a replay runs."""
    breaks: int = 0
    """Places where a replay goes back to Python: values that the host reads, and islands."""


@frozen(kw_only=True)
class GradientOrder:
    """In one backward pass with ``gradients="accumulate"``, ``shared_with`` gives the same parameters gradients."""

    shared_with: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class MemoryForecast:
    """A recording would bring what is taken on a device to ``nbytes``, where ``limit`` are allowed."""

    nbytes: int
    limit: int
    device: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Variation:
    """One part of what tells calls apart, and how it varied.

    ``what``: in the user's words, as "'x' (1st argument), dimension 1"; ``change``: as "9 values in 12 calls (17, 18,
    19, ...)"; ``about``: ``"number"``, ``"size"``, ``"object"`` or ``"state"``, where a fix is known for such.
    """

    what: str
    change: str
    about: str = ""

    @override
    def __str__(self) -> str:
        return f"{self.what}: {self.change}"


@frozen(kw_only=True)
class GivenUp:
    """Runs were watched, recordings made and dropped, and none was used again."""

    observations: int
    recordings: int
    drops: int
    ms: float
    """Milliseconds that the watched runs and recordings took together."""
    variations: tuple[Variation, ...] = ()
    reads: tuple[HostSync, ...] = ()
    """What the body reads on the host, where nothing varied in the key: state that changed may be of such values."""
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Verification:
    """A replay gave other bits than the body did. ``path``: the first output or tensor that differs."""

    path: str
    deterministic: bool
    """The body gave the same bits when it ran a second time."""


@frozen(kw_only=True)
class BucketRefusal:
    """Calls of one size cannot be padded to a size that is recorded."""

    kind: Literal["differs", "raises", "writes", "aliases", "reads", "gradients", "communicates"]
    path: str = ""
    """The result, or the argument."""
    detail: str = ""
    sizes: str
    """What is padded to what, as ``batch=3 to 4``."""


@frozen(kw_only=True)
class Fault:
    """Something went wrong inside this library. ``place``: the innermost of its own lines."""

    kind: str
    message: str
    place: str


@frozen(kw_only=True)
class BorrowedUse:
    """A borrowed output was used after its step. ``where``: the captured function's line."""

    function: str
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Dissent:
    """What a rank with which this one shares collectives says against a recording; its number is -1 if it is not
    known."""

    rank: int
    reason: str


@frozen(kw_only=True)
class PackageRunner:
    """A model package of AOTInductor on a device that no graph can hold as it was loaded.

    ``entry``: it calls the entry point for many threads (``threaded``), or nothing tells which it calls (``unknown``).
    """

    entry: Literal["threaded", "unknown"]
    where: CodeLocation | None = None


@frozen(kw_only=True)
class Facts:
    """Everything that rules may look at, for one function and one key."""

    function: str
    defined_at: CodeLocation | None = None
    runs: int = 1
    """Watched runs behind these facts; 0 for facts of a call that was not watched."""
    placeholders: tuple[PlaceholderInfo, ...] = ()
    outputs: tuple[OutputInfo, ...] = ()
    effects: tuple[Effect, ...] = ()
    host_syncs: tuple[HostSync, ...] = ()
    reads: tuple[str, ...] = ()
    """The values that compared host reads gave, as text, in the order of the run. They tell one branch of the body from
    another."""
    islands: tuple[Island, ...] = ()
    breaks: tuple[Break, ...] = ()
    """Where a recording is cut, in the order of the run."""
    unsteady_reads: str | None = None
    """Why no further branches of this body are recorded; None: they are."""
    host_work: tuple[HostWork, ...] = ()
    unkeyed: tuple[Unkeyed, ...] = ()
    reads_form: bool = True
    """Results may depend on strides of dimensions of size 1, or on how addresses are aligned, so these belong to the
    key."""
    reads_whole: bool = True
    """So they may on how tensors of whole numbers are aligned: their memory is read as something else."""
    runners: tuple[PackageRunner, ...] = ()
    collectives: tuple[Collective, ...] = ()
    dissent: Dissent | None = None
    draws: tuple[Draw, ...] = ()
    devices: tuple[str, ...] = ()
    opaque: tuple[OpaqueLeaf, ...] = ()
    subclasses: tuple[SubclassLeaf, ...] = ()
    escapes: tuple[Escape, ...] = ()
    drifts: tuple[Drift, ...] = ()
    sequence_change: SequenceChange | None = None
    gradients: tuple[GradientUse, ...] = ()
    """Who asks for gradients of what the body leaves behind; empty if nothing it leaves has an autograd graph."""
    given_gradients: frozenset[str] = frozenset()
    """Paths of gradients of arguments that are inputs themselves."""
    gradient_obstacles: tuple[GradientObstacle, ...] = ()
    inlined: tuple[Inlined, ...] = ()
    unmatched_static: tuple[str, ...] = ()
    known_paths: tuple[str, ...] = ()
    """Paths ``static=`` could have named; for "did you mean"."""
    moved: tuple[Moved, ...] = ()
    unbound: tuple[Unbound, ...] = ()
    unpatchable: str | None = None
    """Why no recorded graph of this process can be bound to another address."""
    limit: LimitReached | None = None
    given_up: GivenUp | None = None
    too_large: MemoryForecast | None = None
    gradient_order: GradientOrder | None = None
    slow_replay: SlowReplay | None = None
    verification: Verification | None = None
    bucket: BucketRefusal | None = None
    fault: Fault | None = None
    borrowed_use: BorrowedUse | None = None
    separate_pools: str | None = None
    """The device's allocator, where it cannot put a pool's state back, so that every recording has its own pool."""
    around: str | None = None
    """The mode or transform around the call that has to see every operator of the body, so that it cannot be
    replayed."""
    suspends: str | None = None
    """What a call of the function gives instead of a result: a generator, or a coroutine."""
    unseen: tuple[CodeLocation | None, ...] = ()
    """Lines near which kernels were launched that belong to no operator of torch."""
    altered: tuple[AlteredOperator, ...] = ()
    """What has other last bits than eager's, as a dispatch mode watched."""
    calls_foreign: bool = False
    """Code in C may have run that keeps something where nobody sees it: the body is not run for a try, with other
    values."""
    refused: str | None = None
    """Why the engine stopped a recording."""
    backend_missing: str | None = None
    """Device type no backend exists for, if any."""
    num_ops: int = 0
    """Operators that a replay has to run (views not counted)."""
    sequence: tuple[str, ...] = field(default=(), repr=False)
    """Operator names in order."""
    scalars: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    """Per operator, the ``repr`` of its arguments that are no tensors."""


def gradients_left(facts: Facts) -> dict[str, PlaceholderInfo]:
    """Paths of gradients that the body leaves on arguments, or reads of them, and the arguments; without those that
    are inputs themselves."""
    paths = {effect.path: effect.kind != "python" for effect in facts.effects} if facts.effects else {}
    for info in facts.placeholders:
        if info.kind == "implicit":
            paths[info.path] = True
    gradients = [path for path, counts in paths.items() if counts and path.endswith(".grad")] if paths else []
    if not gradients:
        return {}
    arguments = [info for info in facts.placeholders if info.kind == "argument" and not info.static]
    by_path = {f"{argument.path}.grad": argument for argument in arguments}
    return {path: by_path[path] for path in gradients if path in by_path and path not in facts.given_gradients}


def diff_facts(
    first: Facts, second: Facts, lines: Sequence[CodeLocation | None] = ()
) -> tuple[tuple[Drift, ...], SequenceChange | None]:
    """Differences between two runs under one key that a recording would freeze. ``lines``: of the second run."""
    for index, (first_operator, second_operator) in enumerate(zip(first.sequence, second.sequence, strict=False)):
        if first_operator != second_operator:
            where = lines[index] if index < len(lines) else None
            return (), SequenceChange(index=index, first=first_operator, second=second_operator, where=where)
    if len(first.sequence) != len(second.sequence):
        index = min(len(first.sequence), len(second.sequence))
        longer = first.sequence if len(first.sequence) > index else second.sequence
        names = (longer[index], "(end)") if longer is first.sequence else ("(end)", longer[index])
        where = lines[index] if index < len(lines) else None
        return (), SequenceChange(index=index, first=names[0], second=names[1], where=where)
    drifts = []
    for index, (ours, theirs) in enumerate(zip(first.scalars, second.scalars, strict=True)):
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                where = lines[index] if index < len(lines) else None
                drifts.append(Drift(path=f"{second.sequence[index]} argument", first=a, second=b, where=where))
    for mine, yours in zip(first.outputs, second.outputs, strict=False):
        if mine.value != yours.value:
            drifts.append(Drift(path=mine.path, first=str(mine.value), second=str(yours.value)))
    return tuple(drifts), None
