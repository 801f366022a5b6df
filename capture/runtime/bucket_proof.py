"""Bucket proof: compares a padded replay with the unpadded body, on the same inputs, state and random numbers.

The replay runs first and is undone, then the body runs: its result is the call's, its effects stay. Results of the
replay have to equal those of the body once the padding is cut off, and so has all memory that both wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve, field
from typing_extensions import override

from capture.core.buckets import Buckets
from capture.core.data import define, frozen
from capture.core.facts import BucketRefusal
from capture.engines.base import Move
from capture.key import pytree, tensor_meta
from capture.key.signature import Leaf, Leaves
from capture.runtime.buckets import LeafTrim, Proof, Size, Trim, Values, proof_of, shares
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.replay import replay
from capture.runtime.verify import (
    NO_MEMORY,
    OTHERS_DRAW,
    Comparison,
    NoMemoryError,
    Results,
    State,
    is_same,
    put_back_after,
    run_body,
)
from capture.state.body_run import BodyRun
from capture.state.call import Call
from capture.tree.node import Node
from capture.tree.tree import Tree

NOT_RECORDED = BucketRefusal(kind="raises", sizes="")
"""There is no recording of padded calls, for a reason that was reported or will be."""
GENERATORS = "what it leaves in a generator"


class OperatorRaisedError(Exception):
    """One of the body's operators raised in the padded replay."""


@frozen(eq=False)
class Proved:
    """The outcome of the comparison, and the body's own result."""

    result: Any
    trim: Trim | None = None
    """What is cut off the results, if nothing differs."""
    refusal: BucketRefusal | None = None
    take_back: Callable[[], object] = tuple
    """Restores the state from before the body ran."""
    is_silent: bool = False
    """Nothing differs, but the padded values are equal to the padding, so that another call may show a difference."""


