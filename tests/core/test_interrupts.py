"""Exceptions of signal handlers come out, whatever is being put right meanwhile."""

from __future__ import annotations

import signal
from types import FrameType

import pytest

from capture.core.interrupts import guarded


class _StoppedError(Exception):
    pass


def _raises() -> None:
    raise ValueError("of the run")


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_while_things_are_put_right_comes_out(error: type[BaseException]) -> None:
    """The first error may be an answer to who called, such as that a capture was refused."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise error("stopped")

    calls = []

    def mend(errors: list[BaseException]) -> None:
        calls.append([type(one) for one in errors])
        if len(calls) == 1:
            signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, ring)
    try:
        with pytest.raises(error, match="stopped"):
            guarded(_raises, (), mend)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert calls == [[ValueError], [ValueError, error]]


def test_an_own_error_while_things_are_put_right_does_not_hide_the_first() -> None:
    calls = []

    def mend(errors: list[BaseException]) -> None:
        calls.append(len(errors))
        if len(calls) < 3:
            raise _StoppedError

    with pytest.raises(ValueError, match="of the run"):
        guarded(_raises, (), mend)
    assert calls == [1, 2, 3]


def test_what_ends_well_is_not_mended() -> None:
    assert guarded(int, ("7",), lambda errors: pytest.fail("nothing to mend")) == 7
