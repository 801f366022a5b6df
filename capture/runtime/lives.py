"""Lives: what captured objects cost that came and went.

A method keeps its state for each instance, and a function that is decorated anew in every call has a new one each time.
Such a state has a budget of its own, which ends with it. Where objects do not live long enough for their recordings to
pay, each of them would be watched anew; so what they cost is added up here, for each piece of code, when they end:

* a state begins with what those before it still owe (``Budget.inherit``): soon a new one has to show that its calls
  come again before it is watched;
* when all of them owe as much as one function may (``Budget.most``), the code **gave up**. Calls of objects that are
  not known yet then go straight to the body: 16 at first, twice as many each time, up to 1,024. After each such rest
  one object is looked at like a function that gave up: what lives on is recorded, and if that pays all this ends.

Objects that are alive owe nothing: thirty layers of one class are watched once each. What pays for itself leaves no
debt. With ``CAPTURE_DROP_SLOW=0``, as in tests whose objects live for a few calls, nothing is added up.
"""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Any

from attrs import evolve, field

from capture.core import config
from capture.core.data import define
from capture.runtime.budget import FIRST_REST, LONGEST, Account, Budget, Spent

_NONE = Account(calls=0, replays=0, efforts=0.0, ms=0.0, paid=0.0)


@define(eq=False)
class Lives:
    """For one piece of code: what its states cost that have ended, which new states inherit. Not under a lock, as
    ``Budget``."""

    debt: float = 0.0
    """Efforts that led to no replay."""
    ended: int = 0
    """States that were called and ended, since replays came last."""
    spent: Spent = field(factory=Spent)
    """Efforts of the states in ``ended``."""
    gave_up: bool = False
    is_told: bool = False
    """The user was told that the code gave up."""
    annotated: Any = None
    """Annotation and binder of the last function with this code, to be used again for the next one."""
    _account: Account = _NONE
    _passing: int = 0
    """Calls to come, or objects, that are not looked at."""
    _rest: int = FIRST_REST

    def end(self, budget: Budget) -> None:
        """A state with this budget ended."""
        if not config.current().drop_slow:
            return
        own, all_before = budget.account(), self._account
        if not own.calls:
            return
        cost = own.efforts if own.replays else max(own.efforts, 1.0)
        self.debt = max(0.0, self.debt + cost - own.paid)
        self._account = evolve(
            all_before, calls=all_before.calls + own.calls, replays=all_before.replays + own.replays,
            efforts=all_before.efforts + own.efforts, ms=all_before.ms + own.ms,
        )  # fmt: skip
        self.gave_up = self.debt >= budget.most
        if own.paid >= cost:
            self.ended, self.spent, self.is_told = 0, Spent(), False
            self._passing, self._rest = 0, FIRST_REST
            return
        self.ended += 1
        spent = budget.spent
        self.spent = Spent(
            self.spent.observations + spent.observations, self.spent.recordings + spent.recordings,
            self.spent.drops + spent.drops, self.spent.ms + spent.ms,
        )  # fmt: skip

    def begin(self, budget: Budget) -> None:
        """A state with this budget begins."""
        if self.debt:
            rests = self._rest if self.passes() else 0
            budget.inherit(debt=self.debt, others=self._account, rests=rests)

    def passes(self) -> bool:
        """Whether to run a call of a new object without looking at it. Counts the calls. The first call is looked at,
        as it has to tell the user."""
        if not (self.gave_up and self.is_told):
            return False
        if self._passing > 0:
            self._passing -= 1
            return True
        self._passing, self._rest = self._rest, min(self._rest * 2, LONGEST)
        return False

    def owe_most(self, budget: Budget) -> bool:
        """Whether a state with this budget gave up mostly for what earlier states cost."""
        return self.debt >= budget.most / 2

    @property
    def has_news(self) -> bool:
        """Whether the user is to be told that the code gave up."""
        return self.gave_up and not self.is_told

    def start_anew(self) -> None:
        """Forget all costs so far."""
        self.debt, self.ended, self.spent, self._account = 0.0, 0, Spent(), _NONE
        self.gave_up, self.is_told, self._passing, self._rest = False, False, 0, FIRST_REST


_lives: weakref.WeakKeyDictionary[CodeType, Lives] = weakref.WeakKeyDictionary()


def lives_of(code: CodeType | None) -> Lives:
    """The record for this code object; a new one for None."""
    if code is None:
        return Lives()
    found = _lives.get(code)
    return found if found is not None else _lives.setdefault(code, Lives())


def forget() -> None:
    """Forget the costs of all code, as in a new process."""
    for one in list(_lives.values()):
        one.start_anew()
