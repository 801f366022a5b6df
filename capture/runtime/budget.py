"""Budget: what one captured function may spend on being looked at, over all its keys and threads.

Watching a run, recording one and dropping a recording cost many times the body's own time, and pay only if replays
follow. Each is an **effort**. Efforts run up a debt; replays pay it back by the time they save. While the debt is below
``most``, all is allowed. At ``most`` the function gives up: its calls run eagerly, and so cheaply that nobody has to
take the decorator away: most of them go straight to the body (``rest``). From time to time a few calls are looked at
again (``Budget.ran_eagerly``): those whose key has come before are allowed one more effort, the first ``FREE_LOOKS``
times at once, later when the calls in between were worth it. What repeats by then is replayed, and pays.

==================  ===============================================================================================
``AT_ONCE``         efforts for keys that are new, or come again, whatever they take. From then on an effort is made
                    while all of them took no more than ``PART`` of the time of all calls, and what replays saved; one
                    for a key that came ``OFTEN`` times before and was not tried yet is made at once, if it came among
                    the ``IN_TURN`` calls before. A key that was tried and has been the only one since may settle, as
                    where buckets are arranged once: it is tried again after ``OFTEN`` calls, then after twice as many
                    each time, where an effort takes no longer than ``CHEAP`` calls. One is made at once where a
                    recording was dropped whose replays saved ``WORTH`` times what it took to make: what came before,
                    as compiling in a watched run, says nothing of the next one. ``CAPTURE_DROP_SLOW=0`` lets times
                    decide nothing
``most``            2 ``max_recordings`` + ``FRUITLESS`` efforts that led to no replay; half of them, once they took
                    ``PATIENCE``. Once half of it is spent, a key is looked at when it comes again
one effort          a watched run, a recording that was dropped, a key that died with its object before it was replayed,
                    a key that was not looked at yet;
                    a recording is ``RECORDING``, as a chain needs one at each place
a replay            pays half the time of an eager call
an eager call       pays ``SHARE`` of its time, at least ``LEAST``, after a function gave up: looking costs no more
``FIRST_REST``      calls that are not looked at, after ``CALM`` that were; twice as many each time, to ``LONGEST``
``AT_LIMIT``        what a call counts for that which may displace a recording
``LOOKED_AT``       calls that were looked at, in a row, and ran eagerly, while others may have taken fast paths. After
                    each further one so many calls are not looked at that the look took no more than ``FREE`` of their
                    time, or ``FREE_MS`` each; at most ``MOST_PASSED``. Fast paths go on taking calls
==================  ===============================================================================================

Not under a lock: what two threads count at once may be counted once.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import Any

from attrs import field

from capture.core import config
from capture.core.data import define, frozen
from capture.core.events import Counters

AT_ONCE = 2.0, 4.0
PART = 0.25
OFTEN = 3
IN_TURN, NEAR = 10, 4
CHEAP = 16
WORTH = 2
FRUITLESS = 8
RECORDING = 0.25
PATIENCE = 10_000.0  # milliseconds
SHARE = 0.025
LEAST = 0.0025  # milliseconds
CALM = 8
AGAIN = 2  # calls that are looked at after each rest
FIRST_REST, LONGEST = 16, 1024
AT_LIMIT = 0.125
LOOKED_AT = 40
FREE, FREE_MS = 0.05, 0.005
MOST_PASSED = 64
FREE_LOOKS = 3
LOOK = 2.5  # efforts that a look may take: a region is watched twice and recorded twice
_SEEN = 64  # keys that are recognized
_KEYS = 16  # keys that are compared to say what changes
_OPERATOR = 0.003  # milliseconds that an operator takes, where no plain run was measured
_WATCHED = 50  # times that a watched run of a small body takes longer than a plain one
_SAVED = 0.5  # share of an eager call that a replay saves


@define(eq=False)
class Spent:
    """Efforts since the last replay, by kind, and the milliseconds they took."""

    observations: int = 0
    recordings: int = 0
    drops: int = 0
    ms: float = 0.0


@frozen
class Account:
    """Totals of one budget, without what it inherited."""

    calls: int
    replays: int
    efforts: float
    ms: float
    paid: float
    """Efforts that replays were worth."""


@define(eq=False)
class Budget:
    """Debt, efforts and payments of one captured function."""

    counters: Counters
    most: float
    may_rest: bool = True
    debt: float = 0.0
    spent: Spent = field(factory=Spent)
    gave_up: bool = False
    """The function gave up: no effort is allowed except after a rest."""
    resting: int = 0
    """Calls to come that go straight to the body."""
    keys: deque[Any] = field(factory=lambda: deque(maxlen=_KEYS))
    """Keys that efforts were made for, and those looked at since, newest last."""
    changed: deque[str] = field(factory=lambda: deque(maxlen=_KEYS))
    """State for which recordings were dropped."""
    calls: int = 0
    """Calls that were looked at since replays came last."""
    _recent: deque[int] = field(factory=lambda: deque(maxlen=IN_TURN))
    """Hashes of the keys that were looked at last."""
    _lived: float = 0.0
    """Replays of recordings that were dropped, less what efforts since then took, in replays that save as much."""
    _before: int = 0
    """Replays before the last effort."""
    _making: float = math.inf
    """Milliseconds that the last recording took."""
    _times: deque[float] = field(factory=lambda: deque(maxlen=5))
    _guess: float = 0.0
    _efforts: float = 0.0
    _ms: float = 0.0
    _replays: int = 0
    _paid: float = 0.0
    """What replays paid since the last effort."""
    _paid_in_all: float = 0.0
    _inherited: Account = Account(calls=0, replays=0, efforts=0.0, ms=0.0, paid=0.0)
    """Totals of the budgets that it inherited from (``Lives``)."""
    _earned: float = 0.0
    _calm: float = 0.0
    _until_rest: int = CALM
    _rest: int = FIRST_REST
    _free: int = FREE_LOOKS
    _rested: bool = False
    """No effort was made since many calls in a row ran eagerly."""
    _price: float = 1.0
    _in_vain: int = 0
    """Calls in a row that were looked at and ran eagerly."""
    _seen: OrderedDict[int, int] = field(factory=OrderedDict)
    _tried: OrderedDict[int, int] = field(factory=OrderedDict)
    """Keys that efforts were made for, and how many."""
    _due: dict[int, int] = field(factory=dict)
    """For keys in ``_tried``: the number of calls at which the key may be tried again, as it may have settled."""
    _failed: OrderedDict[int, None] = field(factory=OrderedDict)
    """Keys of which a recording was dropped or could not be made."""

    # ----------------------------------------------------------------------------------------- states that come and go

    def inherit(self, *, debt: float, others: Account, rests: int) -> None:
        """Begin with the debt of others, which ended (``Lives``). ``rests``: so many calls go straight to the body."""
        self.debt, self.gave_up, self._inherited = debt, debt >= self.most, others
        self._efforts, self._ms = others.efforts, others.ms
        if self.gave_up:
            self._rested = True
        self.resting = rests if self.may_rest else 0

    def account(self) -> Account:
        """Its totals, without what it inherited."""
        self._pay()
        made, others = self.counters, self._inherited
        return Account(
            calls=made.body_runs + made.replays, replays=made.replays, efforts=self._efforts - others.efforts,
            ms=self._ms - others.ms, paid=self._paid_in_all,
        )  # fmt: skip

    # --------------------------------------------------------------------------------------------------- what is known

    @property
    def eager_ms(self) -> float:
        """Time of one eager call."""
        return sorted(self._times)[len(self._times) // 2] if self._times else self._guess

    def _pay(self) -> None:
        """Count replays. The first one after efforts shows that the efforts were right."""
        gained = self.counters.replays - self._replays
        if gained <= 0:
            return
        self._replays = self.counters.replays
        rate = self._efforts / self._ms if self._ms else 0.0  # efforts by millisecond
        paid = gained * self.eager_ms * _SAVED * rate
        self.debt, self._paid = max(0.0, self.debt - paid), self._paid + paid
        self._paid_in_all += paid
        self._calm = max(0.0, self._calm - gained)
        if gained > 1:
            self._forget()
        if self._paid >= RECORDING:
            self._rest_anew()

    def start_anew(self) -> None:
        """The user asks for recordings: nothing counts that was tried before."""
        self.debt, self.gave_up, self.resting = 0.0, False, 0
        self._forget()
        self._rest_anew()

    def _forget(self) -> None:
        """Efforts are reported from here on only."""
        self.spent, self.calls = Spent(), 0
        self.changed.clear()
        self.keys.clear()

    def _rest_anew(self) -> None:
        """Replays have paid for a recording: begin with short rests again."""
        self._until_rest, self._rest, self._free, self._price = CALM, FIRST_REST, FREE_LOOKS, 1.0
        self._paid = 0.0

    # ---------------------------------------------------------------------------------------------- what is spent

    def spend(self, kind: str, ms: float, *, key: Any = None, changed: str = "") -> None:
        """An effort was made: one more of ``Spent``. ``ms``: of this thread's own time, as others may have waited for
        the same."""
        self._pay()
        weight = RECORDING if kind == "recordings" else 1.0
        setattr(self.spent, kind, getattr(self.spent, kind) + 1)
        self.spent.ms += ms
        if kind == "drops":
            self._lived += self._replays - self._before
        elif self._lived:
            self._lived = max(0.0, self._lived - ms / (self.eager_ms * _SAVED)) if self.eager_ms else 0.0
        if kind == "recordings":
            self._making = ms
        self._before = self._replays
        self._efforts, self._ms = self._efforts + weight, self._ms + ms
        if kind == "observations":
            self._guess = ms / _WATCHED
        self.debt += weight
        self._paid, self._in_vain = 0.0, 0
        if key is not None:
            self._note(key)
            self._note_tried(hash(key), failed=kind == "drops")
        if changed:
            self.changed.append(changed)
        too_much = self.debt >= self.most or (self.spent.ms > PATIENCE and self.debt >= self.most / 2)
        if too_much and not self.gave_up:
            self._earned = 0.0
        self.gave_up = too_much

    def lose(self, count: int) -> None:
        """So many keys died before they were replayed: their objects are gone, so that no call has them again."""
        self.debt += count

    def note_operators(self, count: int) -> None:
        """The watched run issued so many: a plain one takes some time for each."""
        self._guess = max(self._guess, count * _OPERATOR)

    def _note(self, key: Any) -> None:
        self.calls += 1
        if not self.keys or self.keys[-1] is not key:
            self.keys.append(key)
        number = hash(key)
        self._recent.append(number)
        self._seen[number] = self._seen.pop(number, 0) + 1
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)

    def _note_tried(self, number: int, *, failed: bool) -> None:
        tries = self._tried[number] = self._tried.pop(number, 0) + 1
        self._due[number] = self._seen[number] + OFTEN * 2 ** max(0, min(tries - int(AT_ONCE[True]), 10))
        if failed:
            self._failed[number] = None
        if len(self._tried) > _SEEN:
            self._due.pop(self._tried.popitem(last=False)[0], None)
        if len(self._failed) > _SEEN:
            self._failed.popitem(last=False)

    # -------------------------------------------------------------------------------------------------- what is allowed

    def allows(self, key: Any, *, lasting: bool = False, begun: bool = False) -> bool:
        """Whether an effort for this key may be made in this call. ``lasting``: its plan says that no run will change
        it. ``begun``: it was watched, and only the recording is left to do."""
        self._pay()
        begun = begun and hash(key) not in self._failed and self._is_frequent(key, IN_TURN)
        if not self.gave_up and not lasting:
            again = self._seen.get(hash(key), 0)
            if (self.debt < self.most / 2 or again) and (begun or self._can_afford(key, again)):
                return True
            if not again or hash(key) in self._tried:
                self.debt += 1.0
            self.gave_up = self.debt >= self.most
            self._note(key)
            return False
        is_near = self._is_frequent(key, NEAR)
        self._note(key)
        again = self._seen[hash(key)]
        if again < 2 or not self._can_afford(key, again):
            return False
        if self._free and self._rested and not lasting and is_near:
            self._free -= 1
        elif self._earned >= self._price:
            self._earned, self._price = 0.0, self._price * 2
        else:
            return False
        self._rested = False
        self.debt, self.gave_up = min(self.debt, self.most - LOOK), False
        return True

    def refuses(self, key: Any) -> bool:
        """The function gave up, and no call had this key: ``allows`` would say no, whatever else is known."""
        if not self.gave_up or hash(key) in self._seen:
            return False
        self._pay()
        self._note(key)
        return True

    def _is_frequent(self, key: Any, among: int) -> bool:
        """Whether it was the key of one of so many calls before, of those that were looked at. Of more keys that come
        in turn few can be recorded."""
        return hash(key) in list(self._recent)[-among:]

    def _can_afford(self, key: Any, again: int) -> bool:
        """Whether efforts took little time beside that of the calls. ``again``: calls with this key so far."""
        if self.debt < AT_ONCE[again > 0] or not config.current().drop_slow:
            return True
        if again >= OFTEN and hash(key) not in self._tried and self._is_frequent(key, IN_TURN):
            return True
        if self._may_have_settled(hash(key), again) or self._was_worth_it():
            return True
        replays = self.counters.replays + self._inherited.replays
        calls = self.counters.body_runs + self.counters.replays + self._inherited.calls
        return self._ms <= (PART * calls + _SAVED * replays) * self.eager_ms

    def _was_worth_it(self) -> bool:
        """Whether replays of what was dropped saved enough that another recording is likely to do so, too."""
        return self._lived * self.eager_ms * _SAVED >= WORTH * self._making

    def _may_have_settled(self, number: int, again: int) -> bool:
        """Whether all calls had this key for a while, and another effort is cheap."""
        latest = list(self._recent)[-OFTEN:]
        is_due = again >= self._due.get(number, again + 1) and latest == [number] * OFTEN
        return is_due and self._ms <= CHEAP * self._efforts * self.eager_ms

    # ----------------------------------------------------------------------------------------------------- eager calls

    def ran_eagerly(self, ms: float, *, weight: float = 1.0) -> None:
        """A call that was looked at ran eagerly, and took this long. Many of them in a row: the next ones are not.
        ``weight``: ``AT_LIMIT`` for one that may displace a recording, once it was asked for often enough."""
        self._times.append(ms)
        self._pay()
        self._earn(1)
        self._calm += weight
        if self._calm < self._until_rest:
            return
        self._calm, self._rested = 0.0, True
        if self.may_rest:
            self._earn(self._rest)
            self.resting, self._until_rest = self._rest, AGAIN
        else:
            self._until_rest = self._rest
        self._rest = min(self._rest * 2, LONGEST)

    def looked_in_vain(self, looked: float) -> None:
        """A call runs eagerly, and to find that out took so many milliseconds. What comes again and again is found by
        looking at some calls, too."""
        self._in_vain += 1
        if self._in_vain > LOOKED_AT and self.may_rest and not self.resting:
            self.resting = min(int(looked / max(FREE * self.eager_ms, FREE_MS)), MOST_PASSED)

    def looked_and_replayed(self) -> None:
        """A call was replayed that no fast path took: there looking is how recordings are found."""
        self._in_vain = 0

    def _earn(self, calls: int) -> None:
        rate = self._efforts / self._ms if self._ms else 0.0
        self._earned += calls * max(LEAST, self.eager_ms * SHARE) * rate


def most_efforts(max_recordings: int) -> float:
    """Efforts that may lead to no replay."""
    return 2 * max_recordings + FRUITLESS
