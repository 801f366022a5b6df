"""Notice that one of torch's functions that set a switch was called, without asking for the switch.

Some switches take 30 to 1,000 ns to read, as torch makes a list, a text or an enumeration for each: together as long as
a whole replay. They change when a function of torch's that calls their setter runs. From Python 3.12 on
``sys.monitoring`` tells of that, for those functions alone: nothing else in the process becomes slower. Where it does
not (Python 3.11, no tool number left), the switches are read in every call.

Not seen: somebody who calls the undocumented setter in ``torch._C`` itself.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from capture.torch_private.probe import probe

_TOOLS = (4, 3)
"""Numbers of ``sys.monitoring`` that no kind of tool is known by."""


class SetterCalls:
    """Counts how often such a function began or ended. The end counts, too: a switch may be read before it is set."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def increment(self, *_: object) -> None:
        """Count: one of these functions began or ended, in any thread."""
        self.count += 1


SETTER_CALLS = SetterCalls()


@probe
def notices_setters() -> bool:
    """Whether calls of setters can be noticed from now on. Tried with a function that sets nothing when it is only
    asked."""
    monitoring: Any = getattr(sys, "monitoring", None)
    number = None if monitoring is None else next((tool for tool in _TOOLS if monitoring.get_tool(tool) is None), None)
    if number is None:
        return False
    monitoring.use_tool_id(number, "torch-capture")
    events = monitoring.events.PY_START | monitoring.events.PY_RETURN
    for event in (monitoring.events.PY_START, monitoring.events.PY_RETURN):
        monitoring.register_callback(number, event, SETTER_CALLS.increment)
    for code in set(_setters()):
        monitoring.set_local_events(number, code, events)
    before = SETTER_CALLS.count
    torch.backends.cuda.preferred_linalg_library()
    if SETTER_CALLS.count >= before + 2:
        return True
    monitoring.free_tool_id(number)
    return False


def _setters() -> Iterator[types.CodeType]:
    """Code of each Python function of torch's that assigns to a switch, or calls a setter of ``torch._C`` that has a
    getter beside it."""
    exported = dir(torch._C)
    names = frozenset(f"_set_{name[5:]}" for name in exported if name.startswith("_get_")).intersection(exported)
    names |= {name for name in exported if name.startswith("_set_") and name.endswith("_setter")}
    modules = [torch, sys.modules.get("torch.nn.attention")]
    modules += [module for name, module in sorted(sys.modules.items()) if name.startswith("torch.backends")]
    for module in modules:
        for function in _functions({} if module is None else vars(module)):
            yield from _codes(function.__code__, names, is_property=function.__name__ == "__set__")
        behind = getattr(module, "m", None)  # torch.backends puts objects with properties in the place of its modules
        for function in _functions(vars(behind) if isinstance(behind, types.ModuleType) else {}):
            yield from _codes(function.__code__, names, is_property=function.__name__ == "__set__")


def _functions(names: dict[str, Any]) -> Iterator[types.FunctionType]:
    """Functions of torch's own among these, and those in its classes."""
    for value in list(names.values()):
        for one in vars(value).values() if isinstance(value, type) else (value,):
            plain = inspect.unwrap(one) if callable(one) else None
            if isinstance(plain, types.FunctionType) and str(plain.__module__).startswith("torch"):
                yield plain


def _codes(code: types.CodeType, names: frozenset[str], *, is_property: bool) -> Iterator[types.CodeType]:
    """The code and what is nested in it, where it names one of these; of a property's ``__set__`` always."""
    built = any(
        isinstance(constant, str) and constant.startswith("_set_") for constant in code.co_consts
    )  # a name put together
    if is_property or built or not names.isdisjoint(code.co_names):
        yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner, names, is_property=False)
