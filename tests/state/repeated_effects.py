"""Kinds of writes to Python state that a replay repeats. Each is given as source text: setup, body, and what the caller
does between calls; with the least number of replays in ten calls."""

from __future__ import annotations

from attrs import frozen

PRELUDE = """
import contextvars, enum, functools, queue, threading, types, weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
import torch
from torch import nn
"""


@frozen
class Kind:
    """``body``: of a method of a module with a linear layer, ``self.lin``. ``between``: before each call, of which
    ``i`` is the number. ``replays``: at least as many of ten."""

    body: str
    init: str = "pass"
    setup: str = ""
    between: str = "pass"
    replays: int = 6
    members: str = ""
    """Source of further members of the module's class."""

    def text(self) -> str:
        """The source of the whole program."""
        lines = "\n        ".join(part for part in (self.body.split("; ") if "\n" not in self.body else [self.body]))
        init = "\n        ".join(self.init.split("; "))
        return f"""{PRELUDE}
{self.setup}

class M(nn.Module):
    {self.members or "is_test = True"}
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        {init}
    def forward(self, x, given):
        {lines}

m = M()
def between(i):
    {self.between}
"""


_HISTORY = "y = self.lin(x); self.h.append({}); return y"
_RECORDER = """
class Recorder:
    def __init__(self): self.n, self.h = 0, []
    def note(self, y):
        self.n += 1
        self.h.append(y.sum())
"""
KINDS: dict[str, Kind] = {
    # numbers that are only added to
    "counter": Kind("self.n += 1; return self.lin(x)", "self.n = 0", between="m.n = 50 if i == 5 else m.n"),
    "counter written out": Kind("self.n = self.n + 2; return self.lin(x)", "self.n = 0"),
    "counter by a size": Kind("self.n += x.shape[0]; return self.lin(x)", "self.n = 0"),
    "counter of a class": Kind("M.total -= 1; return self.lin(x)", members="total = 7"),
    "counter that a class has at first": Kind("self.total += 1; return self.lin(x)", members="total = 0"),
    "global counter": Kind("global N; N += 1; return self.lin(x)", setup="N = 0"),
    "counter in a dict": Kind(
        "S['n'] += 1; return self.lin(x) * S['k']", setup="S = {'n': 0, 'k': 2.0}",
        between="S['k'] = 3.0 if i > 6 else 2.0", replays=4,
    ),
    "counter in a list": Kind("self.a[0] += 1; return self.lin(x)", "self.a = [0, 0]"),
    "counter in a default dict": Kind("self.c['a'] += 1; return self.lin(x)", "self.c = defaultdict(int)"),
    "Counter": Kind("self.c['a'] += 1; return self.lin(x)", "self.c = Counter()"),
    "counter by get": Kind(
        "self.c['k'] = self.c.get('k', 0) + 1; return self.lin(x)", "self.c = {}", between="if i == 6: m.c.clear()",
        replays=3,
    ),
    "counter by get, a hundred": Kind(
        "self.c['k'] = self.c.get('k', 0) + 1; return self.lin(x)", "self.c = {}", between="if i == 5: m.c['k'] = 100",
    ),
    "counter by get that is read": Kind(
        "self.c['k'] = self.c.get('k', 0) + 1; return self.lin(x) * self.c.get('k')", "self.c = {}", replays=0,
    ),
    "counter by get of its own": Kind(
        "self.c['k'] += 1; return self.lin(x) * self.c.get('n', 0)", "self.c = Log(k=0)",
        "class Log(dict):\n    def get(self, key, other): return sum(self.values())", replays=0,
    ),
    "list with get": Kind(
        "self.c.append(1); return self.lin(x) * self.c.get('n')", "self.c = Log()",
        "class Log(list):\n    def get(self, key): return len(self)", replays=0,
    ),
    "counter with a default": Kind("self.c.setdefault('k', 0); self.c['k'] += 1; return self.lin(x)", "self.c = {}"),
    "list with a default": Kind(
        "y = self.lin(x); self.c.setdefault('a', []).append(y.sum()); return y", "self.c = {}",
        between="if i == 6: m.c['a'] = [3]",
    ),
    "counter in a dict in a dict": Kind(
        "self.c['a']['n'] += 1; return self.lin(x)", "self.c = {'a': {'n': 0}, 'b': {'n': 0}}",
        between="m.c['a']['n'] = 40 if i == 5 else m.c['a']['n']",
    ),
    "counter in another dict in a dict": Kind(
        "self.c['a']['n'] += 1; return self.lin(x)", "self.c = {'a': {'n': 0}}",
        between="if i == 6: m.c['a'] = {'n': 9}", replays=3,
    ),
    "counter in a dict that is gone through": Kind(
        "self.c['a']['n'] += 1; return self.lin(x) * sum(one['n'] for one in self.c.values())",
        "self.c = {'a': {'n': 0}, 'b': {'n': 0}}", replays=0,
    ),
    "counter in a dict under two names": Kind(
        "self.c['a']['n'] += 1; return self.lin(x) * self.a['n']", "self.c = {'a': {'n': 0}}; self.a = self.c['a']",
        replays=0,
    ),
    "counter of an object in reach": Kind(
        "self.s.n += 1; return self.lin(x) * self.s.k", "self.s = types.SimpleNamespace(n=0, k=1.5)",
        between="m.s.k = 2.5 if i > 6 else 1.5", replays=4,
    ),
    "counter in a hook": Kind(
        "return self.lin(x)", "self.n = 0; self.lin.register_forward_hook(lambda *_: self.count())",
        members="def count(self): self.n += 1",
    ),
    "counter of a thread": Kind("T.n += 1; return self.lin(x)", setup="T = threading.local(); T.n = 0"),
    "counter that is read": Kind("self.n += 1; return self.lin(x) * self.n", "self.n = 0", replays=0),
    "counter that is read by text": Kind(
        "self.n += 1; return self.lin(x) * getattr(self, 'n')", "self.n = 0", replays=0,
    ),
    "counter that is read elsewhere": Kind(
        "self.n += 1; return self.lin(x) * number(self)", "self.n = 0", "def number(o): return o.n", replays=0,
    ),
    "counter that decides": Kind(
        "self.n += 1\n        if self.n == 7: x = x * 2\n        return self.lin(x)", "self.n = 0", replays=0,
    ),
    "counter with an end": Kind("self.n = min(self.n + 1, 3); return self.lin(x) * self.n", "self.n = 0", replays=4),
    # containers
    "list that grows": Kind(_HISTORY.format("y.detach()"), "self.h = []"),
    "list that grows, cleared": Kind(_HISTORY.format("y.sum()"), "self.h = []", between="i % 3 or m.h.clear()"),
    "list that grows, replaced": Kind(_HISTORY.format("y.sum()"), "self.h = []", between="if i == 6: m.h = [1]"),
    "list of numbers": Kind(_HISTORY.format("3"), "self.h = []"),
    "list of tuples": Kind(_HISTORY.format("(y.mean(), 'a', 3)"), "self.h = []"),
    "list of dicts": Kind(_HISTORY.format("{'y': y, 'n': [1]}"), "self.h = []"),
    "list of arguments": Kind(_HISTORY.format("x"), "self.h = []"),
    "list of views": Kind(_HISTORY.format("x[0]"), "self.h = []"),
    "list with +=": Kind("y = self.lin(x); self.h += [y.sum()]; return y", "self.h = []"),
    "extended list": Kind("y = self.lin(x); self.h.extend([y.sum(), y]); return y", "self.h = []"),
    "list in a dict": Kind("y = self.lin(x); self.c['a'].append(y.sum()); return y", "self.c = {'a': [], 'b': [1]}"),
    "lists in a default dict": Kind(
        "y = self.lin(x); self.c['a'].append(y.sum()); self.c['b'].append(3); return y", "self.c = defaultdict(list)",
    ),
    "list in a dict that is read": Kind(
        "self.c['a'].append(3); return self.lin(x) * len(self.c['a'])", "self.c = {'a': []}", replays=0,
    ),
    "list in a dict that is gone through": Kind(
        "self.c['a'].append(3); return self.lin(x) * sum(map(len, self.c.values()))", "self.c = {'a': []}", replays=0,
    ),
    "list whose method is kept": Kind(
        "y = self.lin(x); self.note(y.sum()); return y", "self.note = RUNS.append", setup="RUNS = []",
    ),
    "list whose method is passed on": Kind(
        "return helper(self.lin(x), self.h.append)", "self.h = []",
        "def helper(y, note):\n    note(y.sum())\n    return y",
    ),
    "method as a callback": Kind(
        "y = self.lin(x); self.note(y); return y", "self.note = Recorder().note", setup=_RECORDER,
    ),
    "hook that collects": Kind(
        "return self.lin(x)", "self.h = []; self.lin.register_forward_hook(lambda m, a, o: self.h.append(o))",
    ),
    "list that is read": Kind("y = self.lin(x); self.h.append(3); return y * len(self.h)", "self.h = []", replays=0),
    "list that another name reads": Kind(
        "y = self.lin(x); self.a.append(3); return y * len(self.b)", "self.a = []; self.b = self.a", replays=0,
    ),
    "list that begins empty": Kind(
        "y = self.lin(x); self.h.append(y.sum()); self.h.append(y.mean()); return y + sum(self.h)", "self.h = []",
        between="m.h.clear()",
    ),
    "list that the body clears": Kind(
        "self.h.clear(); y = self.lin(x); self.h.append(y.sum()); return y", "self.h = []", replays=5,
    ),
    "dict that the body clears": Kind(
        "self.c.clear(); y = self.lin(x); self.c['y'] = y; self.c['n'] = 3; return y", "self.c = {'z': 1}", replays=5,
    ),
    "last tensors": Kind("y = self.lin(x); self.q.append(y); return y", "self.q = deque(maxlen=3)"),
    "last tensors, at the front": Kind(
        "y = self.lin(x); self.q.appendleft(y); return y", "self.q = deque()", replays=0,
    ),
    "inserted": Kind("y = self.lin(x); self.h.insert(0, y); return y", "self.h = []", replays=0),
    "set": Kind("self.s.add(x.shape[0]); return self.lin(x)", "self.s = set()", between="if i == 6: m.s.clear()",
                replays=3),
    "default of a dict": Kind(
        "self.c.setdefault('a', 3); return self.lin(x)", "self.c = {}", between="if i == 6: m.c.clear()", replays=3,
    ),
    "deleted item": Kind("del self.c['k']; return self.lin(x)", "self.c = {'j': 1}", between="m.c['k'] = 1"),
    "popped item": Kind("return self.lin(x) * self.c.pop('k')", "self.c = {}", between="m.c['k'] = 2"),
    "ordered dict": Kind("self.c.move_to_end('a'); return self.lin(x)", "self.c = OrderedDict(a=1, b=2)"),
    "argument's items": Kind("y = self.lin(x); given.append(y.sum()); return y"),
    # plain values
    "constant": Kind("self.k = 'b'; return self.lin(x)", "self.k = 'a'", between="m.k = 'a' if i % 2 else m.k",
                     replays=4),
    "constant that is put back": Kind(
        "self.k = True; y = self.lin(x); self.k = False; return y", "self.k = False", between="m.k = i % 3 == 0",
        replays=3,
    ),
    "list anew": Kind("self.k = [x.shape[0], 'k']; return self.lin(x)", "self.k = 0",
                      between="if i in (5, 7): m.k = [9]", replays=4),
    "deleted attribute": Kind("del self.k; return self.lin(x)", between="m.k = 1"),
    "added attribute": Kind("self.k = 4; return self.lin(x)", between="m.__dict__.pop('k', None)"),
    "two that change places": Kind(
        "self.a, self.b = self.b, self.a; return self.lin(x) * self.a", "self.a = 1.0; self.b = 2.0", replays=5,
    ),
    "index of a ring": Kind(
        "self.r[self.i] = self.lin(x)[0]; self.i = (self.i + 1) % 2; return self.r.sum()",
        "self.i = 0; self.register_buffer('r', torch.zeros(2, 4))", replays=5,
    ),
    "context variable": Kind("V.set(5); return self.lin(x)", setup="V = contextvars.ContextVar('V', default=0)",
                             between="if i == 6: V.set(1)", replays=3),
    "default of a context variable": Kind(
        "V.get()['y'] = self.lin(x); return x + V.get()['k']", replays=4,
        setup="V = contextvars.ContextVar('V', default={'k': 0.0})", between="V.get()['k'] = 0.0 if i < 6 else 3.0",
    ),
    "computed names": Kind("for n in 'ab': setattr(self, n + '_v', 3)\n        return self.lin(x)",
                           between="m.a_v = 1", replays=5),
    "time": Kind("self.t = CLOCK(); return self.lin(x)", setup="import itertools\nCLOCK = itertools.count().__next__",
                 replays=0),
}  # fmt: skip
