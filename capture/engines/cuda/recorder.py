"""The watch over a body that is being captured.

It stops a capture before the driver would: host reads, work on streams that are not part of the capture, memory whose
shape changes in place. Nothing runs on the device meanwhile, so values must not be looked at.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from typing_extensions import override

from capture.core.facts import CodeLocation
from capture.engines.base import StateTensors
from capture.engines.cuda.capture_graph import RefusedError
from capture.engines.cuda.copy_in import DeviceConstant, DeviceCopy
from capture.engines.cuda.driver import node_counter
from capture.engines.cuda.host_tensors import HostTensors
from capture.engines.cuda.pool import CudaPool
from capture.engines.cuda.segment_run import SegmentRun, seen_by
from capture.key.tensor_kind import is_leaf
from capture.key.tensor_meta import nbytes_of
from capture.observe import source_location
from capture.observe.break_notes import IslandBegin
from capture.observe.collectives import obstacle, registers_segments
from capture.observe.dispatch_mode import ObserveMode
from capture.observe.forms import Form
from capture.observe.host_copies import HostCopy
from capture.observe.islands import Outcome, tensors_of
from capture.observe.operator_schema import (
    Operator,
    OperatorTraits,
    breaks,
    looked_up,
    tensors_in,
    tensors_out,
    written,
)
from capture.observe.released_gradients import keep
from capture.torch_private.autograd import stale_streams_overridden
from capture.torch_private.capabilities import generator_id, use_count
from capture.torch_private.cuda import is_capturing
from capture.torch_private.monkeypatch import replaced

_WAITED = "not permitted when stream is capturing"
"""What the driver says of an operator that waits inside. In other words, the finding names no operator."""


class GraphRecorder(ObserveMode):
    """A watch whose run is a capture."""

    executes = False

    def __init__(
        self, pool: CudaPool, registered: set[int], state: StateTensors, segments: SegmentRun | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self._segments = segments
        self._pool, self._registered, self.state_tensors = pool, registered, state
        self.device = pool.device
        self._host: HostTensors | None = None
        self._count = node_counter(pool.stream)
        self._nodes = 0
        self.differentiates = False
        """The body may run backward passes of its own."""
        self.unseen: list[CodeLocation | None] = []
        """Lines near which kernels were launched without an operator."""
        self._exports = False
        """A tensor was handed to another library."""
        self.draws = False
        """An operator that draws was captured, or a kernel that may."""
        self._raised_by: str | None = None
        """The island that raised."""

    @override
    def begin(self, arguments: list[tuple[str, Any]]) -> None:
        super().begin(arguments)
        self._nodes = self._count() if self._count is not None else 0
        self._host = HostTensors(self._pool, arguments, self.before, self.state_tensors)
        if self._segments is not None:
            self._segments.begin(self.before)

    def device_copies(self) -> list[DeviceCopy]:
        """CPU tensors to be copied before every replay."""
        return list(self._host.device_copies.values()) if self._host is not None else []

    def constants(self) -> list[DeviceConstant]:
        """The body's CPU constants on the device."""
        return self._host.constants if self._host is not None else []

    def sequence(self) -> Sequence[str]:
        """Names of the operators that ran."""
        return self.trace.sequence

    def unexplained(self) -> str | None:
        """Why the run, which raised nothing, cannot be replayed."""
        if self._raised_by is not None:
            return f"{self._raised_by}() raises an error that the body catches"
        if self._exports and not self.unseen:
            return "a tensor is handed to another library, which launched nothing on the stream that is recorded"
        return self._host.unexplained() if self._host is not None else None

    @override
    def note_sync(self, op: str, *, data_dependent_shape: bool = False, compared_on: str | None = None) -> None:
        follows = compared_on == "cuda" and self._segments is not None
        super().note_sync(op, data_dependent_shape=data_dependent_shape, compared_on=compared_on if follows else None)
        if follows:
            return
        raise RefusedError(f"{op} waits for the device{_at()}")

    @override
    def begin_island(
        self, begin: IslandBegin, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:  # fmt: skip
        if self._segments is None:
            raise RefusedError(f"{begin.name}() runs eagerly in every replay{_at()}")
        assert self._host is not None
        self._look_for_launches()
        if self.unseen:
            raise RefusedError(f"kernels that no operator tells of were launched before {begin.name}(){_at()}")
        draws, self.draws = self.draws, False
        generators = [generator for generator, _ in self._drawn.values()]
        self._segments.pause_at_island(
            self.trace, self.device_copies(), self.constants(), draws=draws, generators=generators
        )
        super().begin_island(begin, function, args, kwargs)  # which may look at memory
        given = list(tensors_of((args, kwargs, begin.before.values)))
        if any(id(tensor.untyped_storage()) in self._host.moving for tensor in given):
            begin.obstacle = begin.obstacle or "gets a tensor that is another one in every call"
        if begin.obstacle is not None:
            raise RefusedError(f"{begin.name}() {begin.obstacle}{_at()}")

    @override
    def perform_island(
        self, begin: IslandBegin, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Outcome, Any]:
        assert self._segments is not None
        return self._segments.run_island(begin, function, args, kwargs, self.trace, self.islands_ran)

    @override
    def end_at_island(
        self, begin: IslandBegin, obstacle: str | None, outcome: Outcome, args: tuple[Any, ...],
        kwargs: dict[str, Any], results: list[Any],
    ) -> None:  # fmt: skip
        if outcome.error is not None:  # the body gets it now
            self._raised_by = begin.name
            return
        if obstacle is not None:
            raise RefusedError(f"{begin.name}() {obstacle}{_at()}")
        assert self._segments is not None
        given = list(tensors_of((args, kwargs, begin.before.values)))
        results[0], made = self._segments.resume_after_island(self.trace.reads[-1], outcome, self.trace, given)
        self._nodes = self._count() if self._count is not None else 0
        for tensor in outcome.made:  # kept here until the recording is made
            self.trace.produced.pop(id(tensor.untyped_storage()), None)
        for tensor in made:
            self.note_made(tensor)

    @override
    def note_export(self, tensor: torch.Tensor) -> None:
        self._look_for_launches()
        self._exports = True

    @override
    @contextlib.contextmanager
    def device_syncs(self) -> Iterator[None]:
        """Nothing is looked for: a capture stops at a sync by itself."""
        owned = {id(tensor): tensor for owners in self.before.tensors.values() for _, tensor in owners}
        ends = self.differentiates and any(
            generator.device == self.device and _ends_graphs(generator) for generator in owned.values()
        )  # fmt: skip
        here = torch.autograd.set_multithreading_enabled(mode=False)  # where cuBLAS has its workspaces (``streams``)
        with _as_if_eager(), here, stale_streams_overridden() if ends else contextlib.nullcontext():
            yield

    @override
    def end(self) -> None:
        """Generators do not move while capturing, and torch lets none be set."""
        self.settle_scratch()
        self._look_for_launches()

    @override
    def dropping(
        self, versions: list[tuple[torch.Tensor, int]], forms: list[Form]
    ) -> Callable[[torch.Tensor], object]:  # fmt: skip
        return keep

    def _look_for_launches(self) -> None:
        if self._count is not None and self._count() != self._nodes:
            self.unseen.append(source_location.user_location())
            self.draws = True

    @override
    def _states(self, kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> None:
        """Generators do not move while capturing."""
        return

    @override
    def lent(self, generator: torch.Generator) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @override
    def made(self, tensor: torch.Tensor) -> bool:
        """Whether an operator made the tensor's memory, or code that no operator shows, in this capture's pool."""
        if super().made(tensor):
            return True
        if tensor.device.type != "cuda" or not tensor.numel():
            return False
        storage = tensor.untyped_storage()
        if id(storage) in self.arguments or self._pool.is_taken(storage.data_ptr()):
            return False  # a buffer for an argument, or one that a live output lies on, was made before
        return self._pool.find(storage.data_ptr())

    @override
    def is_temporary(self, tensor: torch.Tensor) -> bool:
        """Whether it is memory of the pool that no operator announced, such as a compiled function's own."""
        if self.is_copy(tensor):
            return True
        temporary = not self.before.owners(tensor.untyped_storage()) and self.made(tensor)
        if temporary and self._count is None:
            self.unseen.append(source_location.user_location())
        return temporary

    @override
    def constant_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @override
    def execute(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, which launches into the graph."""
        self._look_for_launches()
        try:
            is_copy = self.trace.host_copies.is_next
            result = self._copy_to_host(op, args, kwargs) if is_copy else self._launch(op, args, kwargs)
        finally:
            self._nodes = self._count() if self._count is not None else 0
        if self._segments is not None:
            self._segments.seen.append(seen_by(args, kwargs, result))
        return result

    def _launch(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op_traits, run, _ = looked_up(op)
        self.draws = self.draws or op_traits.draws
        tensors = tensors_in(args, kwargs)
        is_break = self._segments is not None and breaks(op_traits, args, kwargs)
        self._check(op_traits, args, kwargs, tensors, is_break=is_break)
        host = self._host
        assert host is not None
        if op_traits.lifts:
            host.note_lifted(args[0])
        try:
            if host.moving or host.device_copies:
                host.will_write([tensor for tensor, _ in written(op_traits, args, kwargs)])
                args = tuple(host.replace_moving(value) for value in args)
                kwargs = {name: host.replace_moving(value) for name, value in kwargs.items()}
            if is_break:
                return self._end_segment(op_traits, run, args, kwargs)
            if any(tensor.is_cpu for tensor in tensors):
                return host.run(op, op_traits, args, kwargs)
        except RefusedError as refused:
            raise RefusedError(f"{refused}{_at()}") from None
        try:
            result = run(*args, **kwargs)
        except RuntimeError as error:
            if _WAITED in str(error):
                self.note_sync(op_traits.name)
            raise
        for tensor in tensors_out(result) if not tensors else ():
            if tensor.is_cpu and not op_traits.draws:
                host.note_constant(tensor)
        return result

    def _copy_to_host(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The graph keeps the values on the device, as they may be written later. What the body gets has none: it only
        returns or keeps it, and each replay hands out a copy (``tensor_kind.OnHost``)."""
        assert self._host is not None
        try:
            (source,) = [self._host.replace_moving(tensor) for tensor in tensors_in(args, kwargs)]
        except RefusedError as refused:
            raise RefusedError(f"{refused}{_at()}") from None
        self._check(looked_up(op)[0], args, kwargs, [source], is_break=False)
        snapshot = self.trace.host_copies.snapshot = torch.ops.aten.clone.default(source)
        self.note_made(snapshot)
        form = kwargs.get("memory_format") or torch.preserve_format
        return torch.empty_like(snapshot, dtype=kwargs.get("dtype"), device="cpu", memory_format=form)

    @override
    def wait_for(self, copy: HostCopy) -> None:
        raise RefusedError(f"{copy.op} waits for the device{_at()}")

    def _end_segment(
        self, op_traits: OperatorTraits, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.unseen:
            raise RefusedError("kernels that no operator tells of were launched before the host reads a value")
        assert self._segments is not None
        draws, self.draws = self.draws, False
        return self._segments.end_segment(
            lambda result: self.read_text_of(op_traits, result), run, args, kwargs, self.trace, self.device_copies(),
            self.constants(), draws=draws,
        )  # fmt: skip

    @override
    def _see_output(self, tensor: torch.Tensor, op: OperatorTraits, input_storages: set[int]) -> bool:
        if self._host is not None and self._host.is_copy(tensor):
            return False  # a view of a tensor that is read through a copy
        return super()._see_output(tensor, op, input_storages)

    @override
    def original(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None if self._host is None else self._host.original(tensor)

    def is_copy(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on memory that is filled before every replay."""
        return self._host is not None and self._host.is_copy(tensor)

    def _check(
        self, op_traits: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], *,
        is_break: bool,
    ) -> None:  # fmt: skip
        reason = None
        if not is_break and breaks(op_traits, args, kwargs):
            reason = f"{op_traits.name} waits for the device"
        elif op_traits.metadata != "no" and (op_traits.resizes or not self.made(args[0])):
            reason = f"{op_traits.name} changes the shape of a tensor in place"
        elif unreadable := _unreadable(op_traits, tensors):
            reason = f"{op_traits.name} reads {unreadable}"
        elif self._raised_by is not None:
            reason = f"{op_traits.name} follows {self._raised_by}(), which raised an error that the body catches"
        elif not is_capturing():
            reason = f"{op_traits.name} runs on a stream that was not forked from the caller's stream"
        elif op_traits.unsafe:
            reason = f"{op_traits.name} is tagged as unsafe for graphs"
        elif op_traits.base == "wait_tensor" and not self.made(args[0]):  # once, so that it must not be waited for here
            reason = f"{op_traits.name} {obstacle(op_traits.base, on_host=False)}"
        elif op_traits.collective and registers_segments():
            reason = f"{op_traits.name} would have NCCL register memory of expandable segments"
        elif op_traits.draws and _on_cpu(tensors, kwargs):
            reason = f"{op_traits.name} draws on the CPU"
        else:
            generator = kwargs.get("generator")
            if generator is not None and generator_id(generator) not in self._registered:
                reason = f"{op_traits.name} draws from a generator that nobody is known to own"
        if reason is not None:
            raise RefusedError(f"{reason}{_at()}")


@contextlib.contextmanager
def _as_if_eager() -> Iterator[None]:
    """The answer to a body that asks whether it is captured is that of the watched run. Libraries choose other
    operators for a capture, which give other bits."""
    asked, thread = torch.cuda.is_current_stream_capturing, threading.get_ident()

    def answer() -> bool:
        return threading.get_ident() != thread and asked()

    with replaced(torch.cuda, {"is_current_stream_capturing": answer}):
        yield


def _unreadable(op_traits: OperatorTraits, tensors: list[torch.Tensor]) -> str | None:
    empty = False
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested:
            return "a tensor that is not strided"
        empty = empty or bool(not op_traits.view and not nbytes_of(tensor.untyped_storage()) and tensor.numel())
    return "memory that was given up" if empty else None


def _ends_graphs(tensor: torch.Tensor) -> bool:
    """Whether it is a leaf at which some graph may end: something in C++ holds it."""
    if not tensor.requires_grad or tensor.is_inference():
        return False
    return use_count(tensor) > 1 and is_leaf(tensor)


def _on_cpu(tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
    return device.type == "cpu"


def _at() -> str:
    where = source_location.user_location()
    return f" ({where})" if where is not None else ""