@define(eq=False)
class BucketComparison(Comparison):
    """``call``: the unpadded one; ``entry`` and ``node``: of the padded one."""

    padded: Values = field(kw_only=True)
    padded_leaves: list[Any] = field(kw_only=True)
    size: Size = field(kw_only=True)
    buckets: Buckets = field(kw_only=True)
    trims: list[LeafTrim | None] = field(factory=list, kw_only=True)
    given: tuple[Any, ...] = field(kw_only=True)
    strides: list[tuple[int, ...]] = field(factory=list, kw_only=True)
    """Strides of the leaves of the padded result; copies of them may have other ones."""

    @override
    def _replayed(self, before: State) -> Any:
        run = BodyRun()
        try:
            where = self.captured, self.node, self.tree, self.padded, self.padded_leaves
            result = self.given[0] if self.given else replay(*where, run, resumes=False)
            leaves = [leaf for _, leaf in pytree.result_leaves(result)]
            self.strides = [_strides(leaf) for leaf in leaves]
            return result
        except Exception as error:
            if run.error is error:
                raise OperatorRaisedError(f"{type(error).__name__}: {error}") from error
            raise

    def prove(self) -> Proved:
        """Replay, put back, run the body, compare."""
        captured, (before, _) = self.captured, self.taken()
        captured.log.counters.verifications += 1
        raised: str | None = None
        try:
            left, ours = put_back_after(lambda: self.taken(self._replayed(before)), before, self.call)
        except OperatorRaisedError as error:
            raised = str(error)
        self.eager = run_body(captured, self.call)
        self.has_run = True
        take_back = lambda: before.put_back(self.call.named_roots)  # noqa: E731
        if raised is not None:
            return Proved(self.eager, refusal=self._refusal("raises", detail=raised), take_back=take_back)
        after, theirs = self.taken(self.eager)
        if not after.drew_like(left):
            captured.log.add("verify", OTHERS_DRAW)
            return Proved(self.eager, is_silent=True)
        refusal = self._compared(ours, theirs) or self._shared()
        captured.log.add("verify", "equal" if refusal is None else f"padded: {refusal.path or refusal.kind} differs")
        if refusal is not None:
            return Proved(self.eager, refusal=refusal, take_back=take_back)
        self.node.verified = True
        tensors = zip(self.size.pads, self.size.tensors(self.call.values), strict=True)
        silent = all(pad.is_silent(tensor) for pad, tensor in tensors)
        return Proved(self.eager, Trim(tuple(self.trims)), is_silent=silent)

    def _refusal(self, kind: Any, path: str = "", detail: str = "") -> BucketRefusal:
        return refusal_of(self.size, self.buckets, kind, path, detail)

    def _compared(self, ours: Results, theirs: Results) -> BucketRefusal | None:
        """The first value that differs; None if none does. Results are trimmed first; memory that the body wrote has
        the same size in both."""
        leaves = [leaf for _, leaf in pytree.result_leaves(self.eager)]
        if len(ours) != len(theirs):
            return self._refusal("differs", "output", "it has another number of parts")
        for number, ((path, padded), (_, wanted)) in enumerate(zip(ours, theirs, strict=True)):
            is_result = number < len(leaves)
            if is_result and not isinstance(leaves[number], torch.Tensor):  # it is not cut to size, as tensors are
                if not is_same(padded, wanted):
                    return self._refusal("differs", path, f"{_said(padded)} against {_said(wanted)} without padding")
                self.trims.append(None)
                continue
            if not isinstance(padded, torch.Tensor) or not isinstance(wanted, torch.Tensor):
                if type(padded) is not type(wanted) or padded != wanted:
                    return self._refusal("differs", path, f"{_said(padded)} against {_said(wanted)} without padding")
                continue
            if is_result:
                trim = _trim_of(padded, wanted, leaves[number], self.strides[number])
                if trim is not None and self.captured.annotation.outputs == "clone":
                    trim = evolve(trim, is_copied=True)
                self.trims.append(trim)
                padded = padded if trim is None else padded[tuple(map(slice, trim.shape))]
            distance = self._distance(path, padded, wanted)
            if distance is not None:
                generator = path.startswith("generator ")
                return self._refusal("differs", GENERATORS if generator else path, "" if generator else distance)
        return None

    def _distance(self, path: str, padded: torch.Tensor, unpadded: torch.Tensor) -> str | None:
        """How far a tensor is from the body's, in words, if that is more than allowed."""
        if padded.dtype != unpadded.dtype or padded.shape != unpadded.shape:
            return f"it is {_meta(padded)}, and {_meta(unpadded)} without padding"
        if tensor_meta.same_bits(padded.contiguous(), unpadded.contiguous()):
            return None
        if not (padded.dtype.is_floating_point or padded.dtype.is_complex):
            return f"{int((padded != unpadded).sum())} of {padded.numel()} elements differ"
        rtol, atol = self.buckets.tolerance(path)
        wide = torch.promote_types(padded.dtype, torch.float64)
        padded, unpadded = padded.to(wide), unpadded.to(wide)
        if (rtol or atol) and torch.allclose(padded, unpadded, rtol=rtol, atol=atol, equal_nan=True):
            return None
        off = (padded - unpadded).abs().nan_to_num(nan=float("inf"))
        off = torch.where(padded.isnan() & unpadded.isnan(), 0.0, off)
        allowed = f"rtol {rtol:g} and atol {atol:g} are allowed" if rtol or atol else "the same bits are asked for"
        return f"it is off by up to {float(off.max()):.2g}; {allowed}"

    def _shared(self) -> BucketRefusal | None:
        """A result on memory of an argument would be on that of its padded copy; one on memory of state, or of another
        result, cannot be cut to a size of its own."""
        leaves = pytree.result_leaves(self.eager)
        storages = [_storage(leaf) for _, leaf in leaves]
        padded = {_storage(tensor) for tensor in self.size.tensors(self.call.values)} - {None}
        others = {_storage(tensor) for tensor in (*self.call.leaves, *self.node.statics.values())} - {None}
        for (path, leaf), storage, trim in zip(leaves, storages, self.trims, strict=True):
            if storage is None:
                continue
            together = [
                leaf_of_call
                for (_, leaf_of_call), storage_of_leaf in zip(leaves, storages, strict=True)
                if storage_of_leaf == storage
            ]
            split = trim is not None and trim.is_copied and any(other_leaf is not leaf for other_leaf in together)
            if storage in padded or split or (trim is not None and storage in others):
                return self._refusal("aliases", path)
        return None


def _storage(leaf: Any) -> int | None:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or not leaf.untyped_storage().nbytes():
        return None
    return leaf.untyped_storage().data_ptr()


def _strides(leaf: Any) -> tuple[int, ...]:
    return leaf.stride() if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided else ()


