"""Higher-order operators: operators that take another operator, or a graph, as torch's compiler makes them.

Some are a few lines of Python around operators, which a watch sees. The others run as a whole, and cannot be recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from capture.core.facts import HostWork
from capture.observe import source_location
from capture.observe.operator_schema import tensors_in
from capture.observe.trace import RunTrace
from capture.torch_private import operators
from capture.torch_private.capabilities import generator_id
from capture.torch_private.operator_watch import OperatorWatch

OPENED = frozenset([
    "auto_functionalized", "auto_functionalized_v2", "graphsafe_run_with_rng_state", "run_and_save_rng_state",
    "run_with_rng_state",
])  # fmt: skip


class HigherOrderMode(OperatorWatch):
    """A watch that writes notes, and that higher-order operators pass through."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.trace = RunTrace()
        self._drawn: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        """Generators by ``generator_id``, with the state the last draw left."""

    def higher_order(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator, with its own operators seen where that is possible."""
        kernel, self.trace.reads_form, self.trace.reads_whole = _kernel(op, args, kwargs), True, True
        if kernel is None:
            self.trace.work.append(HostWork(op=op.name(), kind="unsafe", where=source_location.user_location()))
            return op(*args, **kwargs)
        generator = kwargs.get("rng_state")
        with self, self.lent(generator) if isinstance(generator, torch.Generator) else contextlib.nullcontext():
            return kernel(*args, **kwargs)

    def lent(self, generator: torch.Generator) -> contextlib.AbstractContextManager[None]:
        """In the block the default generator has this generator's state; what was drawn counts for this one."""
        return self._lent(generator)

    @contextlib.contextmanager
    def _lent(self, generator: torch.Generator) -> Iterator[None]:
        drawn, self._drawn = self._drawn, {}
        try:
            yield
        finally:
            self._drawn = drawn | {generator_id(generator): (generator, generator.get_state())}


def _kernel(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The Python function behind it, if that runs operators and nothing else."""
    if op.name() == "invoke_subgraph":
        return _run_subgraph
    if op.name() not in OPENED:
        return None
    devices = [tensor.device for tensor in tensors_in(args, kwargs)]
    lent = kwargs.get("rng_state")
    devices += [lent.device] if isinstance(lent, torch.Generator) else []
    return operators.python_kernel(op, devices[0].type if devices else str(kwargs.get("device", "cpu")))


def _run_subgraph(graph: Callable[..., Any], identifier: str, *operands: Any) -> Any:
    """As torch's own kernel, which wants no mode."""
    del identifier
    return graph(list(operands)) if getattr(graph, "_boxed_call", False) else graph(*operands)
