"""Which Python code a body runs, in whatever module: the names in that code tell what it can have read.

A profile function of the watching thread notes code objects and their globals (``native/code_watch.c``). Code of this
library is left out, and so is what torch runs for it. So is the code of a default device, which is a part of each key,
and what a garbage collection runs, which may come at any time.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Collection
from typing import Any

from attrs import field

from capture.core.data import define
from capture.key.packages import is_library, package_of
from capture.native import native
from capture.state import c_calls, keyed_reads
from capture.torch_private import operator_watch, warned
from capture.torch_private.capabilities import DEFAULT_DEVICE_CODE
from capture.torch_private.dynamo import AROUND_COMPILED, COMPILE, GUARD_FUNCTION, RUN_COMPILED, begin_compiled
from capture.torch_private.operators import RULES_OF_MODES

_NOTED, _AS_ITS_CALLER, _OURS, _BETWEEN, _ASIDE, _OPERATORS = range(6)  # as in ``native/code_watch.c``
_CALLS_BODIES = ("api", "autograd", "integrations", "key", "runtime", "state", "testing")
"""Folders of this library whose functions call users' code: that code counts again."""
_RUN_OPERATORS = ("capture.engines.", "capture.observe.dispatch_mode")
_ISLANDS = "capture.observe.islands"
"""Runs functions that are not recorded: what they read is left out."""
_ONCE = ("linecache",)
"""Modules whose code does something once in a process: ``linecache`` reads a source file when the first line of it is
shown, as in each stack that torch notes."""
_kinds: dict[str | None, int] = {}
gc.callbacks.append(native.note_collection)  # once and for good: other threads may go through the list at any time
_MOST_KINDS = 100_000


def _sort(name: str | None) -> int:
    """How the code of a module is sorted, by the module's name; None: it has no name, or one that is no text."""
    package = package_of(name)
    if name == _ISLANDS:
        return _ASIDE
    if package == "capture":
        if str(name).startswith(_RUN_OPERATORS):
            return _OPERATORS
        folder = str(name).split(".")[1:2]
        return _BETWEEN if not folder or folder[0] in _CALLS_BODIES else _OURS
    if package == "importlib" or name in (*_ONCE, *COMPILE, RULES_OF_MODES):  # what they run, they run once, or for us
        return _ASIDE
    if package == "triton" or (package == "torch" and str(name).startswith(RUN_COMPILED) and name != AROUND_COMPILED):
        return _BETWEEN
    return _AS_ITS_CALLER if package and is_library(package) else _NOTED  # generated code belongs to no module


@define(eq=False)
class CodeRun:
    """The code that ran, with the globals that it ran in."""

    codes: dict[types.CodeType, list[dict[str, Any]]] = field(factory=dict)
    calls: list[tuple[tuple[str, Any], types.CodeType, int]] = field(factory=list)
    """What C functions left behind, and the place that was noted for it, with the code and the line that called them
    first."""
    below: set[types.CodeType] = field(factory=set)
    """Code of one run that ran only inside operators that are written in Python."""
    calls_foreign: bool = False
    """A function in C ran that may keep something where nobody sees it (``c_calls.is_foreign``)."""
    is_complete: bool = True
    """False where some code may have run unseen."""
    latest: Collection[types.CodeType] = ()
    """The code that the last of the runs was seen to run."""
    unseen: set[types.CodeType] = field(factory=set)
    """Code that counts as if it had run."""
    looked_up: keyed_reads.Seen = field(factory=dict)
    """Keys that code looked up in dicts."""
    looked_at: Collection[types.CodeType] = ()
    """The code whose frames would have told keys in the last of the runs."""

    def update(self, other: CodeRun) -> None:
        """Add the code of another run."""
        self.is_complete = self.is_complete and other.is_complete
        self.calls_foreign = self.calls_foreign or other.calls_foreign
        self.latest, self.looked_at = other.latest, other.looked_at
        for code, keys in other.looked_up.items():
            self.looked_up.setdefault(code, set()).update(keys)
        for code, scopes in other.codes.items():
            for scope in scopes:
                self.add(code, scope)

    def add(self, code: types.CodeType, scope: dict[str, Any]) -> None:
        """Add one code object."""
        known = self.codes.setdefault(code, [])
        if all(one is not scope for one in known):
            known.append(scope)

    def lookups(self) -> frozenset[Any]:
        """What tells the keys of one run from those of another; nothing where no code was asked for keys."""
        pairs = [(code, key) for code, keys in self.looked_up.items() for key in keys]
        return frozenset([*pairs, *self.latest]) if pairs else frozenset()

    def add_function(self, function: types.FunctionType) -> None:
        """Count a function, and those nested in it, as if they had run."""
        found = [function.__code__]
        for code in found:
            self.add(code, function.__globals__)
            self.unseen.add(code)
            found += [constant for constant in code.co_consts if type(constant) is types.CodeType]


class code_run:
    """The code that this thread runs in the block; complete once the block is over. ``place`` is called where a C
    function leaves something behind, to note the line; ``on_frame`` with each frame of the code in ``asked``.

    A class, and to be entered by ``with`` itself: what ``contextlib`` runs at the end of a block would be noted."""

    def __init__(
        self, place: Callable[[], Any] = lambda: None, asked: Collection[types.CodeType] = (),
        on_frame: Callable[[types.FrameType], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._run = run = CodeRun()

        def leaves(function: Any) -> tuple[str, Any] | None:
            run.calls_foreign = run.calls_foreign or c_calls.is_foreign(function)
            what = c_calls.leaves(function)
            return None if what is None else (what, place())

        run.looked_at = keyed = keyed_reads.asked()
        compiled = begin_compiled()

        def begins(frame: types.FrameType) -> None:
            if frame.f_code in compiled:
                operator_watch.go_on_by_mode()
                return
            if frame.f_code in keyed:
                keyed_reads.note(frame, run.looked_up)
            if frame.f_code in asked:
                on_frame(frame)

        if len(_kinds) > _MOST_KINDS:
            _kinds.clear()
        # the garbage collector may call these at any time
        collected = [getattr(callback, "__code__", None) for callback in gc.callbacks]
        apart = (warned.CODE, *[code for code in collected if type(code) is types.CodeType])
        self._watch = native.CodeWatch(_sort, _kinds, apart, leaves, {*asked, *keyed, *compiled}, begins)

    def __enter__(self) -> CodeRun:
        self._watch.begin()
        return self._run

    def __exit__(self, *_: object) -> None:
        run, watch = self._run, self._watch
        run.is_complete = bool(watch.end())
        seen = {code: [scope] for code, scope in watch.seen.items() if code not in DEFAULT_DEVICE_CODE}
        run.codes.update({code: scopes for code, scopes in seen.items() if code.co_qualname != GUARD_FUNCTION})
        for code, scope in watch.more:
            if code in run.codes:
                run.add(code, scope)
        run.latest = run.codes.keys()
        run.below = set(watch.below)
        run.calls = list(watch.calls)
