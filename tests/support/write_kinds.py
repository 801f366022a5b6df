"""Kinds of writes to Python state, as source text. Each runs in two worlds, one eager and one captured.

A text is put into a function, a method, a module or a nested module; ``e`` is the object that it can write to, ``y`` a
tensor that the body made.
"""

from __future__ import annotations

import re

PRELUDE = """
import array, collections, contextlib, contextvars, dataclasses, enum, functools, io, itertools, logging, queue, random
import sys, threading, time, types, warnings, weakref
import numpy as np
import torch
from torch import nn

class Plain: pass
class Trace:
    last = None; count = 0; items = []; table = {}
    def keep(self, y): type(self).last = y
    @classmethod
    def keep_by_class(cls, y): cls.last = y
class SubTrace(Trace): pass
class Meta(type):
    pass
class WithMeta(metaclass=Meta): last = None
class Slotted:
    __slots__ = ("last", "n", "__weakref__")
    def __init__(self): self.last, self.n = None, 0
class Guarded:
    def __init__(self): self._value = None; self.sets = 0
    @property
    def value(self): return self._value
    @value.setter
    def value(self, new): self._value = new
class Setting:
    def __setattr__(self, name, value): object.__setattr__(self, "kept_" + name, value)
class Log:
    def __init__(self): self.entries = []; self.total = 0
    def add(self, y): self.entries.append(y); self.total += 1
class Bounded:
    def __init__(self): self.entries = []
    def add(self, y):
        self.entries.append(y)
        if len(self.entries) > 3: self.entries.pop(0)
class MyList(list): pass
class MyDict(dict): pass
@dataclasses.dataclass
class Record:
    last: object = None
    n: int = 0
class Color(enum.Enum):
    RED = 1
    BLUE = 2
g_last = None; g_count = 0; g_flag = False; g_list = []; g_dict = {}; g_deque = collections.deque(maxlen=3)
g_queue = queue.Queue(); g_simple = queue.SimpleQueue(); g_local = threading.local()
g_weak = weakref.WeakKeyDictionary()
g_weak_values = weakref.WeakValueDictionary()
g_var = contextvars.ContextVar("g_var", default=None); g_module = types.ModuleType("user_module_of_the_body")
g_module.last = None; g_module.count = 0; g_module.items = []
g_file = io.StringIO(); g_owner = Plain(); g_iter = iter(range(1000)); g_count_iter = itertools.count()
g_numbers = np.zeros(3); g_array = array.array("q", [0, 0]); g_bytes = bytearray(3); g_rng = random.Random(3)
g_np = np.random.default_rng(3)
g_lock = threading.Lock(); g_cond = threading.Condition()
g_logger = logging.Logger("of a body"); g_handler = logging.StreamHandler(g_file); g_logger.addHandler(g_handler)
g_cycle = itertools.cycle([1, 2, 3])
def gen():
    n = 0
    while True:
        n += 1
        yield n
g_gen = gen()
@functools.lru_cache(maxsize=None)
def cached(n): return [n]
@functools.lru_cache(maxsize=None)
def seen_once(n):
    g_list.append(n)
def with_default(y, kept=[]): kept.append(y)
def with_default_count(kept={"n": 0}): kept["n"] += 1
def helper_global(y):
    global g_last
    g_last = y
def helper_count():
    global g_count
    g_count += 1
def helper_attr(o, y): o.last = y
def counting(): counting.n += 1
counting.n = 0
def make_cell():
    held, n, items = None, 0, []
    def put(y):
        nonlocal held
        held = y
    def count():
        nonlocal n
        n += 1
    def append(y): items.append(y)
    return put, count, append, lambda: (held, n, items)
put_in_cell, count_in_cell, append_in_cell, cells = make_cell()
def setup(e):
    e.last = None; e.n = 0; e.flag = False; e.mode = "a"; e.total = 0.0; e.items = []; e.table = {}
    e.tables = collections.defaultdict(list)
    e.ordered = collections.OrderedDict(); e.unique = set(); e.ring = collections.deque(maxlen=3)
    e.long = collections.deque()
    e.counter = collections.Counter(); e.slotted = Slotted(); e.guarded = Guarded(); e.setting = Setting()
    e.log = Log()
    e.bounded = Bounded(); e.plain = Plain(); e.plain.last = None; e.record = Record()
    e.space = types.SimpleNamespace(last=None, n=0)
    e.pair = (None, None); e.nested = {"a": {"b": [None]}}; e.filled = [1, 2, 3]; e.names = {"a": 1, "b": 2}
    e.my_list = MyList(); e.my_dict = MyDict()
    e.chain = collections.ChainMap({}, {"a": 1}); e.user_list = collections.UserList()
    e.user_dict = collections.UserDict()
    e.hist = [None] * 4; e.pos = 0; e.color = Color.RED; e.proxy = weakref.proxy(g_owner)
    e.ref = weakref.ref(g_owner); e.callback = None
    e.stats = {"n": 0, "sum": 0.0}; e.flags = {"on": False}; e.odd = False
"""

