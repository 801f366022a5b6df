"""One run of a body under an ``ObserveMode`` -> what it returned and left behind, and how that is undone.

Before the run the reachable Python state is noted, afterwards compared.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from attrs import evolve, field

from capture.core import forks
from capture.core.data import define
from capture.core.facts import Effect, HostWork
from capture.core.interrupts import guarded, is_interrupt
from capture.key import array_inputs
from capture.key.modes import inlined
from capture.key.pytree import PLAIN_TYPES
from capture.observe import host_draws, islands, shared_casts, source_location, written_lines
from capture.observe.aoti_packages import packages
from capture.observe.dispatch_mode import ObserveMode
from capture.observe.forms import Form, forms_of
from capture.observe.probes.array_indices import array_indices
from capture.observe.probes.device_constants import constants_on_host
from capture.observe.probes.host_reads import (
    autocast_switches,
    gradient_reads,
    graph_uses,
    host_reads,
    own_autocast_cache,
)
from capture.observe.probes.metadata_reads import stand_ins, unkeyed_reads
from capture.observe.probes.printing import printing, telling
from capture.observe.run_notes import SEEDING
from capture.observe.trace import RunTrace
from capture.state import body_run, diff, effects, moving_names, snapshot
from capture.state.call import Call
from capture.state.code_run import CodeRun, code_run
from capture.state.optimizers import is_stand_in
from capture.state.snapshot import Change, Snapshot, content_of
from capture.state.source import Found, Source
from capture.torch_private import operator_watch, version_counters
from capture.torch_private.capabilities import generator_id
from capture.torch_private.distributed import buckets_to_arrange, handles_watched
from capture.torch_private.dynamo import graphs_compiled, originals_while_compiling
from capture.torch_private.generators import default_generators, host_random_state, restore_host_random
from capture.torch_private.subclass_constructors import subclass_constructors
from capture.torch_private.subclasses import unseen
from capture.torch_private.surroundings import Surroundings
from capture.torch_private.threads import is_autograds_own, others_may_run

_LIBRARY = __name__.partition(".")[0]


@define(eq=False)
class ObservedRun:
    """One watched run. Exactly one of ``result`` and ``error`` counts."""

    call: Call
    watch: ObserveMode
    before: Snapshot
    arguments: list[tuple[str, Any]]
    """The leaves that the body was given, with their paths."""
    result: Any = None
    error: BaseException | None = None
    changed: list[Change] = field(factory=list)
    is_compared: bool = False
    """Whether ``changed`` has all that differs from before the run."""
    versions: list[tuple[torch.Tensor, int]] = field(factory=list)
    gradients_read: list[torch.Tensor] = field(factory=list)
    ran: CodeRun = field(factory=CodeRun)
    """Python code that the body ran."""
    states: list[tuple[torch.Generator, torch.Tensor]] = field(factory=list)
    """Generators as they were before, where they may have to be put back."""
    positions: list[host_draws.Place] = field(factory=list)
    """The positions of other generators, and of iterators, before the run."""
    host_random: Any = None
    """The state, before the run, of the generators of Python and NumPy."""
    forms: list[Form] = field(factory=list)
    """What was behind the tensors that it can reach, before the run."""
    values: tuple[Any, ...] = ()
    has_begun: bool = False
    is_settled: bool = False
    """Whether what it did before it raised is as eager would have left it."""
    is_over: bool = False
    """Whether the body has returned."""
    left: list[Effect] = field(factory=list)
    """What functions in C left behind, such as text in a file."""
    once: str = ""
    """What this run did that later runs do not, in words; empty: nothing. Such a run is watched once more."""
    collections: int = field(factory=lambda: collections_of_old())
    """Collections of the oldest generation before the run. If there was none since, the objects that the run made are
    not among the old ones."""
    by_islands: list[Change] = field(factory=list)
    """What islands changed in Python state, with the values that they left."""

    shares_casts: bool = False
    """Whether other calls in the block of autocast around it cast weights that it casts, too."""

    def keep_casts(self) -> None:
        """Keep what autocast has cast, once the body is over."""
        self.shares_casts = shared_casts.keep(self.result)

    def gradient_uses(self) -> tuple[list[torch.Tensor], list[Change], Snapshot, set[int]]:
        """What tells which gradients the body depends on: tensors whose ``grad`` it read, changes, the state before,
        and ``id`` of the tensors that stood for arguments."""
        static = {id(leaf) for path, leaf in self.call.paths() if self.call.is_static(path)}
        return self.gradients_read, self.changed, self.before, {id(leaf) for _, leaf in self.arguments} - static

    def uncounted_writes(self) -> set[int]:
        """``id`` of storages from outside that operators wrote without autograd's noticing, as through ``tensor.data``:
        no version counter of a tensor there moved, and none may in a replay."""
        written = {key for key, external in self.watch.trace.externals.items() if external.mutation is not None}
        return (written & self._known()) - self._counted() if written else written

    def uncounted_arguments(self) -> set[int]:
        """Positions of the arguments on whose memory no counter moved: a copy back must not move any. What stands for
        an argument may lie in the engine's own memory, so that no write to it is one from outside."""
        counted = self._counted()
        leaves = [(at, leaf) for at, (_, leaf) in enumerate(self.arguments) if issubclass(type(leaf), torch.Tensor)]
        strided = [(at, leaf) for at, leaf in leaves if leaf.layout is torch.strided and not leaf.is_nested]
        known = self._known() if any(leaf.is_inference() for _, leaf in strided) else None
        return {
            at for at, leaf in strided
            if (storage := id(leaf.untyped_storage())) not in counted and (known is None or storage in known)
        }  # fmt: skip

    def _known(self) -> set[int]:
        """``id`` of the storages of all tensors that have counters."""
        return {id(each.untyped_storage()) for each, _ in self.versions if _has_storage(each)}

    def _counted(self) -> set[int]:
        """Those of tensors whose counters moved."""
        moved = [tensor for tensor, was in self.versions if tensor._version != was]
        return {id(tensor.untyped_storage()) for tensor in moved if _has_storage(tensor)}

    def had(self, value: Any) -> bool:
        """Whether an argument, or Python state from before the run, is this very object."""
        return any(one is value for _, one in self.before.sources.values())

    def rebuilt(self) -> list[Found]:
        """Places where the body put an equal container, or value, with the one before."""
        known = self.before.sources
        return [known[path] for path in self.before.rebuilt if path in known]

    def forget(self) -> None:
        """Drop what a run made that was undone; frames of an error would keep it alive."""
        if self.call.watched is self:
            self.call.forget_run()  # the watch has what the body was given: buffers, too
        if (run := body_run.current()) is not None and run.watched is self:
            run.take_back()
        self.result = self.error = None
        self.values, self.arguments, self.changed, self.gradients_read = (), [], [], []
        self.ran = CodeRun()
        self.positions, self.forms = [], []
        self.watch.trace = RunTrace()


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


