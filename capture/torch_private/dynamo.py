"""What is asked of ``torch.compile``'s front end, once something else has loaded it."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import types
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from attrs import field

from capture.core.data import define
from capture.core.interrupts import let_through, suppress
from capture.torch_private import imports, operator_watch
from capture.torch_private.monkeypatch import put_again, replaced, set_aside

COMPILERS = ("torch._dynamo", "torch._inductor")
"""Packages whose classes count what was compiled."""
COMPILE = (
    "torch._dynamo.convert_frame", "torch._inductor.compile_fx", "torch._inductor.async_compile",
    "torch.jit._builtins", "torch.jit._recursive", "torch.jit.frontend",
)  # fmt: skip
"""Modules whose functions compile: Dynamo forward passes, Inductor backward passes, too, as late as these run first,
and TorchScript what some operators of a device are made of (``gru_cell``)."""
RUN_COMPILED = ("torch._dynamo.", "torch._inductor.", "torch._functorch._aot_autograd.")
"""Beginnings of modules that, as Triton does, look after what they read of their own, which may be another object in
every call: counters, the allocator that Inductor gives to Triton. What they call counts as before: the pieces that were
compiled, and hooks. Where a torch has other names, more is guarded, and such a body is watched more often."""
AROUND_COMPILED = "torch._dynamo.external_utils"
"""The module whose function stands around each that is compiled, up to torch 2.11 at least: it is what was compiled."""
GUARD_FUNCTION = "___make_guard_fn.<locals>.guard"
"""The function that Dynamo generates to check a guard in Python. Its globals belong to no module and hold all globals
of the user's module, so as users' code it would seem to read every one of them. Under another name it is: more is
guarded then, up to the bound on objects."""
_NAME_IN_GUARD = re.compile(r"""[.'"]([A-Za-z_]\w*)""")
"""An attribute, or a text that may be a key or the name of an attribute."""
_known_names = dict[int, tuple["weakref.ref[types.CodeType]", frozenset[str]]]()
"""Names in the guards of compiled code, by its ``id``, as code that is equal may have other guards. Kept, as Dynamo
forgets guards once one of them can never hold again."""
MODULE_PREFIX = "__import_"
"""How the names begin that Dynamo gives, among a module's globals, to other modules that inlined code reads."""
_hidden = False
_WATCHING = ("key", "state", "observe", "engines")
"""Folders whose functions run while a body is watched."""


def is_loaded() -> bool:
    """Whether something else has loaded ``torch._dynamo``."""
    return "torch._dynamo" in sys.modules


@define(eq=False)
class _Aside:
    """A watched run, of which compilers see nothing, and neither do modules of torch that are imported in it."""

    compilations: list[None]
    thread: int = field(factory=threading.get_ident)
    unwatched: operator_watch.hidden = field(factory=operator_watch.hidden)
    depth: int = 0
    """How many of these the run's own thread is in: a compiler imports modules."""
    asked: list[None] = field(factory=list)
    """An item for each that is not over, by whatever thread. Some may end what began before this run."""
    told_by: Any = None
    """Where the compiler has the callbacks of this run."""

    def __enter__(self) -> None:
        imports.tell()
        imports.listeners.append(self)
        self.listen_to_compiler()

    def __exit__(self, *_: object) -> None:
        if self in imports.listeners:
            imports.listeners.remove(self)
        if self.told_by is None:
            return
        callbacks = (self.told_by.start_callbacks, self.compiles), (self.told_by.end_callbacks, self.end)
        for registered, callback in callbacks:
            if callback in registered:  # all may have been cleared meanwhile
                registered.remove(callback)

    def listen_to_compiler(self) -> None:
        """Have a compiler that is loaded tell of compilations, and not compile what watches."""
        hide_from_compiler()
        handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if self.told_by is None and hasattr(handler, "start_callbacks") and hasattr(handler, "end_callbacks"):
            self.told_by = handler
            handler.start_callbacks.append(self.compiles)
            handler.end_callbacks.append(self.end)

    def compiles(self, _: Any) -> None:
        """Something is compiled."""
        self.compilations.append(None)
        self.begin()

    def begin(self) -> None:
        """A module of torch is about to run. Importing it is no part of the body: it happens once."""
        self.asked.append(None)
        set_aside()
        if threading.get_ident() != self.thread:
            self.compilations.append(None)  # the body goes on meanwhile, unseen
            return
        self.depth += 1
        if self.depth == 1:
            self.unwatched.__enter__()

    def end(self, _: Any = None) -> None:
        """It has run, or is compiled."""
        if threading.get_ident() == self.thread and self.depth:
            self.depth -= 1
            if not self.depth:
                self.unwatched.__exit__()
        if self.asked:
            self.asked.pop()
            put_again()
        self.listen_to_compiler()


def originals_while_compiling(compilations: list[None]) -> contextlib.AbstractContextManager[None]:
    """In the block no compiler sees what stands in for torch's functions while a body is watched: its tables of them
    live as long as the process, and code that is compiled later would meet what it cannot trace. ``compilations`` gets
    an item for each compilation, by whatever thread: what the body read meanwhile was not seen.

    Where torch has no such callbacks, the tables get stand-ins, and more of what is compiled later runs eagerly.
    """
    return _Aside(compilations)


def begin_compiled() -> Collection[types.CodeType]:
    """The code of Dynamo that goes around each function that it compiles, and calls it. Empty where torch has another
    name for what makes it: compiled code is compiled again then, in a run that is watched."""
    context = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_TorchDynamoContext", object)
    made_by = getattr(vars(context).get("__call__"), "__code__", None)
    return [one for one in getattr(made_by, "co_consts", ()) if type(one) is types.CodeType]


def names_in_guards(code: types.CodeType) -> frozenset[str] | None:
    """What Dynamo looks up to tell whether compiled code may run: the names in the guards of ``code``, which Dynamo
    made. Nothing else that was read while it was compiled can change what it does. None for code of other origin, and
    where torch shows no guards."""
    made, names = _known_names.get(id(code), (None, None))
    if made is not None and made() is code:
        return names
    if not is_loaded() or not (shown := _guards_of(code)):
        return None
    lines = (line.partition("  # ")[0] for line in shown.splitlines() if "GLOBAL_STATE" not in line)
    names = frozenset(name for line in lines for name in _NAME_IN_GUARD.findall(line))
    _known_names[id(code)] = weakref.ref(code, functools.partial(_forget, id(code))), names
    return names


def _forget(number: int, made: Any) -> None:
    if _known_names.get(number, (None,))[0] is made:  # another code object may have the number by now
        del _known_names[number]


def _guards_of(code: types.CodeType) -> str:
    """The guards as torch shows them; empty for code of other origin, and where torch shows none."""
    try:
        original = sys.modules["torch._dynamo.utils"].orig_code_map.get(code)
        if original is None:
            return ""
        entries = sys.modules["torch._dynamo.eval_frame"]._debug_get_cache_entry_list(original)
        return "\n".join([str(entry.guard_manager) for entry in entries if entry.code is code])
    except (AttributeError, KeyError, TypeError):
        return ""


def graphs_compiled() -> int:
    """How many graphs Dynamo has compiled in this process. 0 where torch does not count: a run that compiled is then
    one like any other."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))


def installed_by_compiler(scope: Mapping[str, Any], name: str) -> bool:
    """Whether Dynamo put this name among the globals in ``scope``: the code that it generated needs it, for as long as
    it is there. Modules it never takes back, of the others it keeps a list. Without that none is known, and the name
    counts as the body's own."""
    if name.startswith(MODULE_PREFIX) and isinstance(scope.get(name), types.ModuleType):
        return True
    manager: Any = getattr(sys.modules.get("torch._dynamo.utils"), "CleanupManager", None)
    try:
        return any(one.scope is scope and one.name == name for ones in manager.instance.values.values() for one in ones)
    except (AttributeError, TypeError, RuntimeError) as error:
        let_through(error)
        return False


def hide_from_compiler() -> None:
    """Keep Dynamo, once it is loaded, from compiling what watches a compiled function run.

    Without its table of skipped files it does compile that: slower at first, the same values.
    """
    global _hidden
    if _hidden or not is_loaded():
        return
    _hidden = True
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    *others, last = _WATCHING
    with suppress(Exception):
        with replaced(rules, {"_recompile_re": lambda: None}):  # a pattern of all files: once is enough (8 ms less)
            for name in others:
                rules.add(f"capture.{name}")
        rules.add(f"capture.{last}")