STATE = (
    "e", "g_last", "g_count", "g_flag", "g_list", "g_dict", "g_deque", "g_queue", "g_simple", "g_local", "g_weak",
    "g_weak_values", "g_var", "g_module", "g_file", "g_owner", "g_iter", "g_count_iter", "g_cycle", "g_numbers",
    "g_array", "g_bytes", "g_rng", "g_np", "g_gen", "Trace", "SubTrace", "WithMeta", "cached", "seen_once",
    "with_default", "with_default_count", "counting", "cells", "own",
)  # fmt: skip

TENSORS = {
    "attribute": "e.last = y",
    "attribute of another object": "e.plain.last = y",
    "new attribute of another object": "e.plain.fresh = y",
    "dataclass": "e.record.last = y",
    "simple namespace": "e.space.last = y",
    "slot": "e.slotted.last = y",
    "property with a setter": "e.guarded.value = y",
    "own __setattr__": "e.setting.last = y",
    "setattr with a computed name": 'setattr(e.plain, "la" + "st", y)',
    "object.__setattr__": 'object.__setattr__(e.plain, "last", y)',
    "__dict__ item": 'e.plain.__dict__["last"] = y',
    "__dict__ update": "e.plain.__dict__.update(last=y)",
    "vars": 'vars(e.plain)["last"] = y',
    "through a weak proxy": "e.proxy.last = y",
    "through a weak reference": "e.ref().last = y",
    "through a helper": "helper_attr(e.plain, y)",
    "through a partial": "functools.partial(helper_attr, e.plain)(y)",
    "class attribute": "Trace.last = y",
    "class attribute by a method": "Trace().keep(y)",
    "class attribute by a class method": "Trace.keep_by_class(y)",
    "attribute of a subclass": "SubTrace.last = y",
    "new class attribute": "Trace.fresh = y",
    "class attribute by setattr": 'setattr(Trace, "last", y)',
    "class with a metaclass": "WithMeta.last = y",
    "metaclass": "Meta.last = y",
    "attribute of the own class": "type(e).last_of_class = y",
    "global": "global g_last; g_last = y",
    "global by a helper": "helper_global(y)",
    "globals()": 'globals()["g_last"] = y',
    "cell": "put_in_cell(y)",
    "imported module": "g_module.last = y",
    "new attribute of a module": "g_module.fresh = y",
    "function attribute": "counting.last = y",
    "mutable default": "with_default(y)",
    "mutable default, one place": "with_default.__defaults__[0][:] = [y]",
    "parameter": "own.weight.last = y",
    "buffer's attribute": "own.kept.last = y",
    "argument's attribute": "x.last = y",
    "result's attribute": "y.note = 'made'",
    "thread-local": "g_local.last = y",
    "context variable": "g_var.set(y)",
    "weak keys": "g_weak[g_owner] = y",
    "weak values": 'g_weak_values["y"] = y',
    "list item": "e.hist[1] = y",
    "list slice": "e.hist[1:3] = [y, y]",
    "dict item": 'e.table["y"] = y',
    "dict item by number": "e.table[3] = y",
    "dict item by tuple": 'e.table["a", 1] = y',
    "dict update": "e.table.update(y=y)",
    "dict |=": 'e.table |= {"y": y}',
    "dict setdefault": 'e.table.setdefault("y", y)',
    "nested containers": 'e.nested["a"]["b"][0] = y',
    "ordered dict": 'e.ordered["y"] = y; e.ordered.move_to_end("y", last=False)',
    "default dict": 'e.tables["y"].append(y)',
    "chain map": 'e.chain["y"] = y',
    "user dict": 'e.user_dict["y"] = y',
    "dict subclass": 'e.my_dict["y"] = y',
    "tuple replaced": "e.pair = (y, y * 2)",
    "new container": "e.last = [y, {'a': y * 2}]",
    "new object": "e.record = Record(y, 3)",
    "list append": "e.items.append(y)",
    "list extend": "e.items.extend([y, y * 2])",
    "list +=": "e.items += [y]",
    "list insert": "e.items.insert(0, y)",
    "list cleared and filled": "e.items.clear(); e.items.append(y)",
    "list del and append": "del e.filled[:]; e.filled.append(y)",
    "list subclass append": "e.my_list.append(y)",
    "user list append": "e.user_list.append(y)",
    "global list append": "g_list.append(y)",
    "cell's list append": "append_in_cell(y)",
    "module's list append": "g_module.items.append(y)",
    "class's list append": "Trace.items.append(y)",
    "list append by a local name": "items = e.items; items.append(y)",
    "bound append": "(e.items.append)(y)",
    "list append by map": "list(map(e.items.append, [y]))",
    "list bounded": "e.items.append(y)\nif len(e.items) > 3: e.items.pop(0)",
    "own log": "e.log.add(y)",
    "own bounded log": "e.bounded.add(y)",
    "ring": "e.ring.append(y)",
    "long deque": "e.long.append(y)",
    "deque appendleft": "e.long.appendleft(y)",
    "deque rotate": "e.long.append(y); e.long.rotate(1)",
    "global ring": "g_deque.append(y)",
    "set of tensors": "e.unique.add(y)",
    "queue": "g_queue.put(y)",
    "queue, replaced": "g_queue.queue.clear(); g_queue.put_nowait(y)",
    "simple queue": "g_simple.put(y)",
    "kept by an exception": "try:\n    raise ValueError(y)\nexcept ValueError as error:\n    e.last = error",
    "kept by a closure": "e.callback = lambda: y",
    "kept by a partial": "e.callback = functools.partial(helper_global, y)",
    "kept by a method": "e.callback = y.tolist",
    "kept by a generator": "e.callback = (y for _ in range(2))",
    "kept by an iterator": "e.callback = iter([y])",
    "kept in a C object": "e.callback = itertools.repeat(y)",
    "kept as a view": "e.last = y[1:]",
    "kept as a detached alias": "e.last = y.detach()",
    "intermediate": "z = y * 3; e.last = z.mul(2)",
    "view in a global": "global g_last; g_last = y.t()",
    "registered buffer": 'own.register_buffer("kept", y)',
    "buffer assigned": "own.kept = y",
    "grad assigned": "own.bias.grad = y.detach().sum(0)",
    "copied into a buffer": "own.kept.copy_(y.detach())",
    "data of a parameter": "own.extra.data = y.detach()[0]",
}  # fmt: skip

