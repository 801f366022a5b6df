"""Buckets: calls whose arguments are padded to sizes that are recorded, and whose results are trimmed.

In: the values of a call. Out: padded values that are a call of their own, with a key like any other, and what is cut
off its result. Nothing is taken on trust: a call of one size is padded only by recordings of which a replay was
compared with the unpadded body at that very size (``runtime.bucket_proof``), as which kernel runs, and what Python code
makes of a size, may be another at any size. What was found so is kept with the node (``Node.proofs``): the guards of
the node hold where it replays, so the body is the one that was compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from attrs import field

from capture.core.buckets import BucketedArgument, Buckets
from capture.core.data import define, frozen
from capture.core.interrupts import is_interrupt
from capture.guards.guard import OK, OVERLAPS, Guard, pieces_of
from capture.key import pytree
from capture.key.signature import Binder, Leaves, tensor_key
from capture.key.tensor_meta import merged, range_of, span_bytes
from capture.native import MISS, native
from capture.runtime.entry import Entry
from capture.state.source import Source
from capture.torch_private import capabilities
from capture.tree.node import Node

Values = tuple[Any, ...]
Proof = tuple[Any, ...]
"""Metadata of the tensors that are padded, as they were: what a comparison holds for."""
_MOST_SIZES = 4096  # sizes kept for one function
_LONGEST_REST = 1 << 16


@frozen(eq=False)
class LeafTrim:
    """One tensor of a result, as eager has it at one size."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_copied: bool
    """Its entries lie otherwise in the padded tensor than in eager's, so it is copied."""

    def __call__(self, padded: torch.Tensor) -> torch.Tensor:
        """Trim a padded result, which nobody else has."""
        if not self.is_copied:
            return padded.as_strided(
                self.shape, self.stride
            ).detach()  # not a view, and with a version that begins at 0
        own = torch.empty_strided(self.shape, self.stride, dtype=padded.dtype, device=padded.device)
        return own.copy_(padded[tuple(map(slice, self.shape))])


@frozen(eq=False)
class Trim:
    """What is cut off a result, by the position of its leaves."""

    leaves: tuple[LeafTrim | None, ...]

    def __call__(self, result: Any) -> Any:
        """The result of the call without padding."""
        if type(result) is torch.Tensor:
            first = self.leaves[0]
            return result if first is None else first(result)
        number, done = iter(self.leaves), dict[int, Any]()

        def trimmed(leaf: Any) -> Any:
            trim = next(number)
            if trim is None:
                return leaf
            if id(leaf) not in done:
                done[id(leaf)] = trim(leaf)
            return done[id(leaf)]

        return pytree.replace_leaves(result, trimmed)


