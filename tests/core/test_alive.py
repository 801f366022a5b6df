"""The list of living objects stays right while threads add objects and lose them."""

from __future__ import annotations

import threading

from capture.core.alive import Alive


class Thing:
    """An object that weak references can point at."""


def test_those_that_live_in_order() -> None:
    alive: Alive[Thing] = Alive()
    things = [Thing() for _ in range(4)]
    for thing in things:
        alive.add(thing)
    assert alive.all() == things
    alive.discard(things[1])
    alive.discard(things[1])
    del things[2]
    assert alive.all() == [things[0], things[2]]


def test_threads_add_while_others_ask() -> None:
    alive: Alive[Thing] = Alive()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3000):
                kept = Thing()
                alive.add(kept)
                assert kept in alive.all()
        except BaseException as error:  # noqa: BLE001 - asserted below
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert alive.all() == []