PLAIN = {
    "counter": "e.n += 1",
    "counter, written out": "e.n = e.n + 1",
    "counter by 3": "e.n += 3",
    "counter downwards": "e.n -= 1",
    "counter by a size": "e.n += x.shape[0]",
    "counter in a slot": "e.slotted.n += 1",
    "counter of another object": "e.space.n += 1",
    "counter of a dataclass": "e.record.n += 1",
    "global counter": "global g_count; g_count += 1",
    "global counter by a helper": "helper_count()",
    "counter in a cell": "count_in_cell()",
    "counter of a class": "Trace.count += 1",
    "counter of the own class": "type(e).number = getattr(type(e), 'number', 0) + 1",
    "counter of a function": "counting()",
    "counter in a module": "g_module.count += 1",
    "counter in a dict": 'e.stats["n"] += 1',
    "counter by get": 'e.stats["n"] = e.stats.get("n", 0) + 1',
    "Counter": 'e.counter["a"] += 1',
    "Counter.update": 'e.counter.update(["a"])',
    "counter in a default": "with_default_count()",
    "counter that is read": "e.n += 1\nif e.n > 3: y = y * 2",
    "counter that is returned": "e.n += 1; y = y + e.n",
    "counter modulo": "e.pos = (e.pos + 1) % 4; e.hist[e.pos] = y",
    "float sum": "e.total += 0.1",
    "doubled": "e.n = e.n * 2 + 1",
    "text grows": "e.mode += 'a'",
    "constant": "e.flag = True",
    "constant text": 'e.mode = "b"',
    "constant enum": "e.color = Color.BLUE",
    "constant tuple": "e.pair = (1, 'a')",
    "constant in a dict": 'e.flags["on"] = True',
    "constant in a global": "global g_flag; g_flag = True",
    "constant on a class": "Trace.count = 7",
    "constant in a list": "e.filled[0] = 9",
    "constant size": "e.n = x.shape[0]",
    "none": "e.last = None",
    "toggle": "e.odd = not e.odd",
    "toggle that decides": "e.odd = not e.odd\nif e.odd: y = y * 2",
    "set and put back": "before = e.flag; e.flag = True; z = y * 2; e.flag = before",
    "attribute deleted": 'e.plain.extra = 1; del e.plain.extra',
    "attribute gone": "e.plain.__dict__.pop('last', None)",
    "dict key deleted": 'e.names.pop("a", None)',
    "dict cleared": "e.names.clear()",
    "list cleared": "e.filled.clear()",
    "list of numbers": "e.items.append(1)",
    "list of numbers, global": "g_list.append(1)",
    "list sorted": "e.filled.sort(reverse=True)",
    "list reversed": "e.filled.reverse()",
    "list popped": "e.filled and e.filled.pop()",
    "set of numbers": "e.unique.add(1)",
    "set grows": "e.unique.add(len(e.unique))",
    "set discards": "e.unique.discard(1)",
    "new plain list": "e.last = [1, 2]",
    "new dict": "e.last = {'a': 1}",
    "new object": "e.last = Record(None, 3)",
    "default dict asked": 'e.tables["new"]',
    "lru_cache": "cached(3)",
    "lru_cache by object": "cached(e.mode)",
    "once by lru_cache": "seen_once(1)",
    "iterator": "next(g_iter)",
    "itertools.count": "next(g_count_iter)",
    "itertools.cycle": "next(g_cycle)",
    "generator": "next(g_gen)",
    "iterator decides": "y = y * next(g_iter)",
    "loop that breaks": "for n in g_iter: break",
    "random": "y = y * random.Random.random(g_rng)",
    "numpy generator": "g_np.random()",
    "numpy in place": "g_numbers[0] += 1",
    "numpy fill": "g_numbers.fill(3)",
    "array": "g_array[0] += 1",
    "array append": "g_array.append(1)",
    "bytearray": "g_bytes[0] = (g_bytes[0] + 1) % 256",
    "file": 'g_file.write("x")',
    "print": 'print("x", file=g_file)',
    "logging": 'g_logger.warning("x")',
    "logging that is off": 'g_logger.debug("x") if g_logger.isEnabledFor(60) else None',
    "lock": "with g_lock: pass",
    "condition": "with g_cond: g_cond.notify_all()",
    "queue of numbers": "g_queue.put(1)",
    "queue put and got": "g_queue.put(1); g_queue.get()",
    "simple queue of numbers": "g_simple.put(1)",
    "thread-local number": "g_local.n = getattr(g_local, 'n', 0) + 1",
    "context variable number": "g_var.set(3)",
    "context variable reset": "token = g_var.set(3); g_var.reset(token)",
    "train": "own.train()",
    "eval": "own.eval()",
    "eval and train": "own.eval(); own.train()",
    "requires_grad_": "own.extra.requires_grad_(False)",
    "requires_grad off and on": "own.extra.requires_grad_(False); own.extra.requires_grad_(True)",
    "module registered": 'own.add_module("late", nn.Identity())',
    "hook registered": "own.register_forward_hook(lambda *_: None)",
    "hook registered and removed": "own.register_forward_hook(lambda *_: None).remove()",
    "method replaced": "e.helper = helper_count",
    "class replaced": "e.plain.__class__ = Guarded",
    "defaults replaced": "with_default_count.__defaults__ = ({'n': 5},)",
    "function attribute constant": "counting.flag = True",
    "getattr with a computed name": "setattr(e, 'n', getattr(e, 'n' + '') + 1)",
    "dict in a dict": 'e.nested["a"]["n"] = e.nested["a"].get("n", 0) + 1',
    "del global": "globals().pop('g_flag', None)",
    "exec": "exec('e_n = 1', g_dict)",
    "operator.setitem": "__import__('operator').setitem(e.names, 'c', 3)",
    "walrus and any": "any(e.items.append(n) for n in range(2))",
    "comprehension": "[e.items.append(n) for n in range(2)]",
    "warning": 'warnings.warn("x")',
    "dict of sizes": "e.table[tuple(x.shape)] = 1",
    "zero grad": "own.zero_grad()",
}  # fmt: skip

