"""Random programs that write Python state, from drawn statements and actions of the caller, equal their eager twins.

``CAPTURE_FUZZ_EXAMPLES=5000`` runs that many, new ones each time.
"""

from __future__ import annotations

import os
import random
import types
import warnings
from typing import Any

import pytest
import torch

from capture import CaptureWarning, capture, mark_step_begin, recordings
from tests.generated.runner import FUZZING, quickly
from tests.support.world_state import digest
from tests.support.writes import fresh as fresh

PARTS = 10
EXAMPLES = int(os.environ.get("CAPTURE_FUZZ_EXAMPLES", "200"))
CALLS = 9
PRELUDE = """
from collections import Counter, OrderedDict, defaultdict, deque
import torch
N = 0
G = []
S = {"n": 0, "k": 2.0}
class Part:
    total = 0
    def __init__(self):
        self.n, self.h, self.k = 0, [], 1.5
    def note(self, y):
        self.n += 1
        self.h.append(y.sum())
    def read(self):
        return self.k
    def count(self):
        return self.n
class M:
    total = 0
    def __init__(self):
        self.a = self.b = 0
        self.h, self.g, self.q = [], [], deque(maxlen=3)
        self.c, self.d, self.e, self.s = {}, defaultdict(int), defaultdict(list), set()
        self.part, self.k, self.t = Part(), 2.0, None
        self.f = {'a': {'n': 0}, 'b': {}}
"""
WRITES = (
    "self.a += 1",
    "self.b -= x.shape[0]",
    "self.b = self.b + 2",
    "M.total += 1",
    "self.part.n += 3",
    "N += 1",
    "S['n'] += 1",
    "self.d['z'] += 1",
    "self.d['y'] += 2",
    "self.part.note(y)",
    "self.h.append(y)",
    "self.h.append((y.mean(), 3))",
    "self.g.append('k')",
    "G.append(y.sum())",
    "self.h += [y * 2]",
    "self.g.extend([1, 2])",
    "self.q.append(y)",
    "self.c['y'] = y",
    "self.c['n'] = 3",
    "self.c.clear()",
    "self.c.setdefault('d', 7)",
    "self.s.add(x.shape[0])",
    "self.t = y",
    "self.t = (y, 3)",
    "self.k = 2.5",
    "self.part.k = 1.5",
    "self.t = None",
    "self.t = [1, 'a']",
    "self.c.pop('n', None)",
    "self.g.clear()",
    "self.h.append(x)",
    "self.h.append(x[0])",
    "self.part.h.append(y)",
    "self.q.append(3)",
    "y.add_(1)",
    "self.e['l'].append(y)",
    "self.e['m'].append(2)",
    "self.d['z'] -= 1",
    "self.g.insert(0, 5)",
    "del self.g[:1]",
    "self.g[:] = [9]",
    "self.c['m'] = self.c.get('m', 0) + 1",
    "self.e.setdefault('o', []).append(y)",
    "self.f['a']['n'] += 1",
    "self.f['b']['n'] = self.f['b'].get('n', 3) - 1",
    "self.f.setdefault('c', []).append(2)",
)
READS = (
    "y = y * self.k",
    "y = y * self.part.read()",
    "y = y * S['k']",
    "y = y + self.a",
    "y = y + len(self.g)",
    "y = y + self.part.count()",
    "y = y + (self.t if isinstance(self.t, torch.Tensor) else 1)",
    "y = y * (2 if self.c.get('n') else 3)",
    "y = y + len(self.s)",
    "y = y + sum(map(len, [self.c]))",
    "y = torch.tanh(y)",
    "y = y + x",
    "y = y + len(self.e['l'])",
    "y = y + len(self.e)",
    "y = y + self.f['a'].get('n', 0)",
    "y = y + len(self.f['b'])",
    "y = y + self.c.get('m', 2)",
    "y = y + len(self.f.get('c', ()))",
)
BETWEEN = (
    "m.a = 10",
    "m.h.clear()",
    "m.h = []",
    "m.g.append(0)",
    "m.g.clear()",
    "m.k = 3.5",
    "m.k = 2.0",
    "m.part.k = 4.5",
    "m.part = Part()",
    "S['k'] = 3.0",
    "S['n'] = 0",
    "m.c.clear()",
    "m.c['n'] = 1",
    "m.s.clear()",
    "m.t = None",
    "m.t = torch.ones(3)",
    "m.d.clear()",
    "G.clear()",
    "m.q.clear()",
    "M.total = 5",
    "m.part.n = 7",
    "m.f['a'] = {'n': 4}",
    "m.f['b'] = m.f['a']",
    "m.f.pop('c', None)",
    "m.c = {}",
    "m.e.clear()",
    "m.e['l'] = []",
    "m.e['m'].clear()",
)


def drawn(rng: random.Random) -> tuple[str, list[list[str]]]:
    """A program, and what its caller does before each call."""
    lines = [rng.choice(WRITES if rng.random() < 0.7 else READS) for _ in range(rng.randint(1, 5))]
    body = "\n        ".join(["global N", "y = torch.relu(x) * 2", *lines, "return y"])
    between = [[rng.choice(BETWEEN)] if rng.random() < 0.15 else [] for _ in range(CALLS)]
    return f"{PRELUDE}\n    def run(self, x):\n        {body}\nm = M()\n", between


class World:
    """One program, in a module of its own."""

    def __init__(self, text: str, *, captured: bool) -> None:
        self.module = types.ModuleType("user_code")
        exec(compile(text, "<a random body that writes>", "exec", dont_inherit=True), self.module.__dict__)  # noqa: S102
        self.m = self.module.__dict__["m"]
        self.call = capture(self.m.run) if captured else self.m.run

    def step(self, number: int, actions: list[str]) -> Any:
        """What the call gives or raises, and all state of the program after it."""
        scope = self.module.__dict__
        for action in actions:
            exec(action, scope)  # noqa: S102
        mark_step_begin()
        try:
            result = self.call(torch.arange(3.0) - number)
        except (AttributeError, KeyError, TypeError) as error:
            result = str(error)
        state = {"m": vars(self.m), "part": vars(self.m.part), "total": self.m.total}
        return digest([result, state, {name: scope[name] for name in ("N", "G", "S")}])


def replays_of(text: str, between: list[list[str]]) -> int:
    """Run a program captured and eagerly, compare each call, and give the number of replays."""
    eager, captured = World(text, captured=False), World(text, captured=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for number, actions in enumerate(between):
            expected = eager.step(number, actions)
            assert captured.step(number, actions) == expected, (text.partition("def run")[2], between, number)
    return recordings(captured.call).replays


@pytest.mark.parametrize("part", quickly(range(PARTS), 1))
def test_random_writes_equal_their_eager_twins(part: int) -> None:
    rng = random.Random(random.randrange(2**32) if FUZZING else part)
    count = max(EXAMPLES // PARTS, 1)
    replays = sum(replays_of(*drawn(rng)) for _ in range(count))
    assert replays > count  # of nine calls each
