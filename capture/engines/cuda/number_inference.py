"""Which bytes of a recorded graph's kernels hold a number that the body was called with. Pure: bytes in, places out.

In: the parameters of all nodes of a recording, and of several further captures of the same body: some with the
recording's own numbers, the others with other ones, of which some may come twice; and which nodes belong to operators
that got which number. Out: the places of the numbers, each with its form, such as ``1 / v`` in 4 bytes; or the reason
why the graph cannot be given another number.

Nothing is taken for a number that is not one in every capture, bit for bit. And nothing else may follow the numbers:
what differs between captures is either a number, or an address, or differs between captures with the same numbers, too
(gaps in structures, which hold what the stack held last: pointers of the host, and pieces of them). What has the size
of the smallest number is told as a whole: four bytes that differ in part where the numbers are the same hold none. A
word that a launch computes from a number in a way which no form describes is a reason to refuse, and so is an operator
none of whose nodes holds its number.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from attrs import evolve, field

from capture.core.data import define, frozen
from capture.engines.cuda.address_inference import NodeParameters

Number = float | int
Form = str
SAME = 3
"""How many captures at least have the recording's own numbers. They come first."""
_SMALLEST, _LARGEST = 2.0**-126, struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
"""The normal numbers of float32. Beyond them operators raise, give infinity, or flush to zero, each as it likes."""
_SMALLEST_HALF, _LARGEST_HALF = 2.0**-14, 65504.0


def _nowhere(_: int) -> bool:
    return False


@frozen
class NumberUse:
    """An operator that got a number, and the nodes that it launched."""

    operator: int
    name: str
    number: int
    first: int
    end: int


@frozen(eq=False)
class NumberSample:
    """One capture of the body."""

    numbers: tuple[Number, ...]
    nodes: Sequence[NodeParameters]
    is_own_memory: Callable[[int], bool]
    """An address of memory that a capture may take elsewhere."""
    is_host_memory: Callable[[int], bool] = _nowhere
    """An address that is the host's: of its heap, a stack, or code. No kernel is told anything by it."""


@frozen
class NumberPlace:
    """Bytes of a node's parameters that hold a number. ``forms``: all that describe what was found there, each with
    where it begins: a rounded number may look like a shorter one. Only a value that is the same in each of them can be
    put there."""

    node: int
    offset: int
    size: int
    number: int
    forms: tuple[tuple[int, Form], ...]

    def encoded(self, value: Number) -> bytes | None:
        """What stands there for a value; None if that cannot be told."""
        if len(self.forms) == 1:
            return encode(self.forms[0][1], value)
        parts = [(begin - self.offset, encode(form, value)) for begin, form in self.forms]
        whole = parts[0][1]
        if whole is None:
            return None
        for begin, part in parts:
            if part is None or whole[begin : begin + len(part)] != part:
                return None
        return whole


@frozen
class NumberRefusal:
    """Why there is no telling where the numbers are. ``node``: where, if it is one place."""

    reason: str
    node: int | None = None
    may_be_left: bool = False
    """It is about bytes that may have been left there by chance: another capture with the same numbers may tell."""


def is_normal(value: float, smallest: float = _SMALLEST, largest: float = _LARGEST) -> bool:
    """Whether it is neither zero, nor too small or too large for full precision."""
    return math.isfinite(value) and smallest <= abs(value) <= largest


def _float32(value: float) -> float | None:
    if not is_normal(value):
        return None
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _single(value: float | None) -> bytes | None:
    rounded = None if value is None else _float32(value)
    return None if rounded is None else struct.pack("<f", rounded)


def _double(value: float) -> bytes | None:
    return struct.pack("<d", value) if is_normal(value) else None


def _half(value: float) -> bytes | None:
    rounded = _float32(value)  # torch goes by float32, too
    if rounded is None or not is_normal(rounded, _SMALLEST_HALF, _LARGEST_HALF):
        return None
    return struct.pack("<e", rounded)


def _bfloat(value: float) -> bytes | None:
    bits = _single(value)
    if bits is None:
        return None
    (word,) = struct.unpack("<I", bits)
    word = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    return None if word & 0x7F80 == 0x7F80 else struct.pack("<H", word)