_active: list[ObserveMode] = []


def run_island(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that is an island of the body under way in this thread, if one is watched."""
    watch = _active[-1] if _active else None
    if watch is None or watch.thread != threading.get_ident():
        return islands.call(function, args, kwargs)
    return watch.island(function, args, kwargs)


def active_watch() -> ObserveMode | None:
    """The watch over what this thread runs now, for a captured function called inside another's body. A thread of
    autograd's runs what the backward pass of a body calls."""
    if not _active:
        return None
    watch = _active[-1]
    return watch if watch.thread == threading.get_ident() or is_autograds_own() else None


@forks.before_fork
def _note_fork() -> None:
    """Note that the body forks the process, which no replay would do."""
    for watch in _active:
        if watch.thread == threading.get_ident():
            watch.note_unsafe("os.fork")


@forks.in_child
def _look_away() -> None:
    """In the child of a fork, note nothing more of the body."""
    for watch in _active:
        watch.look_away()
    _active.clear()


def run_watched(call: Call, watch: ObserveMode, values: tuple[Any, ...] | None = None) -> ObservedRun:
    """Run the body under ``watch`` and compare the reachable Python state before and after.

    An exception of the body is kept in ``error`` with its traceback.
    """
    around = Surroundings()

    def mend(errors: list[BaseException]) -> None:
        if watch in _active:
            _active.remove(watch)
        around.put_back(errors[0])

    # the hooks of optimizers are there before the state is noted, and until it is compared
    with call.optimizers.steps_noted(watch.trace), moving_names.noted():
        run: ObservedRun = inlined(guarded, _run_watched, (call, watch, values, around), mend)
    return run


def _run_watched(
    call: Call, watch: ObserveMode, values: tuple[Any, ...] | None, surroundings: Surroundings
) -> ObservedRun:
    values = call.values if values is None else values
    arguments = call.paths(values)
    theirs = {} if values is call.values else stand_ins(arguments, call.paths())
    before = watch.before = snapshot.snapshot(call.roots(values), {place.key() for place in call.binder.places})
    watch.generators.update({generator_id(one): at for at, one in arguments if issubclass(type(one), torch.Generator)})
    watch.generators.update({key: source.path for key, source in before.generators.items()})
    watched = call.watched = ObservedRun(call, watch, before, arguments, values=values, host_random=host_random_state())
    if (run := body_run.current()) is not None:
        run.watched = watched
    watched.versions, watched.forms = _versions(arguments, before), forms_of(before, arguments)
    watch.begin(arguments)
    _give_arrays(watch, call, values)
    watched.states = _generator_states(watched) if watch.keep_undo else watched.states
    watched.positions = host_draws.positions(before)
    arranged, graphs, compilations = buckets_to_arrange(before.modules), graphs_compiled(), list[None]()
    _active.append(watch)
    try:
        quietly, dropped = watch.quietly, watch.dropping(watched.versions, watched.forms)
        note_sync, exported, form = quietly(watch.note_sync), quietly(watch.note_export), quietly(watch.note_form)
        with (
            originals_while_compiling(compilations),
            own_autocast_cache(quietly(watched.keep_casts)),
            host_reads(note_sync, watch.read_on_host, exported, quietly(watch.note_resized)),
            _around(call, watch),
            call.optimizers.steps_apart(run_island),
            unkeyed_reads(quietly(watch.note_unkeyed), form, arguments, theirs),
            graph_uses(quietly(watch.note_hook), quietly(watch.note_checkpoint)),
            watch.device_syncs(),
            handles_watched(quietly(watch.note_unsafe), before.modules),
            constants_on_host(),
            autocast_switches(watch.autocast),
            gradient_reads(dropped, _tensors_before(watched)) as watched.gradients_read,
            packages(watch, call.annotation, keep_undo=watch.keep_undo),
            watch,
            _formulas_of(call),  # before code is noted: its own would count as the body's
        ):
            watch.at_islands = _AtIslands(watched)
            noting = code_run(source_location.user_location, *call.unreached.watch()) if watch.notes_code else None
            watched.has_begun = True
            with noting or contextlib.nullcontext(watched.ran) as watched.ran:
                watched.result = call.run(values)
            watched.is_over = True
            surroundings.note_grad_mode()
        surroundings.note_autocast_cache()  # with the caller's again
    except BaseException as error:  # noqa: BLE001 - handed on by the runtime, KeyboardInterrupt too
        watched.error = error
        if watched.has_begun and not _came_through_us(error):
            surroundings.note_grad_mode()
    finally:
        _is_no_more_active(watch)
        surroundings.put_back(watched.error)
        watch.forget_operator()
    watch.quietly(_compare)(watched)
    compiled = compilations or graphs_compiled() > graphs
    forked = "the process is a child that was forked in it" if watch.looks_away else ""
    watched.once = arranged() or ("it was compiled" if compiled else forked)
    return watched


@contextlib.contextmanager
def _around(call: Call, watch: ObserveMode) -> Iterator[None]:
    """What goes around a body that may write lines of text and index by arrays, and whose operators are seen."""
    # code that is noted tells where compiled code begins
    watch.by_mode = call.by_mode or (graphs_compiled() > 0 and not watch.notes_code)
    tells = telling(watch.thread, watch.end_before_trace) if call.is_tried else contextlib.nullcontext()
    indices = array_indices() if watch.arrays_given else contextlib.nullcontext()
    with printing(watch.thread, run_island), tells, operator_watch.helped(), subclass_constructors(), indices:
        yield


def _formulas_of(call: Call) -> contextlib.AbstractContextManager[Any]:
    """What goes around a body whose numbers are noted."""
    around: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext() if call.formulas is None else call.formulas.around()
    )
    return around


