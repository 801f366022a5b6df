"""What a run took from the host's own generators and iterators, which no operator shows and no replay takes again.

These are Python's ``random``, NumPy's global generator, and any generator or iterator that the body can reach. If the
position of one changed in the run, or cannot be known, there is no recording.
"""

from __future__ import annotations

import io
import itertools
import operator
import random
import types
import weakref
from collections.abc import Iterable
from typing import Any

from capture.core.facts import CodeLocation
from capture.key.attributes import HEAP, IMMUTABLE
from capture.observe import source_location
from capture.state.code_run import CodeRun
from capture.state.snapshot import Snapshot
from capture.torch_private.generators import host_random_state, numpy_random
from capture.torch_private.threads import others_may_run

Place = tuple[str, str, Any, Any]
"""What it is, a name that code may have for it, the object, and its position."""
UNKNOWN = object()
_PRINTED = (itertools.count, itertools.repeat)
_NAMES = ("random", "np", "numpy", "shuffle", "choice", "randint", "uniform", "sample", "gauss", "randrange")


def positions(before: Snapshot) -> list[Place]:
    """The present positions of all generators and iterators."""
    places: list[Place] = []
    seen: set[int] = set()
    kinds = {kind for kind in {type(value) for _, value in list(before.sources.values())} if is_moving(kind)}
    for source, value in list(before.sources.values()) if kinds else ():
        if type(value) not in kinds or id(value) in seen:
            continue
        seen.add(id(value))
        places.append((source.path, str(source.name or source.path), value, position_of(value)))
    return places


def drawn(
    before: list[Place], host: tuple[Any, Any], ran: CodeRun | None, reachable: Snapshot
) -> list[tuple[str, CodeLocation | None]]:
    """Those whose position changed, with the line that names each."""
    draws = []
    pythons, numpys = host_random_state()
    is_own = may_draw(ran, reachable)
    if pythons != host[0] and is_own:
        draws.append(("drawing from Python's random", line_of(ran, _NAMES)))
    if is_own and numpys is not None and host[1] is not None and _flat(numpys) != _flat(host[1]):
        draws.append(("drawing from numpy.random", line_of(ran, _NAMES)))
    for path, name, value, position in before:
        where = line_of(ran, (name,))
        now = position_of(value)
        if now is UNKNOWN or position is UNKNOWN:
            if where is not None or (ran is not None and not ran.is_complete):
                taking = f"taking from {path}, of which nothing tells where it stands,"
                draws.append((f"using the file {path}" if isinstance(value, io.IOBase) else taking, where))
        elif now != position or _was_resumed(value, ran):
            draws.append((f"taking from {path}", where))
    return draws


def _was_resumed(value: Any, ran: CodeRun | None) -> bool:
    """Whether a generator from before the run went on in it. It may stand at the same line again, and what its loops
    have taken of their iterators is not to be seen."""
    if ran is None or not isinstance(value, types.GeneratorType | types.CoroutineType | types.AsyncGeneratorType):
        return False
    return any(getattr(value, name, None) in ran.codes for name in ("gi_code", "cr_code", "ag_code"))


def may_draw(ran: CodeRun | None, reachable: Snapshot) -> bool:
    """Whether the body may have drawn from the host's generators. Other threads may draw from them at the same time;
    then it counts whether code of the run names a generator, or the body can reach one."""
    if ran is None or not ran.is_complete or not others_may_run():
        return True
    names = frozenset(_NAMES)
    for code, scopes in ran.codes.items():
        if not names.isdisjoint((*code.co_names, *code.co_freevars)):
            return True
        if any(_draws(scope.get(name)) for scope in scopes for name in code.co_names):
            return True
    return any(_draws(value) for _, value in list(reachable.sources.values()))


def _draws(value: Any) -> bool:
    """Whether it is a module, generator or method that draws from the host's generators."""
    if isinstance(value, types.ModuleType):
        return value.__name__ in ("random", "numpy.random", "numpy")
    if type(value) in (types.BuiltinMethodType, types.MethodType, types.MethodWrapperType):
        value = value.__self__
    numpy = numpy_random()
    return isinstance(value, random.Random) or (numpy is not None and isinstance(value, numpy.RandomState))


def is_moving(kind: type) -> bool:
    """Whether the objects of a class are generators or iterators."""
    if kind in weakref.ProxyTypes:  # they answer for another object, which is found by itself
        return False
    numpy = numpy_random()
    numpys = () if numpy is None else (numpy.BitGenerator, numpy.Generator, numpy.RandomState)
    if issubclass(kind, (random.Random, types.CoroutineType, types.AsyncGeneratorType, *numpys)):
        return True
    if kind.__flags__ & (HEAP | IMMUTABLE) == HEAP and not issubclass(kind, types.GeneratorType):
        return False  # a user's class: its objects have attributes
    return hasattr(kind, "__next__") and kind not in weakref.ProxyTypes  # they stand for whatever there is


def _numpys(value: Any) -> Any:
    """The bit generator of a generator of NumPy's."""
    numpy = numpy_random()
    if numpy is None:
        return None
    if isinstance(value, numpy.BitGenerator):
        return value
    if isinstance(value, numpy.Generator):
        return value.bit_generator
    return value._bit_generator if isinstance(value, numpy.RandomState) else None


def position_of(value: Any) -> Any:
    """Equal as long as nothing was taken; ``UNKNOWN`` where the position cannot be read."""
    bits = _numpys(value)
    if bits is not None:
        return _flat(bits.state)
    if isinstance(value, random.Random):
        return UNKNOWN if isinstance(value, random.SystemRandom) else random.Random.getstate(value)
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, frame.f_lineno)
    if isinstance(value, types.CoroutineType | types.AsyncGeneratorType):
        return None  # whether its code ran tells
    if isinstance(value, _PRINTED):
        return repr(value)
    left = operator.length_hint(value, -1) if type(value).__module__ == "builtins" else -1
    return UNKNOWN if left < 0 else left


def _flat(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple((name, _flat(one)) for name, one in state.items())
    if isinstance(state, (tuple, list)):
        return tuple(map(_flat, state))
    return state.tobytes() if hasattr(state, "tobytes") else state


def line_of(ran: CodeRun | None, names: Iterable[str]) -> CodeLocation | None:
    """The first line of the user's code that names one of these."""
    if ran is None:
        return None
    wanted = frozenset(names)
    for code in ran.codes:
        if wanted.isdisjoint((*code.co_names, *code.co_freevars)) or not source_location.is_users(code.co_filename):
            continue
        mentioned = source_location.lines_of_names(code).mentioned
        first = min([mentioned[name] for name in wanted if name in mentioned], default=None)
        if first is not None:
            return source_location.of_line(code, first[1])
    return None