@frozen(eq=False)
class Pad:
    """How one argument is padded at one size."""

    at: int
    """The position of its parameter."""
    path: str | None
    """Its path in the container that is the parameter's value; None if it is the value itself."""
    name: str
    """Its name in messages."""
    widths: tuple[int, ...]
    """How much is added to all dimensions, in the form of ``torch.nn.functional.pad``: the last dimension first."""
    counts: tuple[tuple[int, int], ...]
    """Dimensions and how many entries are added."""
    fill: Any
    is_constant: bool
    """The padding is a number."""
    blocks: dict[torch.dtype, torch.Tensor] = field(factory=dict)
    """What is added to tensors on the host, where that is one block: joining two takes half the time of padding one."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The padded tensor, in memory of its own. It begins a graph where the tensor is part of one: the run that gets
        it is undone, and a backward pass in it would go on to the caller's tensors."""
        if tensor.requires_grad:
            return self._padded(tensor.detach()).requires_grad_()
        return self._padded(tensor)

    def _padded(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.is_constant:
            for dim, count in self.counts:
                tensor = torch.cat([tensor, self._more(tensor, dim, count)], dim)
            return tensor
        if len(self.counts) > 1 or not tensor.is_cpu:
            return torch.constant_pad_nd(tensor, self.widths, self.fill)
        block, (dim, count) = self.blocks.get(tensor.dtype), self.counts[0]
        if block is None:
            shape = (*tensor.shape[:dim], count, *tensor.shape[dim + 1 :])
            with torch.inference_mode(False):
                block = self.blocks[tensor.dtype] = torch.full(shape, self.fill, dtype=tensor.dtype, device="cpu")
        return torch.cat((tensor, block), dim)

    def _more(self, tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
        if callable(self.fill):
            found: torch.Tensor = self.fill(tensor, dim, count)
            return found
        last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
        return last.expand(*tensor.shape[:dim], count, *tensor.shape[dim + 1 :])

    def is_silent(self, tensor: torch.Tensor) -> bool:
        """Whether the padded values are equal to the padding, so that a body which looks at the padding may give equal
        results."""
        if callable(self.fill) or not tensor.numel():
            return False
        if self.is_constant:
            return bool((tensor == self.fill).all())
        return all(bool((tensor == tensor.narrow(dim, 0, 1)).all()) for dim, _ in self.counts)


class Paths(Protocol):
    """Fast paths of padded calls, whose results are trimmed."""

    def call(self, values: tuple[Any, ...]) -> Any:
        """The result of a call whose arguments are bound; ``MISS`` if there is no path to it."""


@define(eq=False)
class Count:
    """Counts calls of one size that were padded, and tells which of them are compared with the body again: each
    interval is four times the one before. Padding may show only for some values, such as numbers below 0 where a
    maximum is taken."""

    calls: int = 0
    due: int = 1

    @property
    def is_due(self) -> bool:
        """Whether the next call is to be compared."""
        return self.calls + 1 >= self.due

    def compared(self) -> None:
        """A call was compared, and nothing differed."""
        self.calls += 1
        self.due = 4 * self.calls


@define(eq=False)
class Way:
    """A fast path for padded calls of one size, for one entry."""

    entry: Entry
    nodes: list[Node]
    """All recordings of the entry when it was made: each was compared with the body at this size."""
    holds: Callable[..., bool]
    """Compares the metadata of the tensors that are padded."""
    begins: tuple[int, ...] | None
    """Where each begins, modulo 64; None if that does not matter."""
    apart: Callable[[Sequence[Any]], int] | None
    """Tells whether a padded tensor shares memory with what the body writes."""
    count: Count
    is_pure: bool
    """The body changes nothing, so that it may run after a replay that raised."""
    paths: Paths

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether this way may serve a call with these tensors, which are to be padded."""
        if self.count.is_due or self.entry.nodes != self.nodes or not self.holds(*tensors):
            return False
        if self.begins is not None and self.begins != tuple([tensor.data_ptr() & 63 for tensor in tensors]):
            return False
        return self.apart is None or self.apart(tensors) == OK

    def replayed(self, padded: Values) -> Any:
        """The result of a padded call; ``MISS`` if it is another one."""
        try:
            result = self.paths.call(padded)
        except Exception as error:
            if is_interrupt(error) or not self.is_pure:
                raise
            return MISS  # eager's own error tells of the sizes that the caller gave
        if result is not MISS:
            self.count.calls += 1
        return result


@define(eq=False)
class Size:
    """Calls whose tensors have these shapes."""

    sizes: tuple[int | None, ...]
    """Size of each symbol; None where it is not padded."""
    padded: tuple[int | None, ...]
    pads: tuple[Pad, ...]
    """Empty: these are sizes that are recorded, or such as are not padded at all."""
    ways: list[Way] = field(factory=list)
    calls: int = 0
    rest: int = 0
    """Calls to come that are not padded, as padding them failed."""
    _last_rest: int = 0
    counts: dict[Proof, Count] = field(factory=dict)
    """Counts of padded calls, by what a comparison holds for."""

    def is_proven(self) -> None:
        """A padded call gave what the body gives."""
        self._last_rest = 0

    def let_rest(self) -> None:
        """Padding failed once more."""
        self._last_rest = self.rest = min(max(2 * self._last_rest, 4), _LONGEST_REST)

    def tensors(self, values: Values) -> list[torch.Tensor]:
        """The tensors that are padded."""
        return [values[pad.at] if pad.path is None else pytree.leaf_at(values[pad.at], pad.path) for pad in self.pads]

    def pad(self, values: Values) -> Values:
        """The padded call, which is the one that is recorded."""
        made = list(values)
        for pad in self.pads:
            if pad.path is None:
                made[pad.at] = pad(values[pad.at])
            else:
                made[pad.at] = _with(made[pad.at], pad.path, pad)
        return tuple(made)

    def replayed(self, values: Values) -> Any:
        """The result of a call by a fast path; ``MISS`` if there is none."""
        try:
            tensors = self.tensors(values)
            ways = [way for way in self.ways if way.fits(tensors)]
            padded = self.pad(values) if ways else ()
        except Exception as error:
            if is_interrupt(error):
                raise
            return MISS  # nothing has happened yet
        for way in ways:
            result = way.replayed(padded)
            if result is not MISS:
                self.calls += 1
                return result
        return MISS


def _with(value: Any, path: str, pad: Pad) -> Any:
    paths = iter([found for found, _ in pytree.leaves(value)])
    return pytree.replace_leaves(value, lambda leaf: pad(leaf) if next(paths) == path else leaf)


@frozen(eq=False)
class _Place:
    """The place of an argument among the values of a call."""

    argument: BucketedArgument
    at: int
    path: str | None

    def tensor(self, values: Values) -> Any:
        return values[self.at] if self.path is None else pytree.leaf_at(values[self.at], self.path)


@define(eq=False)
class Sizes:
    """All sizes that a function was called with."""

    buckets: Buckets
    _places: tuple[_Place, ...]
    _known: dict[tuple[Any, ...], Size] = field(factory=dict)

    @classmethod
    def of(cls, buckets: Buckets, binder: Binder) -> Sizes:
        """The sizes of a function with these buckets and parameters; empty at first."""
        places = []
        for argument in buckets.arguments:
            root, _, below = argument.path.partition(".")
            if root in binder.names and root != binder.keywords:
                places.append(_Place(argument, binder.names.index(root), f".{below}" if below else None))
            elif binder.keywords is not None:
                places.append(_Place(argument, binder.names.index(binder.keywords), f".{argument.path}"))
            else:  # of a function that takes no names but in its calls
                places.append(_Place(argument, 0, f".{argument.path}"))
        return cls(buckets, tuple(places))

    def size_of(self, values: Values) -> Size:
        """The ``Size`` of a call with these values."""
        tensors = [place.tensor(values) if place.path is not None else values[place.at] for place in self._places]
        key = tuple([getattr(tensor, "shape", None) for tensor in tensors])
        size = self._known.get(key)
        if size is None:
            if len(self._known) >= _MOST_SIZES:
                self._known.pop(next(iter(self._known)), None)
            size = self._known[key] = self._new(tensors)
        return size

    def straight(self, count: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Takes the positional arguments of a call, all ``count`` of them; ``MISS`` if it is not one of the last ones
        again. ``plain``: the same where nothing is padded."""

        def take(*args: Any) -> Any:
            if len(args) != count:
                return MISS
            try:
                size = self.size_of(args)
            except Exception as error:
                if is_interrupt(error):
                    raise
                return MISS
            if size.pads and not size.rest:
                return size.replayed(args)
            result = plain(*args)
            if result is not MISS:
                size.calls += 1
                size.rest -= size.rest > 0
            return result

        return take

    def padded(self, values: Values) -> Values:
        """The call that is recorded for this one."""
        return self.size_of(values).pad(values)

    def counts(self) -> dict[str, dict[int, int]]:
        """How often each size came, by symbol."""
        counts_by_symbol: dict[str, dict[int, int]] = {one.name: {} for one in self.buckets.symbols}
        for size in list(self._known.values()):
            for symbol, rung in zip(self.buckets.symbols, size.sizes, strict=True):
                if rung is not None:
                    counts_by_symbol[symbol.name][rung] = counts_by_symbol[symbol.name].get(rung, 0) + size.calls
        return {name: dict(sorted(counts.items())) for name, counts in counts_by_symbol.items()}

    def forget(self) -> None:
        """Forget all sizes."""
        self._known.clear()

    def clear(self) -> None:
        """Forget all comparisons and fast paths: all recordings are gone."""
        for size in list(self._known.values()):
            size.ways.clear()

    def _new(self, tensors: Sequence[Any]) -> Size:
        sizes = self.sizes_of(tensors)
        padded: list[int | None] = [
            None if size is None else symbol.padded(size)
            for symbol, size in zip(self.buckets.symbols, sizes or (), strict=False)
        ]
        if sizes is None or any(size is not None and to is None for size, to in zip(sizes, padded, strict=True)):
            nothing = (None,) * len(self.buckets.symbols)
            return Size(nothing if sizes is None else tuple(sizes), nothing, ())
        pads = [
            pad for place, tensor in zip(self._places, tensors, strict=True) if (pad := _pad(place, tensor, padded))
        ]
        return Size(tuple(sizes), tuple(padded), tuple(pads))

    def sizes_of(self, tensors: Sequence[Any]) -> list[int | None] | None:
        """Size of each symbol in these tensors; None where dimensions that share a symbol have different sizes."""
        sizes: list[int | None] = [None] * len(self.buckets.symbols)
        for place, tensor in zip(self._places, tensors, strict=True):
            if type(tensor) not in pytree.TENSOR_TYPES or tensor.layout is not torch.strided:
                continue
            for dim, symbol in place.argument.dims:
                if not -tensor.ndim <= dim < tensor.ndim or sizes[symbol] not in (None, tensor.shape[dim]):
                    return None
                sizes[symbol] = tensor.shape[dim]
        return sizes

    def cases(self, values: Values) -> list[Values]:
        """Calls like this one of all sizes that are padded to, the largest first."""
        tensors = [place.tensor(values) for place in self._places]
        sizes = self.sizes_of(tensors)
        if sizes is None or any(size == 0 for size in sizes):
            return [values]
        combinations: list[tuple[int | None, ...]] = [()]
        for symbol, size in zip(self.buckets.symbols, sizes, strict=True):
            rungs = (None,) if size is None else symbol.up_to(size)[::-1]
            combinations = [(*combination, rung) for combination in combinations for rung in rungs]
        return [self._resized(values, tensors, rungs) for rungs in combinations]

    def _resized(self, values: Values, tensors: Sequence[Any], rungs: Sequence[int | None]) -> Values:
        made = list(values)
        for place, tensor in zip(self._places, tensors, strict=True):
            if type(tensor) not in pytree.TENSOR_TYPES or tensor.layout is not torch.strided:
                continue
            cut = tensor
            for dim, symbol in place.argument.dims:
                cut = cut.narrow(dim, 0, min(cut.shape[dim], rungs[symbol] or cut.shape[dim]))
            pad = _pad(place, cut, rungs)
            whole = cut.clone(memory_format=torch.contiguous_format) if pad is None else pad(cut)
            if place.path is None:
                made[place.at] = whole
            else:
                made[place.at] = _with(made[place.at], place.path, lambda _, whole=whole: whole)  # type: ignore[arg-type]
        return tuple(made)


def _pad(place: _Place, tensor: Any, padded: Sequence[int | None]) -> Pad | None:
    """How a tensor comes to these sizes; None where it has them."""
    if type(tensor) not in pytree.TENSOR_TYPES or tensor.layout is not torch.strided:
        return None
    more = [0] * tensor.ndim
    for dim, symbol in place.argument.dims:
        to = padded[symbol]
        more[dim] = 0 if to is None else to - tensor.shape[dim]
    if not any(more):
        return None
    widths = tuple(width for count in reversed(more) for width in (0, count))
    counts = tuple((dim, count) for dim, count in enumerate(more) if count)
    fill = place.argument.fill
    is_constant = not (fill == "repeat" or callable(fill))
    return Pad(place.at, place.path, place.argument.path, widths, counts, fill, is_constant)


def proof_of(tensors: Sequence[torch.Tensor], entry: Entry) -> Proof:
    """What a comparison with the body holds for, where these tensors are padded."""
    leaves = Leaves()
    parts = tuple([tensor_key(tensor, leaves) for tensor in tensors])
    return parts, begins_of(tensors, entry)


def begins_of(tensors: Sequence[torch.Tensor], entry: Entry) -> tuple[int, ...] | None:
    """Where they begin, modulo 64; None if the body gives the same anywhere."""
    family = entry.family
    if family is not None and family.takes_any_form:
        return None
    return tuple([tensor.data_ptr() & 63 for tensor in tensors])


def shares(tensors: Sequence[torch.Tensor], leaves: Sequence[Any], paths: Sequence[str], node: Node) -> bool:
    """Whether what is padded shares memory with what the body writes. ``leaves`` and ``paths``: of all arguments."""
    guard = node.guard
    if guard is None or not guard.written:
        return False
    written = [leaf for leaf, path in zip(leaves, paths, strict=True) if path in guard.written]
    pieces = [range_of(one) for one in (*_static(node), *written)]
    return any(begin < ends and begins < end for begins, ends in pieces for begin, end in map(range_of, tensors))


def _static(node: Node) -> list[torch.Tensor]:
    return [owner.tensor for owner in node.guard.owners if owner.path in node.guard.written]


def apart_of(
    tensors: Sequence[torch.Tensor], leaves: Sequence[Any], paths: Sequence[str], node: Node
) -> Callable[[Sequence[Any]], int] | None:
    """Tells whether such tensors share memory with what the body writes; None if it writes nothing that stays where it
    is. Raises ``LookupError`` where it writes arguments that each call has elsewhere."""
    guard = node.guard
    if guard is None or not guard.written:
        return None
    fixed = {argument.path: leaves[argument.position] for argument in guard.arguments}
    if not guard.written <= {owner.path for owner in guard.owners} | fixed.keys():
        raise LookupError
    static = [*_static(node), *[tensor for path, tensor in fixed.items() if path in guard.written]]
    pieces = pieces_of(*merged(sorted(map(range_of, static))))
    guards = [
        Guard("apart", Source("argument", None, at, f"argument {at}"), (span_bytes(tensor), pieces), OVERLAPS)
        for at, tensor in enumerate(tensors)
    ]
    check: Callable[[Sequence[Any]], int] = native.Guards(tuple(guards))
    return check


def way_of(
    entry: Entry, tensors: Sequence[torch.Tensor], leaves: Sequence[Any], paths: Sequence[str], node: Node,
    count: Count, taken: Paths, *, is_pure: bool,
) -> Way | None:  # fmt: skip
    """A fast path for calls like this one; None where not all that it takes can be compared fast."""
    if not capabilities.HAS_METADATA_GUARD:
        return None
    try:
        apart = apart_of(tensors, leaves, paths, node)
    except LookupError:
        return None
    metadata = capabilities.metadata_guard(tensors)
    return Way(entry, list(entry.nodes), metadata, begins_of(tensors, entry), apart, count, is_pure, taken)