def _is_no_more_active(watch: ObserveMode) -> None:
    watch.at_islands = None
    if watch in _active:
        _active.remove(watch)


def _came_through_us(error: BaseException) -> bool:
    """Whether an interrupt met the body in code of this library, which may have left a block of its own open."""
    if not is_interrupt(error):
        return False
    names, at = [], error.__traceback__
    while at is not None:
        names.append(str(at.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == _LIBRARY)
        at = at.tb_next
    return True in itertools.dropwhile(bool, names)


_MOVES_TO_OLD = 0 if sys.version_info >= (3, 14) else 1  # the first generation whose collection does


def collections_of_old() -> int:
    """How many collections moved objects to the oldest generation so far."""
    return sum(generation["collections"] for generation in gc.get_stats()[_MOVES_TO_OLD:])


@define(eq=False)
class _AtIslands:
    """Find out what the body changed in Python before an island, and what the island changed."""

    watched: ObservedRun
    known: list[Change] = field(factory=list)

    def begin(self, reach: Collection[int] | None) -> tuple[str | None, tuple[islands.Place, ...]]:
        """What the body has changed so far: the path of what the island of a replay would see as it was, and places
        that a replay can give what they hold. ``reach``: all that the island sees, as in ``optimizers.reach_of_step``.
        """
        watched = self.watched
        drawn = host_draws.drawn(watched.positions, watched.host_random, None, watched.before)
        self.known = diff.changes(watched.before)
        own = [
            change for change in self.known if not (is_stand_in(change.after) or _is_left(change, watched.by_islands))
        ]
        own = [change for change in own if reach is None or _is_seen(change, reach)]
        places = [islands.place_of(change) for change in own]
        without_place = [change.source.path for change, place in zip(own, places, strict=True) if place is None]
        return next(iter([*without_place, *[op for op, _ in drawn]]), None), tuple(
            place for place in places if place is not None
        )

    def end(self) -> list[islands.StateChange]:
        """The island is over: what differs from before it is its own business."""
        watched = self.watched
        now = [change for change in diff.changes(watched.before) if not _is_left(change, self.known)]
        watched.by_islands += [_as_left(one) for one in now]
        watched.host_random = host_random_state()
        watched.positions = host_draws.positions(watched.before)
        return [islands.StateChange(one.source, one.before, one.after) for one in now if not one.container]


def _is_seen(change: Change, reach: Collection[int]) -> bool:
    holder = change.source.get() if change.container else change.source.holder
    return id(holder) in reach


def _as_left(change: Change) -> Change:
    """The change with a copy of the members that a container has now, as it may get others."""
    if not change.container:
        return change
    return evolve(change, after=_content(change.source))


def _content(source: Source) -> Any:
    value = source.get()
    content = content_of(value)
    return tuple(value) if content is None and hasattr(value, "__iter__") else content


def _is_left(change: Change, left: list[Change]) -> bool:
    """Whether the place still holds what one of these islands left there."""
    key = snapshot.place_key(change.source)
    for earlier in left:
        if snapshot.place_key(earlier.source) != key or earlier.container != change.container:
            continue
        now = _content(change.source) if change.container and isinstance(earlier.after, tuple) else change.after
        if now is earlier.after or (type(now) is type(earlier.after) and _same(now, earlier.after)):
            return True
    return False


_WAKES = {threading.Condition.notify.__code__, threading.Condition.wait.__code__}
"""What events, semaphores, barriers and queues of Python wake others with, and wait by."""
_WAKERS = (
    "set", "notify", "notify_all", "put", "put_nowait", "get", "get_nowait", "release", "acquire", "task_done", "wait",
    "wait_for", "join", "submit",
)  # fmt: skip


def _note_other_threads(watched: ObservedRun, ran: CodeRun | None) -> None:
    """A replay wakes nobody, and waits for nobody: a thread that waits for the body would wait for ever."""
    if ran is not None and not _WAKES.isdisjoint(ran.codes) and others_may_run():
        op, where = "waking or waiting for another thread", host_draws.line_of(ran, _WAKERS)
        watched.watch.trace.work.append(HostWork(op=op, kind="unsafe", where=where))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return type(one) in PLAIN_TYPES and bool(one == other)


def changes_of_body(watched: ObservedRun) -> list[Change]:
    """What differs in Python state from before the run, except for what islands left."""
    return [change for change in diff.changes(watched.before) if not _is_left(change, watched.by_islands)]


def _compare(watched: ObservedRun) -> None:
    """Compare the state before and after the run."""
    if watched.error is None and not watched.watch.looks_away:  # a forked child cannot ask generators of a device
        watched.watch.end()
    ran = watched.ran if watched.watch.notes_code else None
    code = ran if ran is not None else watched.call.code
    changed = changes_of_body(watched)
    places = {snapshot.place_key(by_island.source) for by_island in watched.by_islands}
    watched.watch.note_shared_state(
        [change.source.path for change in changed if snapshot.place_key(change.source) in places]
    )
    watched.changed, watched.is_compared = effects.classified(watched.before, changed, code, watched.call.amounts), True
    if ran is not None:
        watched.left = written_lines.left_by_calls(ran)
    _note_other_forms(watched, ran)
    for op, where in host_draws.drawn(watched.positions, watched.host_random, ran, watched.before):
        watched.watch.trace.work.append(HostWork(op=op, kind="unsafe", where=where))
    _note_other_threads(watched, ran)
    for name in watched.watch.modes_left():
        where = host_draws.line_of(ran, _MODE_SETTERS)
        watched.watch.trace.work.append(HostWork(op=f"leaving another {name}", kind="unsafe", where=where))
    work = watched.watch.trace.work
    for at, item in enumerate(work):
        if item.op == SEEDING:  # seen at the next draw, or at the end
            work[at] = evolve(item, where=host_draws.line_of(ran, _SEEDERS) or item.where)
    _note_gradients_of_arguments(watched)


_SEEDERS = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "set_state")
_MODE_SETTERS = (
    "set_default_dtype", "set_default_device", "set_default_tensor_type", "use_deterministic_algorithms",
    "set_deterministic_debug_mode", "set_float32_matmul_precision", "set_num_threads", "set_grad_enabled",
)  # fmt: skip


