"""Processes that run one body together agree on whether to record it.

They agree when a plan or a recording is made, never in other calls. A rank that begins a watched or a recording run
says so in the store of the default process group, and afterwards what came of it. Who came through a collective for
which all have to be there knows therefore who takes part in this exchange, and waits for those alone: a rank that has a
recording already, or another key, keeps nobody waiting. All waiting ends after ``PATIENCE`` seconds. Nothing depends on
agreement but speed, as recorded and eager calls issue the same collectives in the same order.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Collection, Iterator
from typing import Any, Protocol

import torch
from attrs import evolve, field

from capture.core.data import define, frozen
from capture.core.facts import Dissent, Facts
from capture.core.findings import Severity
from capture.core.interrupts import let_through, suppress
from capture.core.options import Annotation
from capture.core.plan import CapturePlan
from capture.distributed import process_groups
from capture.engines.base import Recorded
from capture.plan_cache import store as _store
from capture.rules.compile_plan import compile_plan
from capture.torch_private.distributed import collectives_so_far, default_store, groups_exist, ranks_of

PATIENCE = 10.0  # seconds that a rank waits for another's answer; what lies between two answers is a recording run
_LOOK = 0.002  # seconds between two looks
_PENDING, _RECORD, _EAGER = "pending", "record", "eager "


class RankedFunction(Protocol):
    """The attributes of a captured function that are used here."""

    annotation: Annotation
    is_backward: bool


class RankedEntry(Protocol):
    """The attributes of an entry (one key of the function) that are used here."""

    partners: frozenset[int]

    @property
    def may_differ_again(self) -> bool:
        """Whether another run may become a recording after all."""


@frozen
class _Turn:
    """The last exchange of a captured function."""

    ordinal: int
    """Number of this function among those of the same name, in the order of their first exchange."""
    sent: int = -1
    """Number of collectives of the default group before that exchange; -1: none was noted."""
    number: int = 0
    """Exchanges since the default group sent something."""


_turns: weakref.WeakKeyDictionary[RankedFunction, _Turn] = weakref.WeakKeyDictionary()
_counts: dict[str, int] = {}


@define
class Exchange:
    """One run that this rank tells the others about. Without a process group nobody is told."""

    store: Any = None
    name: str = ""
    """The same in all ranks that make this plan or this recording."""
    rank: int = 0
    partners: frozenset[int] = field(default=frozenset())
    """Ranks that took part in the last exchange of this key."""
    answered: bool = False

    def answer(self, text: str) -> None:
        """Tell what came of the run."""
        self.answered = True
        if self.store is not None:
            with suppress(RuntimeError, OSError):  # a store that is gone is noticed when it is read
                self.store.set(f"{self.name}/{self.rank}", text)

    def fall_out(self, recorded: Recorded) -> None:
        """Tell of a run that is no recording, unless the body raised or another run may become one."""
        if not recorded.executed and not recorded.transient:
            self.answer(f"{_EAGER}{recorded.failure or 'the capture failed'}")

    def others(self, ranks: Collection[int], *, executed: bool) -> dict[int, str]:
        """What the other ranks that take part say, once they do. Raises ``RuntimeError`` where the store is gone."""
        if self.store is None:
            return {}
        asked = {rank: f"{self.name}/{rank}" for rank in ranks if rank != self.rank}
        taking_part = {rank for rank, key in asked.items() if self.store.check([key])}
        if not executed:  # a run that only captured waited for nobody
            taking_part |= self.partners & asked.keys()
        self.partners = frozenset(taking_part)
        answers: dict[int, str] = {}
        until = time.monotonic() + PATIENCE
        while len(answers) < len(taking_part) and time.monotonic() < until:
            for rank in taking_part - answers.keys():
                said = self.store.get(asked[rank]).decode() if self.store.check([asked[rank]]) else _PENDING
                if said != _PENDING:
                    answers[rank] = said
            if len(answers) < len(taking_part):
                time.sleep(_LOOK)
        late = f"{_EAGER}no answer within {PATIENCE:g} seconds"
        return answers | dict.fromkeys(taking_part - answers.keys(), late)


@contextlib.contextmanager
def exchange(captured: RankedFunction, entry: RankedEntry) -> Iterator[Exchange]:
    """Around a run that a plan or a recording is made of."""
    made = _begin(captured, entry)
    try:
        yield made
    finally:
        if not made.answered:  # the body raised, which is its rank's business
            made.answer(_RECORD)
        entry.partners = made.partners


def _begin(captured: RankedFunction, entry: RankedEntry) -> Exchange:
    if not groups_exist() or torch.distributed.get_world_size() < 2:
        return Exchange()
    store = default_store()
    if store is None:
        return Exchange()
    process_groups.watch_group_ends()
    name = f"capture/{process_groups.num_worlds()}/{_store.digest(repr(_occasion(captured)))[:32]}"
    made = Exchange(store, name, torch.distributed.get_rank(), entry.partners)
    made.answer(_PENDING)
    made.answered = False
    return made


def _occasion(captured: RankedFunction) -> tuple[Any, ...]:
    """A name for this call that all ranks in it have. Their keys may differ, as a body may name its rank."""
    function = f"{captured.annotation.function} {'backward' if captured.is_backward else ''}"
    turn = _turns.get(captured)
    if turn is None:
        _counts[function] = _counts.get(function, 0) + 1
        turn = _Turn(_counts[function])
    sent = collectives_so_far()
    _turns[captured] = turn = _Turn(turn.ordinal, sent, turn.number + 1 if turn.sent == sent else 1)
    return function, turn.ordinal, turn.sent, turn.number


def agreed(
    made: Exchange, captured: RankedFunction, entry: RankedEntry, facts: Facts, *, executed: bool = True,
    failure: str | None = None,
) -> Facts:  # fmt: skip
    """The facts of a run after all ranks that take part were heard. ``failure``: why it is no recording although its
    plan says so; ``executed``: the collectives have run, not only been captured."""
    if made.store is None or not facts.collectives:
        return facts
    objection = _against(entry, compile_plan(captured.annotation, facts), failure)
    made.answer(_RECORD if objection is None else f"{_EAGER}{objection}")
    groups = {collective.group for collective in facts.collectives if collective.all_wait and collective.group}
    if objection is not None or not groups:
        return facts
    if executed and any(not device.startswith(("cpu", "meta")) for device in facts.devices):
        torch.accelerator.synchronize()  # a device may be behind, and with it what this rank knows of the others
    try:
        said = made.others({rank for group in groups for rank in ranks_of(group)}, executed=executed)
    except (RuntimeError, OSError) as error:
        let_through(error)
        said = {-1: f"{_EAGER}the store of the process group cannot be reached ({error})"}
    against = [(rank, text.removeprefix(_EAGER)) for rank, text in sorted(said.items()) if text.startswith(_EAGER)]
    if not against:
        return facts
    rank, reason = against[0]
    made.answer(f"{_EAGER}{reason} (rank {rank})")
    return evolve(facts, dissent=Dissent(rank=rank, reason=reason))


def _against(entry: RankedEntry, plan: CapturePlan, failure: str | None) -> str | None:
    """Why this rank runs the key eagerly from now on; None if it does not, or if another run may clear it."""
    if plan.may_settle and entry.may_differ_again:
        return None
    findings = plan.findings_at_least(Severity.EAGER)
    if plan.outcome == "eager":
        return f"{findings[0].code} {findings[0].what}" if findings else "its plan is eager"
    return failure
