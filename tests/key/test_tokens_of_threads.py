"""``identity_token`` gives an object the same number in every thread, also while other objects die."""

from __future__ import annotations

import sys
import threading
import time

from capture.key.signature import deaths, identity_token


class Thing:
    """Told apart by identity."""


def test_objects_that_die_in_several_threads() -> None:
    failed: list[BaseException] = []
    shared = [Thing() for _ in range(200)]
    numbers: list[list[int]] = []
    until = time.monotonic() + 0.7

    def run() -> None:
        try:
            numbers.append([identity_token(thing) for thing in shared])
            while time.monotonic() < until:
                for _ in range(20):
                    identity_token(Thing())
                deaths()
        except BaseException as error:  # noqa: BLE001 - which is what is looked for
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed
    assert all(numbers_of_thread == numbers[0] for numbers_of_thread in numbers)
    assert numbers[0] == [identity_token(thing) for thing in shared]