@unseen
def _note_other_forms(watched: ObservedRun, ran: CodeRun | None) -> None:
    """Note tensors that are still there, on other memory or in another form: ``.data =`` and the like are no operators.
    Operators that change forms are noted as such."""
    by_operators = {id(tensor) for tensor, *_ in watched.watch.trace.reshaped}
    for form in watched.forms:
        if form.is_another() and (id(form.tensor) not in by_operators or form.lies_elsewhere()):
            where = host_draws.line_of(ran, (form.name, "data", "set_", "swap_tensors"))
            op = f"giving {form.path!r} other {'memory' if form.lies_elsewhere() else 'sizes or strides'}"
            watched.watch.trace.work.append(HostWork(op=op, kind="unsafe", where=where))


@unseen
def _note_gradients_of_arguments(watched: ObservedRun) -> None:
    """Note gradients of arguments that the body read: another call's tensor may have one or not. The key has that for
    state, and for what is static, only."""
    own = {id(change.source.holder) for change in watched.changed if change.source.name == "grad"}
    owners = [owner for owners_of_storage in watched.before.tensors.values() for owner in owners_of_storage]
    own |= {id(tensor) for source, tensor in owners if source.kind != "root"}
    own |= {id(leaf) for path, leaf in watched.arguments if watched.call.is_static(path)}
    given = {id(leaf) for _, leaf in watched.arguments} - own
    for tensor in watched.gradients_read:
        if id(tensor) in given and not tensor.requires_grad:
            watched.watch.note_unkeyed("grad", tensor)


