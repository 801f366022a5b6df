"""Frames of all threads are asked for while garbage is collected, whose end lets other threads run."""

from __future__ import annotations

import sys

import pytest

from capture.native import native
from tests.support.processes import run_python

PROGRAM = """
import gc, sys, threading, time
from capture.native import native

class Ends:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0)  # another thread runs

def ask():
    for _ in range(1500):
        Ends()
        native.current_frames()

sys.setswitchinterval(1e-5)
gc.set_threshold(1, 1, 1)
threads = [threading.Thread(target=ask) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(gc.isenabled())
"""


@pytest.mark.slow
def test_no_thread_waits_for_ever() -> None:
    """With ``sys._current_frames`` itself this program hangs on Python 3.11."""
    ended = run_python(PROGRAM, timeout=60)
    assert ended.stdout == "True\n", ended.stderr


def test_the_frames_are_those_of_python() -> None:
    frames = native.current_frames()
    assert frames.keys() == sys._current_frames().keys()
    assert sys._getframe() in frames.values()