def _inverse(value: float) -> float | None:
    rounded = _float32(value)
    return None if rounded is None else 1.0 / rounded


_OF_FLOATS: dict[Form, Callable[[float], bytes | None]] = {
    "v as float64": _double,
    "-v as float64": lambda v: _double(-v),
    "1 / v as float64": lambda v: _double(1.0 / v),
    "v as float32": _single,
    "-v as float32": lambda v: _single(-v),
    "1 / v as float32": lambda v: _single(_inverse(v)),
    "1 / v, rounded to float32": lambda v: _single(1.0 / v),
    "v as bfloat16": _bfloat,
    "-v as bfloat16": lambda v: _bfloat(-v),
    "v as float16": _half,
    "-v as float16": lambda v: _half(-v),
}
_LARGEST_WHOLE = 1 << 24
"""Beyond it float32 has not every whole number; the forms of a number are the same in all types up to there."""
_OF_INTEGERS: dict[Form, Callable[[int], bytes | None]] = {
    "v as int64": lambda v: struct.pack("<q", v),
    "-v as int64": lambda v: struct.pack("<q", -v),
    "v as int32": lambda v: struct.pack("<i", v),
    "-v as int32": lambda v: struct.pack("<i", -v),
}


def encode(form: Form, value: Number) -> bytes | None:
    """The bytes of a number in a form; None where it has none that is sure."""
    if not value:
        return None
    if type(value) is int:
        if abs(value) > _LARGEST_WHOLE:
            return None
        if form in _OF_INTEGERS:
            return _OF_INTEGERS[form](value)
    return _OF_FLOATS[form](float(value)) if form in _OF_FLOATS else None


def _forms_of(value: Number) -> list[Form]:
    return [*_OF_INTEGERS, *_OF_FLOATS] if type(value) is int else list(_OF_FLOATS)


def infer_numbers(
    recorded: Sequence[NodeParameters],
    samples: Sequence[NumberSample],
    uses: Sequence[NumberUse],
    smallest: int = 1,
    same: int = SAME,
) -> list[NumberPlace] | NumberRefusal:
    """Places of the numbers in the ``recorded`` nodes. The first ``same`` samples have the recording's own numbers.
    ``smallest``: bytes of the smallest number that these operators have; what is smaller is a part of one."""
    for sample in samples:
        if len(sample.nodes) != len(recorded):
            return NumberRefusal(f"a further capture has {len(sample.nodes)} nodes instead of {len(recorded)}")
    used = sorted({use.number for use in uses})
    places: list[NumberPlace] = []
    for at, node in enumerate(recorded):
        if node.closed is not None and node.kind == "other":
            return NumberRefusal(node.closed, at)
        twins = [sample.nodes[at] for sample in samples]
        if any((twin.kind, twin.same, len(twin.words)) != (node.kind, node.same, len(node.words)) for twin in twins):
            return NumberRefusal("another number launches something else there", at)
        places_or_refusal = _places(at, node, twins, samples, used, smallest, same)
        if isinstance(places_or_refusal, NumberRefusal):
            return places_or_refusal
        places += places_or_refusal
    return _complete(places, uses) or places


def _complete(places: Sequence[NumberPlace], uses: Sequence[NumberUse]) -> NumberRefusal | None:
    there = {(place.node, place.number) for place in places}
    for use in uses:
        if use.first == use.end:  # nothing runs, as on empty tensors
            continue
        if not any((node, use.number) in there for node in range(use.first, use.end)):
            return NumberRefusal(f"no parameter of {use.name} holds its number", use.first)
    return None


@define
class _Bytes:
    """One node's parameters in the recording and in all samples."""

    recorded: bytes
    every: list[bytes]
    numbers: list[tuple[Number, ...]]
    smallest: int
    same: int
    varies: set[int] = field(init=False)
    """Bytes that differ between captures with different numbers."""
    noise: set[int] = field(init=False)
    """Bytes that differ between captures with the same ones."""

    def __attrs_post_init__(self) -> None:
        first, size = self.every[0], self.smallest
        alike = dict[tuple[Number, ...], bytes]()
        differs = set[int]()
        for numbers, one in zip(self.numbers, self.every, strict=True):
            before = alike.setdefault(numbers, one)
            if one is not before:
                differs |= {at for at in range(len(first)) if one[at] != before[at]}
        self.noise = {at for part in {at - at % size for at in differs} for at in range(part, part + size)}
        self.varies = {at for at in range(len(first)) if any(one[at] != first[at] for one in self.every[self.same :])}


