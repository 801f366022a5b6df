"""Arrays: NumPy arrays among the arguments of which a body only makes tensors, as what acts on observations does.

An array is part of the key by its content, as Python code may read any of it. An environment gives another one in each
call. Where tensors are all that comes of arrays, they are inputs (``key.array_inputs``): that is found out when a
second content comes, and again before an entry is recorded, in runs that are undone. The body gets arrays that note who
reads them (``noted_arrays``), once with the content of the call and once with another one; operators, results and what
it leaves have to be the same as in a plain run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from capture.core.facts import Facts
from capture.key import array_inputs, pytree
from capture.key.input_places import with_places
from capture.key.signature import Binder, Leaves, key_of
from capture.native import native
from capture.observe.described import DescribedRun
from capture.observe.run import ObservedRun
from capture.runtime import planning
from capture.runtime.captured import Captured
from capture.runtime.decisions import calls_out, compared, may_go_another_way
from capture.runtime.entry import Entry
from capture.runtime.noted_arrays import Noting, holds_noted, noted, reads_unnoticed
from capture.state import body_run
from capture.state.body_run import BodyRun
from capture.state.call import Call
from capture.torch_private.threads import others_may_run

_MOST_ENTRIES = 64


def begins(captured: Captured, entry: Entry, bound: Call) -> bool:
    """Arrays tell this key from that of a run that can be undone, and the body only makes tensors of them: they are
    inputs from now on, and all that was recorded is dropped."""
    if not captured.arrays_left or captured.plain_binder is not None or captured.binder.places:
        return False
    if captured.sizes is not None or captured.is_backward:
        return False
    if captured.annotation.static or not array_inputs.holds_arrays(bound.values):
        return False
    if not any(one is not entry and _is_like(one, entry) for one in captured.entries()[-_MOST_ENTRIES:]):
        return False
    captured.arrays_left -= 1
    values, leaves = array_inputs.with_tensors(bound.values), Leaves()
    for value in values:
        key_of(value, leaves)
    call = captured.call(values, leaves)
    call.binder = array_inputs.with_arrays(bound.binder)
    if not values[-1] or not _proven(captured, call, bound.binder):
        return False
    captured.take_arrays()
    captured.log.add("drop", "arrays are inputs from now on")
    captured.retire()
    captured.budget.start_anew()
    return True


def hold(captured: Captured, entry: Entry, bound: Call) -> bool:
    """Before the first recording of an entry: nothing but tensors comes of arrays. False where more does, and they are
    part of the key again."""
    mark = array_inputs.marked(captured.binder.names)
    if captured.plain_binder is None or entry.reads_no_arrays or not bound.values[mark]:
        return True
    entry.reads_no_arrays = entry.facts is not None and not calls_out(entry.facts)
    entry.reads_no_arrays = entry.reads_no_arrays and _proven(captured, bound, captured.plain_binder)
    if not entry.reads_no_arrays:
        captured.give_arrays_back()
        captured.log.add("drop", "arrays are part of the key again")
        captured.retire()
    return entry.reads_no_arrays


def _is_like(other: Entry, entry: Entry) -> bool:
    """It was watched, tensors were made of arrays there, and its runs can be undone."""
    facts = other.facts
    made = facts is not None and any(one.kind == "array" for one in facts.host_work)
    return made and facts is not None and not calls_out(facts) and other.region is None and _left_nothing(facts)


def _left_nothing(facts: Facts) -> bool:
    return not any(one.kind == "call" for one in facts.effects)


def _proven(captured: Captured, call: Call, binder: Binder) -> bool:
    """``binder``: of calls with arrays."""
    if others_may_run():  # who would see another content
        return False
    run = BodyRun()
    try:
        return bool(body_run.during(run, _proof, (captured, call, binder)))
    except Exception as error:
        if run.error is not error:
            raise
        return False


def _proof(captured: Captured, call: Call, binder: Binder) -> bool:
    own = _seen(captured, call, binder, other=False)
    if own is None:
        return False
    other = _seen(captured, call, binder, other=True)
    plain = planning.watch_undone(captured, call, counts=False)[1].facts
    return other is not None and compared(own) == compared(other) == compared(plain)


def _seen(captured: Captured, call: Call, binder: Binder, *, other: bool) -> Facts | None:
    """The facts of a run with noted arrays; None where something but tensors comes of them. ``other``: they have
    another content meanwhile."""
    noting = Noting()
    mark = array_inputs.marked(call.binder.names)
    paths = call.values[mark]
    tensors = array_inputs.tensors_of(call.values, paths)
    given = {id(one): noted(array_inputs.array_on(one), noting) for one in tensors}
    before = [one.clone() for one in tensors]
    noted_call = evolve(call)
    noted_binder = array_inputs.with_arrays(binder, lambda one: given.get(id(one)))
    noted_call.binder = with_places(noted_binder, call.binder.places)

    def put_back(_: Sequence[BaseException] = ()) -> None:
        for tensor, content in zip(tensors, before, strict=True):
            tensor.copy_(content)

    def run() -> Any:
        for tensor, content in zip(tensors, before, strict=True):
            if other:
                tensor.copy_(_unlike(content))
        found = planning.watch_undone(captured, noted_call, counts=False)
        put_back()
        return found

    watched: ObservedRun
    described: DescribedRun
    watched, described = native.guarded(run, (), put_back)
    facts = described.facts
    if noting.is_read or facts.gradients or calls_out(facts) or facts.host_work or reads_unnoticed(watched.ran):
        return None
    if may_go_another_way(facts):
        return None
    left = [leaf.value for effect in described.effects for leaf in effect.leaves]
    left += [leaf for _, leaf in pytree.result_leaves(watched.result)]
    left += [one.after for one in watched.changed]
    kinds = any(one.kind in ("python", "container", "call") for one in facts.effects)
    return None if kinds or any(map(holds_noted, left)) else facts


def _unlike(content: Any) -> Any:
    """Another content of the same kind: an index stays one."""
    rolled = content.flatten().roll(1).reshape(content.shape)
    return rolled * 1.25 + 0.5 if content.is_floating_point() else rolled
