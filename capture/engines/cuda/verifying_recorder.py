"""The recorder for a run that is expected to equal a watched run.

A watched run has told everything about the body; noting it all again would double the time of a recording. So each
operator is only compared with the expected one: its name, its Python values, and whether its tensors lie on known
memory, which is an input of the watched run or the pool.

Invariant: whatever the full recorder would have noted otherwise is found. At the first difference the capture is
stopped by ``RefusedError`` and given up (``difference``), and the caller records in full. Without the comparison a body
that took another way in its second run would be replayed under the plan of the first. ``is_suited`` tells a body that
differs from one that could not be compared in the first place, for example because of state in the pool: only the
former says something about the body.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from capture.core.data import define
from capture.core.facts import Drift, SequenceChange
from capture.engines.base import NOTHING_KNOWN
from capture.engines.cuda.capture_graph import RefusedError
from capture.engines.cuda.pool import CudaPool
from capture.engines.cuda.recorder import GraphRecorder
from capture.key.tensor_meta import address_of, memory_of
from capture.native import MISS, native
from capture.observe import source_location
from capture.observe.described import DescribedRun, ImplicitInput
from capture.observe.expectation import Expectation, confirm, find_implicit
from capture.observe.operator_schema import (
    DETACHING,
    TENSORS,
    OperatorTraits,
    looked_up,
    readers,
    shape_depends_on_data,
    tensors_in,
    written,
)
from capture.observe.run import ObservedRun
from capture.observe.trace import PRINTED, scalars_of
from capture.torch_private.cuda import is_capturing
from capture.torch_private.operators import is_higher_order
from capture.torch_private.subclasses import is_wrapper, only_shapes


@define
class _Progress:
    """How far a run is; the C module's ``Follow`` is one, and looks at plain operators by itself (1 us, not 6)."""

    index: int = 0
    """Of the operator to come."""
    nodes: int = 0
    """Of the graph after the last one."""
    begin: int = 0
    end: int = 0
    """Memory that holds nothing but what the body made, and staged inputs."""

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """What the operator gives, or ``MISS``: Python has to look at it."""
        return MISS