def _generator_states(watched: ObservedRun) -> list[tuple[torch.Generator, torch.Tensor]]:
    generators = [*default_generators(), *(source.get() for source in watched.before.generators.values())]
    generators += [leaf for _, leaf in watched.arguments if issubclass(type(leaf), torch.Generator)]
    return [(generator, generator.get_state()) for generator in generators]


def _tensors_before(watched: ObservedRun) -> set[int]:
    """``id`` of tensors that were there before the body ran, as arguments, in Python state and in optimizers."""
    found = {id(leaf) for _, leaf in watched.arguments}
    found |= {id(tensor) for owners in watched.before.tensors.values() for _, tensor in owners}
    return found | watched.call.optimizers.parameter_ids()


@unseen
def _give_arrays(watch: ObserveMode, call: Call, values: tuple[Any, ...]) -> None:
    watch.arrays_given, watch.formulas = array_inputs.given(call.binder, values), call.formulas
    watch.array_arguments, watch.is_tried = array_inputs.reaches(values), call.is_tried


@unseen
def _versions(arguments: list[tuple[str, Any]], before: Snapshot) -> list[tuple[torch.Tensor, int]]:
    seen, versions = set[int](), list[tuple[torch.Tensor, int]]()
    owned = [tensor for owners in before.tensors.values() for _, tensor in owners]
    for tensor in [*[leaf for _, leaf in arguments if issubclass(type(leaf), torch.Tensor)], *owned]:
        number = id(tensor)
        if number not in seen and not tensor.is_inference():
            seen.add(number)
            versions.append((tensor, tensor._version))
    return versions