def _trim_of(
    padded: torch.Tensor, real: torch.Tensor, leaf: torch.Tensor, strides: tuple[int, ...]
) -> LeafTrim | None:  # fmt: skip
    """``padded`` and ``real``: copies; ``leaf``: what the body gave; ``strides``: of what the replay gave."""
    smaller = padded.ndim == real.ndim and all(map(int.__ge__, padded.shape, real.shape))
    if padded.shape == real.shape or not smaller:
        return None
    pairs = zip(strides, leaf.stride(), leaf.shape, strict=True)
    alike = all(padded_stride == stride or size <= 1 for padded_stride, stride, size in pairs)
    return LeafTrim(tuple(leaf.shape), leaf.stride(), not alike)


def _said(value: torch.Tensor | str | bytes) -> str:
    """A value that is compared, in a few words."""
    return value if isinstance(value, str) else _meta(value) if isinstance(value, torch.Tensor) else "an array"


def _meta(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def refusal_of(size: Size, buckets: Buckets, kind: Any, path: str = "", detail: str = "") -> BucketRefusal:
    """Why calls of one size are not padded."""
    told = [
        f"{symbol.name}={one} to {to}"
        for symbol, one, to in zip(buckets.symbols, size.sizes, size.padded, strict=True) if one != to
    ]  # fmt: skip
    return BucketRefusal(kind=kind, path=path, detail=detail, sizes=", ".join(told))


@define(eq=False)
class PaddedCall:
    """A call, and the padded call in its place."""

    captured: Captured
    size: Size
    call: Call
    """The caller's own call, without padding."""
    tensors: list[torch.Tensor]
    """The tensors of the call that are padded."""
    values: Values
    leaves: list[Leaf] = field(factory=list)
    proof: Proof = ()

    @classmethod
    def of(cls, captured: Captured, values: Values, size: Size) -> PaddedCall:
        """Pads the values of a call."""
        leaves = Leaves()
        captured.arguments(values, leaves)
        return cls(captured, size, captured.call(values, leaves), size.tensors(values), size.pad(values))

    def refusal(self, kind: Any, path: str = "", detail: str = "") -> BucketRefusal:
        """Why this call is not padded."""
        assert self.captured.annotation.buckets is not None
        return refusal_of(self.size, self.captured.annotation.buckets, kind, path, detail)

    def fits(self, entry: Entry, node: Node, tree: Tree, learned: Sequence[Move]) -> PaddedNode | BucketRefusal:
        """The recording with what is known of it, if it may serve this call as far as that can be told without a
        comparison; else why not."""
        self.proof = proof_of(self.tensors, entry)
        refusal = node.proofs.get(self.proof)
        if isinstance(refusal, BucketRefusal) and not node.reads:
            return refusal
        if any(facts.islands for facts in entry.known_facts()):  # a function that runs eagerly would see the padding
            return NOT_RECORDED
        written = {
            placeholder.path for plan in entry.plans() for placeholder in plan.placeholders if placeholder.mutated
        }
        padded = next((pad.name for pad in self.size.pads if pad.name in written), None)
        if padded is not None:
            return self.refusal("writes", padded)
        if shares(self.tensors, self.call.leaves, [path for path, _ in self.call.paths()], node):
            return NOT_RECORDED
        effects = any(plan.effects or plan.generators for plan in entry.plans())
        is_pure = not written and not effects
        return self.refusal("reads") if node.reads and not is_pure else PaddedNode(entry, node, tree, learned, is_pure)


@frozen(eq=False)
class PaddedNode:
    """The recording that a padded call is a replay of."""

    entry: Entry
    node: Node
    tree: Tree
    learned: Sequence[Move]
    """Addresses that it follows only since this call."""
    is_pure: bool
    """The body changes nothing outside of it, so it may run after the replay."""
    given: tuple[Any, ...] = ()
    """The result of the padded replay, where it has run."""


def compared(captured: Captured, padded: PaddedCall, padded_node: PaddedNode) -> Proved:
    """Compare a padded replay with the body. The result is the body's own."""
    assert captured.annotation.buckets is not None
    comparison = BucketComparison(
        captured, padded_node.entry, padded_node.node, padded_node.tree, padded.call, padded=padded.values,
        padded_leaves=padded.leaves, size=padded.size, buckets=captured.annotation.buckets, given=padded_node.given,
    )  # fmt: skip
    try:
        return comparison.prove()
    except NoMemoryError:
        captured.log.add("verify", NO_MEMORY)
        result = comparison.eager if comparison.has_run else run_body(captured, padded.call)
        return Proved(result, is_silent=True)
