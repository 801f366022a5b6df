"""A call of a model that AOTInductor compiled, as one operator of a watched body.

No dispatch mode sees everything that a loaded package runs. While a body is watched, the loader's methods are replaced
by ``capture::run_package``, which an engine records like any other operator.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import field

from capture.core.data import define
from capture.core.facts import HostWork, Mutation, PackageRunner
from capture.core.options import Annotation
from capture.key.tensor_meta import bytes_of, same_bits
from capture.observe import source_location
from capture.observe.higher_order import HigherOrderMode
from capture.observe.operator_schema import RUNS_PACKAGE
from capture.observe.probes.device_syncs import unnoticed
from capture.torch_private.aoti import (
    UPDATES,
    EntryPoint,
    Loader,
    RunnerMethods,
    entry_point,
    runner_methods,
    runs_on_device,
)
from capture.torch_private.capabilities import unseen
from capture.torch_private.devices import is_capturing_now
from capture.torch_private.monkeypatch import replaced


@define(eq=False)
class Package:
    """What is known of a loaded package. ``loader``: held weakly, as the user holds it."""

    number: int
    loader: Callable[[], Any]
    on_device: bool
    entry: EntryPoint
    has_run: bool = False
    """It ran eagerly with its present constants: a package's first run folds constants and waits for the device."""
    written: set[int] = field(factory=set)
    """Positions of the inputs that a watched run wrote."""
    users: weakref.WeakValueDictionary[int, Annotation] = field(factory=weakref.WeakValueDictionary)
    """By ``id``: functions whose bodies call it."""


_numbers = itertools.count(1)
Geometry = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""Type, sizes, strides and offset of a view."""

_known: weakref.WeakKeyDictionary[Any, Package] = weakref.WeakKeyDictionary()
_numbered: weakref.WeakValueDictionary[int, Package] = weakref.WeakValueDictionary()
_watched: dict[int, HigherOrderMode] = {}
"""The watch of a body, by the thread that runs it."""
_start_over: list[Callable[[Sequence[Annotation]], None]] = []


def when_updated(start_over: Callable[[Sequence[Annotation]], None]) -> None:
    """Call ``start_over`` with the functions whose recordings hold constants that a package has replaced."""
    _start_over.append(start_over)


@contextlib.contextmanager
def packages(watch: HigherOrderMode, user: Annotation, *, keep_undo: bool) -> Iterator[None]:
    """In the block and in this thread, each call of a package is an operator. ``keep_undo``: first keep the contents of
    what it writes."""
    plain = _plain()
    if plain is None:
        yield
        return
    thread, before = threading.get_ident(), (Loader.run, Loader.boxed_run)

    def run(loader: Any, inputs: Sequence[torch.Tensor], *rest: Any, **named: Any) -> Any:
        if threading.get_ident() != thread or rest or named:  # the caller names a stream
            return before[0](loader, inputs, *rest, **named)
        return _see(watch, user, loader, list(inputs), keep_undo=keep_undo)

    def boxed_run(loader: Any, inputs: list[torch.Tensor], *rest: Any, **named: Any) -> Any:
        if threading.get_ident() != thread or rest or named:
            return before[1](loader, inputs, *rest, **named)
        inputs_of_run = list(inputs)
        inputs.clear()
        return _see(watch, user, loader, inputs_of_run, keep_undo=keep_undo)

    outer = _watched.get(thread)
    try:
        with replaced(Loader, {"run": run, "boxed_run": boxed_run}):
            _watched[thread] = watch
            yield
    finally:
        if outer is None:
            _watched.pop(thread, None)
        else:
            _watched[thread] = outer


@functools.cache
def _plain() -> RunnerMethods | None:
    """The loader's methods, found once, with nothing in their place; the operator that calls them is defined then."""
    found = runner_methods()
    if found is not None:
        _operator()
    return found


@functools.cache
def _operator() -> Any:
    """``capture::run_package(inputs, number of the package) -> outputs``, for all devices, without gradients, as the
    package's own call is. It may draw: whether it did, the generators tell."""
    namespace, _, name = RUNS_PACKAGE.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"{name}(Tensor[] inputs, int package) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl(name, _run, "CompositeExplicitAutograd")
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return library, getattr(getattr(torch.ops, namespace), name).default


def _run(inputs: list[torch.Tensor], package: int) -> list[torch.Tensor]:
    known, plain = _numbered.get(package), _plain()
    loader = known.loader() if known is not None else None
    if loader is None or plain is None:
        raise RuntimeError("the package that a recording runs was deleted")
    return _apart(inputs, plain.boxed_run(loader, list(inputs)))