def _places(
    node: int, recorded: NodeParameters, twins: Sequence[NodeParameters], samples: Sequence[NumberSample],
    used: Sequence[int], smallest: int, same: int,
) -> list[NumberPlace] | NumberRefusal:  # fmt: skip
    if all(twin.words == twins[0].words for twin in twins):
        return []
    numbers = [sample.numbers for sample in samples]
    block = _Bytes(_bytes_of(recorded), [_bytes_of(twin) for twin in twins], numbers, smallest, same)
    if recorded.kind != "kernel":
        return NumberRefusal("a copy follows the number", node) if block.varies - block.noise else []
    forms_by_place: dict[tuple[int, int, int], list[Form]] = {}
    for number in used:
        own = samples[0].numbers[number]
        for form in _forms_of(own):
            encoded = [encode(form, sample.numbers[number]) for sample in samples]
            wanted = [value for value in encoded if value is not None]
            if len(wanted) == len(encoded):
                for offset in _where(block, wanted):
                    forms_by_place.setdefault((-len(wanted[0]), offset, number), []).append(form)
    places: list[NumberPlace] = []
    for (size, offset, number), forms in sorted(forms_by_place.items()):
        place = NumberPlace(node, offset, -size, number, tuple((offset, form) for form in forms))
        met = [place for place in places if place.offset < offset - size and offset < place.offset + place.size]
        if any(place.number != number or len(met) > 1 for place in met):
            return NumberRefusal("two numbers may stand at one place", node)
        if not met:
            places.append(place)
        elif not (_span(met[0]) - _span(place)) & block.varies:  # else the bytes beside it are of the same number
            places[places.index(met[0])] = evolve(met[0], forms=(*met[0].forms, *place.forms))
    covered = {at for place in places for at in _span(place)}
    left = {at for at in block.varies - block.noise - covered if not _is_address(at, samples, node, same)}
    if left:
        words = _words_at(min(left), samples, node)
        return NumberRefusal(
            f"a parameter follows the number in an unknown way (byte {min(left)}: {words})", node, may_be_left=True
        )
    return places


def _words_at(at: int, samples: Sequence[NumberSample], node: int) -> str:
    """The word around a byte in each capture; a star marks an address of the recording's own memory."""
    words = [(sample.nodes[node].words[at // 8], sample.is_own_memory) for sample in samples]
    return ", ".join(f"{word:#x}{'*' * is_own(word)}" for word, is_own in words)


def _is_address(at: int, samples: Sequence[NumberSample], node: int, same: int) -> bool:
    """Whether the byte is of a word that is an address in every capture, or nothing in some. What is no more than 4
    bytes may be a number by itself, so it has to differ between captures with the same numbers, too."""
    words = [sample.nodes[node].words[at // 8] for sample in samples]
    if all(sample.is_own_memory(word) for sample, word in zip(samples, words, strict=True)):
        return True
    if max(words) <= 0xFFFF_FFFF and len(set(words[:same])) == 1:
        return False
    return all(not word or sample.is_host_memory(word) for sample, word in zip(samples, words, strict=True))


def _span(place: NumberPlace) -> set[int]:
    return set(range(place.offset, place.offset + place.size))


def _where(block: _Bytes, wanted: Sequence[bytes]) -> list[int]:
    """Places that hold these bytes in each sample, and the first of them in the recording."""
    size, first = len(wanted[0]), wanted[0]
    places = []
    for offset in {at - at % size for at in block.varies}:
        end = offset + size
        is_there = block.recorded[offset:end] == first and all(
            words[offset:end] == value for words, value in zip(block.every, wanted, strict=True)
        )
        if is_there:
            places.append(offset)
    return places


def _bytes_of(node: NodeParameters) -> bytes:
    return struct.pack(f"<{len(node.words)}Q", *node.words)