_FORMS = {
    "function": "def body(x):\n{body}\ne = Plain(); setup(e)\ncall = body\n",
    "method": "class Owner:\n    def body(self, x):\n{body}\ne = Owner(); setup(e)\ncall = e.body\n",
    "module": (
        "class Owner(nn.Module):\n    def forward(self, x):\n{body}\ne = Owner(); setup(e)\ncall = e\n"
    ),
    "nested module": (
        "class Owner(nn.Module):\n    def forward(self, x):\n{body}\ne = Owner(); setup(e)\n"
        "class Outer(nn.Module):\n    def __init__(self):\n        super().__init__(); self.inner = e\n"
        "    def forward(self, x): return self.inner(x * 2) - 1\ncall = Outer()\n"
    ),
}  # fmt: skip
FORMS = tuple(_FORMS)
CONTEXTS = ("no grad", "whole step", "region")


def source_of(statements: str, form: str, context: str, *, returned: bool = False) -> str:
    """A module's text whose ``call`` takes a tensor."""
    lines = ["y = torch.tanh(own(x))" if context != "no grad" else "y = torch.tanh(x * 2)"]
    if context == "whole step":
        lines += ["(y * y).sum().backward()", "y = y.detach()"]
    first = statements.split(";")[0] if statements.startswith("global ") else ""
    if first:
        lines, statements = [first, *lines], statements[len(first) + 1 :].strip()
    lines += statements.split("\n")
    if context == "whole step":
        lines += [
            "with torch.no_grad():",
            "    if own.weight.grad is not None: own.weight.sub_(own.weight.grad, alpha=0.01)",
            "own.weight.grad = None",
        ]
    lines += ["return y" if returned else "return y + 1"]
    depth = 1 if form == "function" else 2
    body = "\n".join("    " * depth + line for line in lines)
    if form != "function":
        body = re.sub(r"\be\b(?=[.,)])", "self", body)
    return _FORMS[form].format(body=body)