class VerifyingRecorder(GraphRecorder):
    """A recorder that expects to see nothing new."""

    notes_code = False

    def __init__(self, pool: CudaPool, expected: Expectation) -> None:
        super().__init__(pool, set(), NOTHING_KNOWN)
        self.expected = expected
        self.difference: str | None = None
        """What was not as in the watched run."""
        self.parted: SequenceChange | Drift | None = None
        """Where the body took another way."""
        self.is_suited = True
        """False if the run could not be compared, whatever the body did."""
        self.implicit: list[ImplicitInput] = []
        self.wrote: set[str] = set()
        """Paths of the inputs that operators wrote."""
        self._sequence, self._scalars = expected.facts.sequence, expected.facts.scalars
        self._now: Any = _Progress()
        self._known: dict[int, str] = {}
        """Path of each input by the ``id`` of its tensor, which somebody keeps alive."""
        self._starts: dict[int, str] = {}
        self._ranges: list[tuple[int, int, str]] = []
        self._inputs: list[tuple[str, torch.Tensor]] = []

    @override
    def begin(self, arguments: list[tuple[str, Any]]) -> None:
        implicit = find_implicit(self.before, self.expected)
        if implicit is None:
            self.difference, self.is_suited = "state is held by other tensors", False
            return
        self.implicit = implicit
        self._inputs = [*arguments, *((input_.path, input_.external.tensor) for input_ in implicit)]
        self._known = {id(tensor): path for path, tensor in self._inputs}
        self._starts = {address_of(tensor): path for path, tensor in self._inputs}
        self._now = self._progress()
        if any(self._pool.knows(address_of(input_.external.tensor)) for input_ in implicit):
            self.difference, self.is_suited = "state lies in the pool", False
        storages = {id(tensor.untyped_storage()) for _, tensor in self._inputs if tensor.numel()}
        if len(storages) != len(self._inputs):
            self.difference, self.is_suited = "inputs share memory, or have none", False

    def _progress(self) -> Any:
        assert self._count is not None
        now = native.Follow(
            miss=MISS, sequence=self._sequence, scalars=self._scalars, known=self._known, starts=self._starts,
            operators=readers, kinds=TENSORS, printed=PRINTED, shapes_alone=only_shapes,
            differentiates=torch.is_grad_enabled, capturing=is_capturing, count=self._count,
        )  # fmt: skip
        now.nodes = self._count()
        return now

    def confirm(self, watched: ObservedRun) -> DescribedRun | None:
        """The run by the facts that were known before; None if it was another one after all."""
        index = self._now.index
        if index != len(self._sequence):
            self.difference = "operators are missing"
            missing = self._sequence[index]
            self.parted = SequenceChange(index=index, first=missing, second="(end)")
            return None
        confirmed = confirm(watched, self.expected, self.implicit, self.wrote)
        if isinstance(confirmed, DescribedRun):
            return confirmed
        self.difference = confirmed
        return None

    @override
    def sequence(self) -> Sequence[str]:
        return self._sequence

    @override
    def see(self, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if types and any(map(is_wrapper, types)):
            return NotImplemented
        now = self._now
        result = now(op, args, kwargs) if self.difference is None else MISS
        return self._run_expected(op, args, kwargs) if result is MISS else result

    def _run_expected(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look at an operator, and run it."""
        if is_higher_order(op):
            return self.higher_order(op, args, kwargs)
        op_traits, run, _ = looked_up(op)
        if op_traits.unseen or only_shapes():
            return run(*args, **kwargs)
        if op_traits.composite is not None and torch.is_inference_mode_enabled():
            with self:
                return op_traits.composite(*args, **kwargs)
        now = self._now
        index, now.index = now.index, now.index + 1
        if self.difference is not None or index >= len(self._sequence) or self._sequence[index] != op_traits.name:
            self._stop_at_operator(index, op_traits.name)
        if kwargs or self._scalars[index] or not TENSORS.issuperset(map(type, args)):
            values = scalars_of(op_traits, args, kwargs, constant=None)
            if values != self._scalars[index]:
                self._stop_at_value(index, values)
            self._check_call(op_traits, args, kwargs, tensors_in(args, kwargs))
        else:
            self._check_call(op_traits, args, kwargs, args)
        if op_traits.view:
            return run(*args, **kwargs)
        if not is_capturing():
            self._stop("an operator runs on a stream that is not captured")
        count = self._count
        assert count is not None
        if count() != now.nodes:
            self.is_suited = False
            self._stop("a kernel was launched that no operator tells of")
        result = run(*args, **kwargs)
        now.nodes = count()
        return result

    @override
    def note_sync(self, op: str, *, data_dependent_shape: bool = False, compared_on: str | None = None) -> None:
        self._stop(f"{op} waits for the device")

    @override
    def note_export(self, tensor: torch.Tensor) -> None:
        self.is_suited = False
        self._stop("a tensor is handed to another library")

    @override
    def _look_for_launches(self) -> None:
        if self.difference is None and self._count is not None and self._count() != self._now.nodes:
            self.difference, self.is_suited = "a kernel was launched that no operator tells of", False

    @override
    def is_copy(self, tensor: torch.Tensor) -> bool:
        return False

    def _stop_at_operator(self, index: int, name: str) -> None:
        if self.parted is None and self.difference is None:
            first = self._sequence[index] if index < len(self._sequence) else "(end)"
            self.parted = SequenceChange(index=index, first=first, second=name, where=source_location.user_location())
        self._stop("other operators run")

    def _stop_at_value(self, index: int, values: tuple[str, ...]) -> None:
        before = self._scalars[index]
        first, second = next((pair for pair in zip(before, values, strict=False) if pair[0] != pair[1]), ("", ""))
        path = f"{self._sequence[index]} argument"
        self.parted = Drift(path=path, first=first, second=second, where=source_location.user_location())
        self._stop("an operator gets other values")

    def _stop(self, difference: str) -> None:
        self.difference = self.difference or difference
        raise RefusedError(self.difference)

    def _check_call(
        self, op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        known_ids, starts, begin, end = self._known, self._starts, self._now.begin, self._now.end
        for tensor in tensors:
            if id(tensor) not in known_ids:
                address = address_of(tensor)
                if not begin <= address < end and address not in starts:
                    self._path(tensor)
        if op.writes:
            for tensor, _ in written(op, args, kwargs):
                path = self._path(tensor)
                if path is not None:
                    self.wrote.add(path)
        if kwargs or not tensors:
            self._check_options(op, tensors, kwargs)
        if not op.plain or (op.indexes and shape_depends_on_data(op, args, kwargs)):
            self._stop(f"{op.name} has to be looked at")
        self.draws = self.draws or op.draws
        if torch.is_grad_enabled() and op.base not in DETACHING and any(tensor.requires_grad for tensor in tensors):
            self._stop("a gradient is needed")

    def _check_options(self, op: OperatorTraits, tensors: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> None:
        device = kwargs.get("device")
        on_cpu = not tensors if device is None else torch.device(device).type != "cuda"
        if on_cpu or kwargs.get("generator") is not None:
            self._stop(f"{op.name} has to be looked at")

    def _path(self, tensor: torch.Tensor) -> str | None:
        """The input whose memory a tensor lies on; None for what the body made. Stops at anything else."""
        path = self._known.get(id(tensor))
        if path is not None:
            return path
        address = address_of(tensor)
        path = self._starts.get(address)
        if path is not None or not address:
            return path
        pool = self._pool
        path = self._among_inputs(address)  # before the pool, as staged inputs lie in it
        if path is None and (pool.is_output(address) or not pool.find(address)):
            self._stop("memory is used that was not before")
        if path is None and not pool.has_outputs:
            self._now.begin, self._now.end = pool.segment_of(address)
        return path

    def _among_inputs(self, address: int) -> str | None:
        if not self._ranges:
            self._ranges = sorted((*memory_of(tensor.untyped_storage()), path) for path, tensor in self._inputs)
        at = bisect.bisect_right(self._ranges, (address, 1 << 64, "")) - 1
        if at < 0 or address >= self._ranges[at][1]:
            return None
        return self._ranges[at][2]
