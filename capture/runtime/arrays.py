"""Arrays: NumPy arrays among the arguments of which a body only makes tensors, as what acts on observations does.

An array is part of the key by its content, as Python code may read any of it. An environment gives another one in each
call. Where tensors are all that comes of arrays, they are inputs (``key.array_inputs``): that is found out when a
second content comes, and again before an entry is recorded, in runs that are undone. The body gets arrays that note who
reads them (``noted_arrays``), once with the content of the call and once with another one; operators, results and what
it leaves have to be the same as in a plain run. The body may branch on truths that it reads on the device, as the
checks of a distribution do: what it does with arrays is shown for each of these branches before that is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from attrs import evolve

from capture.core.facts import Facts
from capture.core.interrupts import guarded, let_through
from capture.key import array_inputs, pytree
from capture.key.input_places import with_places
from capture.key.signature import Binder, Leaves, key_of
from capture.observe.described import DescribedRun
from capture.observe.run import ObservedRun
from capture.runtime import planning
from capture.runtime.captured import Captured
from capture.runtime.decisions import TRUTHS, calls_out, compared, read_and_compared
from capture.runtime.entry import MOST_BRANCHES, Entry
from capture.runtime.formulas import read_by_number
from capture.runtime.noted_arrays import Noting, as_indices, holds_noted, noted, reads_unnoticed
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
    if not values[-1] or _proven(captured, call, bound.binder, is_first=True) is None:
        return False
    captured.take_arrays()
    captured.log.add("drop", "arrays are inputs from now on")
    captured.retire()
    captured.budget.start_anew()
    return True


def hold(captured: Captured, entry: Entry, bound: Call) -> bool:
    """Before the first recording of an entry: nothing but tensors comes of arrays. False where more does, and they are
    part of the key again."""
    if not _has_arrays(captured, bound) or entry.array_reads:
        return True
    if not _holds_here(captured, entry, bound):
        captured.give_arrays_back()
        captured.log.add("drop", "arrays are part of the key again")
        captured.retire()
    return bool(entry.array_reads)


def hold_after(captured: Captured, entry: Entry, bound: Call, reads: tuple[str, ...]) -> bool:
    """The same before a recording of what the body does after these values that the host reads. False where more comes
    of arrays there."""
    if not _has_arrays(captured, bound) or reads in entry.array_branches:
        return True
    entry.array_proofs += 1
    if entry.array_proofs > MOST_BRANCHES or not _holds_here(captured, entry, bound):
        return False
    entry.array_branches.add(reads)
    return True


def covers(captured: Captured, entry: Entry, call: Call, facts: Facts) -> bool:
    """Whether it was shown what a run does with arrays that read this on the host."""
    return not _has_arrays(captured, call) or read_and_compared(facts) in entry.array_reads


def _has_arrays(captured: Captured, bound: Call) -> bool:
    if captured.plain_binder is None:
        return False
    return bool(bound.values[array_inputs.marked(captured.binder.names)])


def _holds_here(captured: Captured, entry: Entry, bound: Call) -> bool:
    if entry.facts is None or calls_out(entry.facts) or captured.plain_binder is None:
        return False
    facts = _proven(captured, bound, captured.plain_binder)
    if facts is not None:
        entry.array_reads.add(read_and_compared(facts))
    return facts is not None


def _is_like(other: Entry, entry: Entry) -> bool:
    """It was watched, tensors were made of arrays there, and its runs can be undone."""
    facts = other.facts
    made = facts is not None and any(one.kind == "array" for one in facts.host_work)
    return made and facts is not None and not calls_out(facts) and other.region is None and _left_nothing(facts)


def _left_nothing(facts: Facts) -> bool:
    return not any(one.kind == "call" for one in facts.effects)


def _proven(captured: Captured, call: Call, binder: Binder, *, is_first: bool = False) -> Facts | None:
    """What a run of this call does, if only tensors come of its arrays. ``binder``: of calls with arrays. ``is_first``:
    whether to try arrays as inputs, which a recording asks for again: numbers that the host reads are left open, as
    what comes of them is found out in between (``formulas``)."""
    if others_may_run():  # who would see another content
        return None
    run = BodyRun()
    try:
        return cast("Facts | None", body_run.during(run, _proof, (captured, call, binder, is_first)))
    except Exception as error:
        let_through(error)
        if run.error is not error:
            raise
        return None


def _proof(captured: Captured, call: Call, binder: Binder, is_first: bool) -> Facts | None:
    tell = _compared_but_numbers if is_first else compared
    own = _seen(captured, call, binder, other=False, is_first=is_first)
    if own is None:
        return None
    other = _seen(captured, call, binder, other=True, is_first=is_first)
    plain = planning.watch_undone(captured, call, counts=False)[1].facts
    return own if other is not None and tell(own) == tell(other) == tell(plain) else None


def _compared_but_numbers(facts: Facts) -> tuple[Any, ...]:
    """As ``compared``, without numbers that the host reads and what it makes of them."""
    numbers = read_by_number(facts, ())
    if not numbers:
        return compared(facts)
    reads = ["" if at in numbers else text for at, text in enumerate(facts.reads)]
    outputs = [(one.path, one.kind, one.tensor) for one in facts.outputs]
    return facts.sequence, facts.scalars, reads, outputs, [one.path for one in facts.effects], facts.num_ops


def _seen(captured: Captured, call: Call, binder: Binder, *, other: bool, is_first: bool) -> Facts | None:
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
        with as_indices():
            found = planning.watch_undone(captured, noted_call, counts=False)
        put_back()
        return found

    watched: ObservedRun
    described: DescribedRun
    watched, described = guarded(run, (), put_back)
    facts = described.facts
    if noting.is_read or facts.gradients or calls_out(facts) or facts.host_work or reads_unnoticed(watched.ran):
        return None
    numbers = read_by_number(facts, ()) if is_first else ()
    told = [text for at, text in enumerate(read_and_compared(facts)) if at not in numbers]
    if len(facts.reads) != len(facts.breaks) or not TRUTHS.issuperset(told):
        return None  # after other values the body may do more
    left = [leaf.value for effect in described.effects for leaf in effect.leaves]
    left += [leaf for _, leaf in pytree.result_leaves(watched.result)]
    left += [one.after for one in watched.changed]
    kinds = any(one.kind in ("python", "container", "call") for one in facts.effects)
    return None if kinds or any(map(holds_noted, left)) else facts


def _unlike(content: Any) -> Any:
    """Another content of the same kind: an index stays one."""
    rolled = content.flatten().roll(1).reshape(content.shape)
    return rolled * 1.25 + 0.5 if content.is_floating_point() else rolled
