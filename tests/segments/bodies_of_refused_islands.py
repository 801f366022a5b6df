"""Bodies with islands that no recording is made of. See ``bodies_of_islands``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from capture import island
from tests.segments.bodies import Program, one
from tests.segments.bodies_of_islands import program

EAGER: dict[str, str] = {}
"""Their names, with a part of what the finding says."""


def eager(because: str) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    def mark(make: Callable[[], Program]) -> Callable[[], Program]:
        EAGER[make.__name__] = because
        return program(make)

    return mark


@eager("which the body reads")
def state_that_the_body_reads() -> Program:
    class Counter:
        count = 0

    counter = Counter()

    @island
    def tick() -> None:
        counter.count += 1

    def body(x: Tensor) -> Tensor:
        tick()
        return x * counter.count

    return body, one, counter


@eager("would see it as it was")
def counted_before() -> Program:
    class Holder:
        count = 0

    holder, log = Holder(), list[int]()

    @island
    def note() -> None:
        log.append(holder.count)

    def body(x: Tensor) -> Tensor:
        holder.count += 1
        note()
        return x + 1

    return body, one, log


@eager("an object of type")
def gets_an_object() -> Program:
    @island
    def note(what: Any, y: Tensor) -> None:
        del what, y

    def body(x: Tensor) -> Tensor:
        note({1, 2}, x)
        return x + 1

    return body, one, None


@eager("an object of type")
def gives_an_object() -> Program:
    @island
    def note(y: Tensor) -> Any:
        return {int(y.numel())}

    def body(x: Tensor) -> Tensor:
        return x + len(note(x))

    return body, one, None


@eager("")
def keeps_what_it_got() -> Program:
    kept: list[Tensor] = []

    @island
    def keep(y: Tensor) -> None:
        kept.append(y)

    def body(x: Tensor) -> Tensor:
        y = x * 2
        keep(y)
        y.add_(1)
        return y + 1

    return body, one, kept


@eager("keeps a tensor that it gives")
def keeps_what_it_gives() -> Program:
    kept: list[Tensor] = []

    @island
    def make(y: Tensor) -> Tensor:
        kept.append(y * 3)
        return kept[-1]

    def body(x: Tensor) -> Tensor:
        return make(x * 2).add_(1)

    return body, one, kept


@eager("which the body catches")
def raises_and_is_caught() -> Program:
    @island
    def fail(y: Tensor) -> None:
        raise ValueError(str(y.shape))

    def body(x: Tensor) -> Tensor:
        y = x * 2
        try:
            fail(y)
        except ValueError:
            return y + 1
        return y

    return body, one, None


@eager("share memory")
def gives_two_views_of_one() -> Program:
    @island
    def two_rows(y: Tensor) -> tuple[Tensor, Tensor]:
        z = y * 2
        return z[0], z[1]

    def body(x: Tensor) -> Tensor:
        first, second = two_rows(x)
        return first + second

    return body, one, None


@eager("which the body changes, too")
def state_that_both_change() -> Program:
    log: list[float] = []

    @island
    def note(y: Tensor) -> None:
        log.append(float(y.sum()))

    def body(x: Tensor) -> Tensor:
        y = x * 2
        note(y)
        log.append(1.0)
        return y

    return body, one, log
