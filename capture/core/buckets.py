"""Buckets: which dimensions of arguments are padded, to which sizes, with which values, and how near to eager the
result has to be.

Options are checked where the user writes them. No torch.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from attrs import field

from capture.core.data import frozen
from capture.core.errors import AnnotationError

Rungs = Sequence[int] | Literal["pow2"]
"""Sizes that are padded to, ascending, or all powers of two."""
Fill = float | bool | Literal["repeat"] | Callable[[Any, int, int], Any]
"""What padding holds: a number; ``"repeat"``, the last entry again; or ``fill(tensor, dim, count)``, which gives the
``count`` entries to add after the last one of ``dim``."""
Tolerance = float | tuple[float, float]
"""``rtol`` and ``atol`` as in ``torch.testing.assert_close``; one number is both."""
_MOST_RECORDINGS = 64
_POWERS = 12  # recordings that an endless ladder (``"pow2"``) is counted as


@frozen(eq=False)
class Dim:
    """A size that several dimensions share, for ``buckets=``: they are padded together, and count as one.

    ``Dim((1, 2, 4, 8))`` or ``Dim("pow2", name="length")``; the name is for reports alone. Raises ``AnnotationError``
    for a ladder that is none.
    """

    rungs: Rungs
    name: str = field(default="", kw_only=True)

    def __attrs_post_init__(self) -> None:
        _ladder(self.rungs, "Dim()")


@frozen
class Symbol:
    """One size that is padded, and its ladder: None for all powers of two."""

    name: str
    rungs: tuple[int, ...] | None

    def padded(self, size: int) -> int | None:
        """The smallest rung that is at least ``size``; None for a size above the last rung, and for 0."""
        if size < 1:
            return None
        if self.rungs is None:
            return 1 << (size - 1).bit_length()
        at = bisect.bisect_left(self.rungs, size)
        return self.rungs[at] if at < len(self.rungs) else None

    def up_to(self, size: int) -> tuple[int, ...]:
        """All rungs of a list; of ``"pow2"`` those up to the one that holds ``size``."""
        if self.rungs is not None:
            return self.rungs
        return tuple(1 << power for power in range((max(size, 1) - 1).bit_length() + 1))


@frozen
class BucketedArgument:
    """A tensor among the arguments, by path, and the symbols of its dimensions."""

    path: str
    dims: tuple[tuple[int, int], ...]
    """A dimension, which may be negative, and the number of its symbol."""
    fill: Fill

    @property
    def root(self) -> str:
        """The name of the parameter that is this tensor or contains it."""
        return self.path.partition(".")[0]


@frozen
class Buckets:
    """All that was declared for one function."""

    symbols: tuple[Symbol, ...]
    arguments: tuple[BucketedArgument, ...]
    tolerances: tuple[tuple[str, float, float], ...] = ()
    """A path, ``rtol`` and ``atol`` for it and what is below it; the path ``""`` is for all."""

    def tolerance(self, path: str) -> tuple[float, float]:
        """``rtol`` and ``atol`` for a result, or for a tensor that the body writes; ``(0, 0)`` asks for the same
        bits."""
        fitting = [
            tolerance
            for tolerance in self.tolerances
            if not tolerance[0] or path == tolerance[0] or path.startswith(f"{tolerance[0]}.")
        ]
        return max(fitting, key=lambda tolerance: len(tolerance[0]))[1:] if fitting else (0.0, 0.0)

    def num_rungs(self) -> int:
        """How many recordings the ladders ask for."""
        counts = [_POWERS if symbol.rungs is None else len(symbol.rungs) for symbol in self.symbols]
        return min(math.prod(counts), _MOST_RECORDINGS)


def buckets_of(options: Mapping[str, Any], check_path: Callable[[str, str], object]) -> Buckets | None:
    """What the options say, checked. ``check_path``: raises for a path that begins with no parameter.

    Raises ``AnnotationError``.
    """
    declared = options.get("buckets")
    if declared is None:
        for option in ("fill", "tolerance"):
            if option in options:
                raise AnnotationError(f"{option}= says how buckets are padded: it needs buckets=")
        return None
    if not isinstance(declared, Mapping) or not declared:
        raise AnnotationError(f"buckets= takes a dict such as {{'x': {{0: (1, 2, 4)}}}}, got {declared!r}")
    if options.get("outputs") == "borrow":
        raise AnnotationError("buckets= cannot go with outputs='borrow': a trimmed output is another tensor")
    symbols: dict[object, int] = {}
    listed: list[Symbol] = []
    dims = {path: _dims(path, dims_of_path, symbols, listed, check_path) for path, dims_of_path in declared.items()}
    fills = _by_path("fill", options.get("fill", 0), list(dims), _fill)
    arguments = tuple(BucketedArgument(path, dims_of_path, fills.get(path, 0)) for path, dims_of_path in dims.items())
    tolerance = options.get("tolerance", 0.0)
    several = tolerance if isinstance(tolerance, Mapping) else {"": tolerance}
    tolerances = tuple((path, *_tolerance(path, tolerance)) for path, tolerance in several.items())
    return Buckets(tuple(listed), arguments, tolerances)


def _dims(
    path: object,
    declared: object,
    symbols: dict[object, int],
    listed: list[Symbol],
    check_path: Callable[[str, str], object],
) -> tuple[tuple[int, int], ...]:
    if not isinstance(path, str) or not path:
        raise AnnotationError(f"buckets= has names of arguments as keys, got {path!r}")
    check_path("buckets", path)
    if not isinstance(declared, Mapping) or not declared:
        raise AnnotationError(
            f"buckets[{path!r}] takes a dict from dimensions to sizes, as {{0: (1, 2, 4)}}: {declared!r}"
        )
    dims = []
    for dim, rungs in declared.items():
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise AnnotationError(f"buckets[{path!r}] has numbers of dimensions as keys, got {dim!r}")
        key: object = id(rungs) if isinstance(rungs, Dim) else (path, dim)
        if key not in symbols:
            where = f"buckets[{path!r}][{dim}]"
            ladder = _ladder(rungs.rungs if isinstance(rungs, Dim) else rungs, where)
            name = rungs.name if isinstance(rungs, Dim) else ""
            symbols[key] = len(listed)
            listed.append(Symbol(name or f"{path}.{dim}", ladder))
        dims.append((dim, symbols[key]))
    return tuple(dims)


def _ladder(rungs: object, where: str) -> tuple[int, ...] | None:
    if isinstance(rungs, str):
        if rungs != "pow2":
            raise AnnotationError(f"{where} takes sizes or 'pow2', got {rungs!r}")
        return None
    if not isinstance(rungs, Sequence) or not rungs:
        raise AnnotationError(f"{where} takes sizes such as (1, 2, 4), or 'pow2', got {rungs!r}")
    for rung in rungs:
        if not isinstance(rung, int) or isinstance(rung, bool) or rung < 1:
            raise AnnotationError(f"{where} takes whole numbers from 1 on, got {rung!r}")
    if any(rung >= next_rung for rung, next_rung in itertools.pairwise(rungs)):
        raise AnnotationError(f"{where} takes sizes that ascend, got {tuple(rungs)}")
    return tuple(rungs)


def _by_path(option: str, given: object, paths: Sequence[str], check: Callable[[str, object], Any]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(paths, check(option, given))
    for path in given:
        if path not in paths:
            raise AnnotationError(f"{option}[{path!r}] names nothing in buckets=; known: {', '.join(paths)}")
    return {path: check(f"{option}[{path!r}]", one) for path, one in given.items()}


def _fill(where: str, given: object) -> Any:
    if given == "repeat" or isinstance(given, (int, float)) or callable(given):
        return given
    raise AnnotationError(f"{where} takes a number, 'repeat', or a function of (tensor, dim, count), got {given!r}")


def _tolerance(path: object, given: object) -> tuple[float, float]:
    if not isinstance(path, str):
        raise AnnotationError(f"tolerance= has paths such as 'output' as keys, got {path!r}")
    pair = given if isinstance(given, tuple) else (given, given)
    if len(pair) == 2 and all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in pair):
        rtol, atol = float(pair[0]), float(pair[1])
        if rtol >= 0 and atol >= 0:
            return rtol, atol
    raise AnnotationError(f"tolerance= takes a number from 0 on, or (rtol, atol), got {given!r}")


def ladder(sizes: Mapping[int, int], *, rungs: int) -> tuple[int, ...]:
    """The ``rungs`` sizes that pad these calls least: ``sizes`` says how often each size came.

    The largest size is a rung. Exact, by dynamic programming: the square of the number of sizes times ``rungs`` steps.
    ``ladder(sizes_seen(fn)["batch"], rungs=6)`` makes a ladder of what a captured function was called with.

    Raises ``ValueError`` where there are no sizes, for one below 1, or fewer rungs than 1.
    """
    ordered = sorted(size for size, count in sizes.items() if count > 0)
    if not ordered or ordered[0] < 1 or rungs < 1:
        raise ValueError(f"a ladder is made of sizes from 1 on, and has at least one rung: {dict(sizes)!r}, {rungs!r}")
    count = [0, *itertools.accumulate(sizes[size] for size in ordered)]
    total = [0, *itertools.accumulate(size * sizes[size] for size in ordered)]

    def padding(begin: int, end: int) -> int:
        """How many entries are added in all, where the sizes from index ``begin`` to ``end`` are padded to the last of
        them."""
        return ordered[end] * (count[end + 1] - count[begin]) - (total[end + 1] - total[begin])

    least: list[tuple[int, tuple[int, ...]]] = [(padding(0, end), (ordered[end],)) for end in range(len(ordered))]
    for _ in range(min(rungs, len(ordered)) - 1):
        least = [
            min([least[end], *[
                (least[cut][0] + padding(cut + 1, end), (*least[cut][1], ordered[end])) for cut in range(end)
            ]])
            for end in range(len(ordered))
        ]  # fmt: skip
    return least[-1][1]