class _Views(threading.local):
    """How the outputs of this thread's last call lie on what the operator gave: index and geometry, if it is a view."""

    def __init__(self) -> None:
        self.last: list[tuple[int, Geometry | None]] = []


_views = _Views()


def _apart(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Clone memory that outputs share, once and whole: an engine expects the results of one operator to be separate."""
    input_addresses = {input_.untyped_storage().data_ptr() for input_ in inputs}
    at = [output.untyped_storage().data_ptr() for output in outputs]
    parts: list[torch.Tensor] = []
    index: dict[int, int] = {}
    _views.last = []
    for output, source in zip(outputs, at, strict=True):
        shared = source != 0 and source not in input_addresses and at.count(source) > 1
        if not shared or source not in index:
            index[source] = len(parts)
            number = output.untyped_storage().nbytes() // output.element_size()
            parts.append(output.as_strided((number,), (1,), 0) if shared else output)
        geometry = (output.dtype, output.shape, output.stride(), int(output.storage_offset())) if shared else None
        _views.last.append((index[source], geometry))
    return parts


def _together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The package's outputs, those that share memory as views of one tensor, so that a watch sees it."""
    outputs = []
    for index, geometry in _views.last:
        if geometry is None:
            outputs.append(tensors[index])
            continue
        dtype, shape, stride, offset = geometry
        whole = tensors[index] if tensors[index].dtype == dtype else tensors[index].view(dtype)
        outputs.append(whole.as_strided(shape, stride, offset))
    return outputs


def _see(
    watch: HigherOrderMode, user: Annotation, loader: Any, inputs: list[torch.Tensor], *, keep_undo: bool
) -> list[torch.Tensor]:
    package = _of(loader)
    capturing = package.on_device and is_capturing_now()
    package.users[id(user)] = user
    if package.on_device and package.entry != "single-threaded":
        runner = PackageRunner(entry=package.entry, where=source_location.user_location())
        if capturing:
            raise RuntimeError("the package cannot be captured")
        if runner not in watch.trace.runners:
            watch.trace.runners.append(runner)
    if capturing and not package.has_run:
        raise RuntimeError("the package did not run since it got its constants")
    with unseen(), unnoticed():
        before = [] if capturing else [input_.untyped_storage().clone() for input_ in inputs]
    outputs = _together(_operator()[1](inputs, package.number))
    package.has_run = package.has_run or not capturing
    with unseen(), unnoticed():
        changed = [not _same(input_, old) for input_, old in zip(inputs, before, strict=False)]
    package.written.update(position for position, differs in enumerate(changed) if differs)
    _note_writes(watch, package, inputs, before if keep_undo else [])
    return outputs


def _same(tensor: torch.Tensor, before: torch.UntypedStorage) -> bool:
    return same_bits(bytes_of(tensor.untyped_storage()), bytes_of(before))


def _note_writes(
    watch: HigherOrderMode, package: Package, inputs: Sequence[torch.Tensor], before: Sequence[torch.UntypedStorage]
) -> None:
    """What no schema and no version counter tells. A run may write what was there already, so that nothing differs:
    what else the package was given is noted as lent."""
    for position, tensor in enumerate(inputs):
        storage = tensor.untyped_storage()
        external = watch.trace.externals.get(id(storage))
        if external is None:
            continue
        watch.trace.lent.add(id(storage))
        if position not in package.written or external.mutation is not None:
            continue
        external.mutation = Mutation(evidence="version", op=RUNS_PACKAGE, where=source_location.user_location())
        if before:
            watch.trace.undo.append((external.storage, before[position]))


def _of(loader: Any) -> Package:
    package = _known.get(loader)
    if package is None:
        _watch_updates()
        on_device = runs_on_device(loader)
        entry = entry_point(loader) if on_device else "unknown"
        package = Package(next(_numbers), weakref.ref(loader), on_device, entry)
        _known[loader] = _numbered[package.number] = package
    return package


@functools.cache
def _watch_updates() -> None:
    """From now on notice when a package gets other constants: kernels of a recorded graph use the old ones."""
    for name in UPDATES:
        setattr(Loader, name, _updating(getattr(Loader, name), name))


def _updating(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(loader: Any, *args: Any, **kwargs: Any) -> Any:
        package, watch = _known.get(loader), _watched.get(threading.get_ident())
        if watch is not None:
            watch.trace.work.append(HostWork(op=name, kind="unsafe", where=source_location.user_location()))
        try:
            return original(loader, *args, **kwargs)
        finally:
            if package is not None:
                package.has_run = False
                if package.on_device and watch is None:
                    for start_over in _start_over:
                        start_over(tuple(package.users.values()))

    return update