def empty_scratch(watched: ObservedRun) -> None:
    """Empty the storages again that were empty before the run, where it ended before its time."""
    for storage in watched.watch.trace.scratch.values():
        if storage.nbytes():
            storage.resize_(0)


def undo_python(watched: ObservedRun) -> None:
    """Put back what the body's Python did in a run that only captured. A watched one has its numbers to itself: another
    run that draws the same would look as if it drew none. What other threads drew from the host's stays drawn. Islands
    ran for real: what they left in containers stays, and in other places until they are answered."""
    if watched.call.undo is not None:
        watched.call.undo.put_back()
        watched.call.undo = None
    empty_scratch(watched)
    changed = watched.changed if watched.is_compared else changes_of_body(watched)  # it was stopped before that
    by_islands = [change for change in watched.by_islands if not change.container]
    diff.restore(watched.before, [*changed, *by_islands])
    watched.call.optimizers.leave_no_hooks()
    version_counters.set_back(watched.versions)  # the capture wrote nothing
    _undo_host_draws(watched)


def undo(watched: ObservedRun) -> None:
    """Put back what a run under ``ObserveMode(undo=True)`` changed: tensors, Python state, generators."""
    with torch.no_grad():
        for tensor, storage, offset, shape, stride in reversed(watched.watch.trace.reshaped):
            # autograd forgets a leaf's node at each ``set_``, and with it hooks that somebody keeps on it
            there = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            if there[0] is not storage or there[1:] != (offset, shape, stride):
                tensor.set_(storage, offset, shape, stride)
        for storage, contents in reversed(watched.watch.trace.undo):
            if storage.nbytes() != contents.nbytes():  # an out= of another shape
                storage.resize_(contents.nbytes())
            storage.copy_(contents, False)
    version_counters.set_back(watched.versions)
    _put_forms_back(watched)
    empty_scratch(watched)
    with_islands = watched.by_islands and all(island.is_undoable for island in watched.watch.trace.islands)
    is_compared = watched.changed or not watched.by_islands
    diff.restore(watched.before, diff.changes(watched.before) if with_islands or not is_compared else watched.changed)
    watched.call.optimizers.leave_no_hooks()
    for generator, state in watched.states:
        if not watched.watch.is_drawn_by_others(generator):
            generator.set_state(state)
    _undo_host_draws(watched)


@unseen
def _put_forms_back(watched: ObservedRun) -> None:
    for form in watched.forms:
        if form.is_another():
            form.put_back()


def _undo_host_draws(watched: ObservedRun) -> None:
    if host_draws.may_draw(watched.ran if watched.watch.notes_code else None, watched.before):
        restore_host_random(watched.host_random)


def undo_stopped(call: Call, errors: Sequence[BaseException] = ()) -> None:
    """Whatever ended it, put back what the run of this call changed so far that was to be undone. May be called
    again, as ``guarded`` does."""
    del errors
    watched = call.watched
    if watched is not None:
        if watched.has_begun:
            changed = diff.changes(watched.before)
            watched.changed = effects.classified(watched.before, changed, watched.ran, call.amounts)
            undo(watched)
        call.forget_run()
