"""Names that are computed, functions, modules and references: rows of the table of cells."""

from __future__ import annotations

from tests.guards.kinds import kind, reads

LOOKED_UP = (
    kind(
        "getattr with a computed name",
        "state = Box(w0=2.0, w1=3.0, use=2)"
        + reads("sum(getattr(state, f'w{i}') for i in range(state.use)) + getattr(state, f'w{state.use}', 0.0)"),
        replaced="state.w0 = 5.0",
        in_place="state.use = 1",
        deleted="del state.w1",
        added="state.w2 = 7.0",
    ),
    kind(
        "vars()",
        "state = Box(scale=2.0)" + reads("sum(vars(state).values())"),
        replaced="state.scale = 3.0",
        deleted="del state.scale",
        added="state.other = 4.0",
    ),
    kind(
        "__dict__",
        "state = Box(scale=2.0)" + reads("state.__dict__['scale'] + len(state.__dict__)"),
        replaced="state.scale = 3.0",
        deleted="del state.scale",
        added="state.other = 4.0",
        in_place="state.__dict__ = {'scale': 6.0}",
    ),
    kind(
        "attrgetter",
        "state = Box(cfg=Box(scale=2.0), get=operator.attrgetter('cfg.scale'))" + reads("state.get(state)"),
        replaced="state.get = operator.attrgetter('cfg.other'); state.cfg.other = 3.0",
        in_place="state.cfg.scale = 4.0",
        deleted="del state.cfg.scale",
    ),
    kind(
        "itemgetter",
        "state = Box(table={'a': 2.0, 'b': 3.0}, get=operator.itemgetter('a'))" + reads("state.get(state.table)"),
        replaced="state.get = operator.itemgetter('b')",
        in_place="state.table['a'] = 4.0",
        deleted="del state.table['a']",
    ),
    kind(
        "methodcaller",
        """
class Config:
    def gain(self, factor):
        return factor
state = Box(cfg=Config(), call=operator.methodcaller('gain', 2.0))"""
        + reads("state.call(state.cfg)"),
        replaced="state.call = operator.methodcaller('gain', 3.0)",
        in_place="Config.gain = lambda self, factor: factor * 2",
        deleted="del Config.gain",
        added="state.cfg.gain = lambda factor: 9.0",
    ),
    kind(
        "hasattr",
        "state = Box(flag=1)" + reads("(2.0 if hasattr(state, 'flag') else 3.0) + hasattr(state, 'extra')"),
        deleted="del state.flag",
        added="state.extra = 1",
        in_place="type(state).extra = 1",
    ),
    kind(
        "try and except",
        """
state = Box(scale=2.0)
def read(state):
    try:
        return state.extra
    except AttributeError:
        return state.scale
""",
        replaced="state.scale = 3.0",
        added="state.extra = 4.0",
        deleted="del state.scale",
    ),
    kind(
        "dir()",
        "state = Box(scale=2.0)" + reads("len(dir(state))"),
        added="state.other = 1",
        deleted="del state.scale",
        in_place="type(state).other = 1",
    ),
    kind(
        "eval()",
        "state = Box(scale=2.0, text='state.scale')" + reads("eval(state.text)"),
        replaced="state.text = 'state.scale * 2'",
        in_place="state.scale = 3.0",
        deleted="del state.scale",
    ),
    kind(
        "local alias",
        """
state = Box(cfg=Box(scale=2.0))
def read(state):
    one = state.cfg
    other = one
    return other.scale
""",
        replaced="state.cfg = Box(scale=3.0)",
        in_place="state.cfg.scale = 4.0",
        deleted="del state.cfg.scale",
        added="type(state.cfg).scale = property(lambda self: 9.0)",
    ),
    kind(
        "copies",
        "state = Box(cfg=Box(scale=2.0), table={'a': [1.0]})"
        + reads("copy.copy(state.cfg).scale + copy.deepcopy(state.table)['a'][0]"),
        replaced="state.cfg = Box(scale=3.0)",
        in_place="state.table['a'][0] = 4.0",
        deleted="del state.cfg.scale",
    ),
    kind(
        "dataclasses.asdict and replace",
        """
@dataclasses.dataclass
class Config:
    scale: float = 2.0
    more: float = 1.0
state = Box(cfg=Config())"""
        + reads("dataclasses.asdict(state.cfg)['scale'] + dataclasses.replace(state.cfg, scale=0.0).more"),
        replaced="state.cfg = Config(3.0)",
        in_place="state.cfg.more = 4.0",
        deleted="del state.cfg.scale",
    ),
    kind(
        "matched by pattern",
        """
class Point:
    __match_args__ = ("x", "y")
    def __init__(self, x, y):
        self.x, self.y = x, y
state = Box(point=Point(1.0, 2.0), table={"kind": "a"})
def read(state):
    match state.point, state.table:
        case Point(1.0, y), {"kind": "a"}:
            return y
        case Point(x, _), _:
            return x * 10
""",
        replaced="state.point = Point(3.0, 2.0)",
        in_place="state.point.y = 5.0",
        deleted="del state.table['kind']",
        added="Point.__match_args__ = ('y', 'x')",
    ),
)

CALLS = (
    kind(
        "function of a module",
        "def gain():\n    return 2.0\nstate = Box()" + reads("gain()"),
        replaced="def gain():\n    return 3.0",
        in_place="gain.__code__ = (lambda: 4.0).__code__",
        deleted="del gain",
    ),
    kind(
        "imported module",
        "cfgmod = types.ModuleType('cfgmod')\ncfgmod.scale = 2.0\nstate = Box()"
        + reads("cfgmod.scale + getattr(cfgmod, 'extra', 0.0)"),
        replaced="cfgmod.scale = 3.0",
        deleted="del cfgmod.scale",
        added="cfgmod.extra = 4.0",
        in_place="cfgmod = types.ModuleType('cfgmod'); cfgmod.scale = 9.0",
    ),
    kind(
        "module of a package",
        """
package = types.ModuleType('package')
package.inner = types.ModuleType('package.inner')
package.inner.scale = 2.0
state = Box()"""
        + reads("package.inner.scale"),
        replaced="package.inner.scale = 3.0",
        in_place="package.inner = types.ModuleType('package.inner'); package.inner.scale = 4.0",
        deleted="del package.inner.scale",
    ),
    kind(
        "global of a helper elsewhere",
        """
helpers = types.ModuleType('helpers')
exec("scale = 2.0\\ntable = {'a': 1.0}\\ndef gain():\\n    return scale + table['a']", helpers.__dict__)
gain = helpers.gain
state = Box()"""
        + reads("gain()"),
        replaced="helpers.scale = 3.0",
        in_place="helpers.table['a'] = 4.0",
        deleted="del helpers.scale",
        added="helpers.len = helpers.gain; helpers.table['b'] = 1.0; helpers.scale = 5.0",
    ),
    kind(
        "module's __getattr__",
        """
lazy = types.ModuleType('lazy')
exec("table = {'scale': 2.0}\\ndef __getattr__(name):\\n    return table[name]", lazy.__dict__)
state = Box()"""
        + reads("lazy.scale"),
        replaced="lazy.table = {'scale': 3.0}",
        in_place="lazy.table['scale'] = 4.0",
        added="lazy.scale = 5.0",
        deleted="del lazy.__getattr__",
    ),
    kind(
        "built-in name",
        "state = Box(values=[1.0, 2.0])" + reads("max(state.values)"),
        added="def max(values):\n    return 9.0",
        in_place="state.values[0] = 3.0",
    ),
    kind(
        "closure cell",
        """
def make():
    scale, more = 2.0, [1.0]
    def gain():
        return scale + more[0]
    def put(value):
        nonlocal scale
        scale = value
    def drop():
        nonlocal scale
        del scale
    return gain, put, drop, more
gain, put, drop, more = make()
state = Box()"""
        + reads("gain()"),
        replaced="put(3.0)",
        in_place="more[0] = 4.0",
        deleted="drop()",
    ),
    kind(
        "default argument",
        "def gain(scale=2.0, more=[1.0]):\n    return scale + more[0]\nstate = Box()" + reads("gain()"),
        replaced="gain.__defaults__ = (3.0, [1.0])",
        in_place="gain.__defaults__[1][0] = 4.0",
        deleted="gain.__defaults__ = None",
    ),
    kind(
        "keyword default",
        "def gain(*, scale=2.0):\n    return scale\nstate = Box()" + reads("gain()"),
        replaced="gain.__kwdefaults__ = {'scale': 3.0}",
        in_place="gain.__kwdefaults__['scale'] = 4.0",
        deleted="gain.__kwdefaults__ = None",
    ),
    kind(
        "function attribute",
        "def gain():\n    return gain.scale + getattr(gain, 'extra', 0.0)\ngain.scale = 2.0\nstate = Box()"
        + reads("gain()"),
        replaced="gain.scale = 3.0",
        deleted="del gain.scale",
        added="gain.extra = 4.0",
    ),
    kind(
        "functools.wraps",
        """
def twice(function):
    @functools.wraps(function)
    def wrapper(*args):
        return wrapper.times * function(*args) + wrapper.__wrapped__(*args)
    wrapper.times = 2.0
    return wrapper
def plain():
    return 2.0
gain = twice(plain)
state = Box()"""
        + reads("gain()"),
        replaced="gain = twice(lambda: 5.0)",
        in_place="plain.__code__ = (lambda: 4.0).__code__",
        added="gain.times = 3.0",
        deleted="del gain.__wrapped__",
    ),
    kind(
        "partial",
        """
def times(factor, table, more=0.0):
    return factor + table[0] + more
state = Box(call=functools.partial(times, 2.0, [1.0]))"""
        + reads("state.call()"),
        replaced="state.call = functools.partial(times, 3.0, [1.0])",
        in_place="state.call.args[1][0] = 4.0",
        added="state.call.keywords['more'] = 5.0",
        deleted="del state.call",
    ),
    kind(
        "lru_cache",
        """
@functools.lru_cache
def made(name):
    return Box(scale=2.0)
state = Box()"""
        + reads("made('a').scale"),
        in_place="made('a').scale = 3.0",
        deleted="made.cache_clear(); made.__wrapped__.__code__ = (lambda name: Box(scale=4.0)).__code__",
        replaced="made = functools.lru_cache(lambda name: Box(scale=5.0))",
        added="made('b')",
    ),
    kind(
        "singledispatch",
        """
@functools.singledispatch
def gain(one):
    return 2.0
state = Box(one=1)"""
        + reads("gain(state.one)"),
        added="gain.register(int, lambda one: 3.0)",
        replaced="state.one = 'text'; gain.register(str, lambda one: 4.0)",
    ),
    kind(
        "registry of functions",
        """
REGISTRY = {}
def register(name):
    return lambda function: REGISTRY.setdefault(name, function)
@register("a")
def first():
    return 2.0
@register("b")
def second():
    return 3.0
state = Box(kind="a")"""
        + reads("REGISTRY[state.kind]()"),
        replaced="REGISTRY['a'] = second",
        in_place="state.kind = 'b'",
        deleted="del REGISTRY['a']",
    ),
    kind(
        "star arguments",
        """
def gain(*args, **named):
    return sum(args) + named.get('more', 0.0)
state = Box(args=[1.0, 2.0], named={'more': 1.0})"""
        + reads("gain(*state.args, **state.named)"),
        replaced="state.args = [4.0]",
        in_place="state.args[0] = 3.0",
        deleted="del state.named['more']",
        added="state.args.append(5.0)",
    ),
    kind(
        "key function",
        """
state = Box(values=[3.0, -4.0], key=abs)"""
        + reads(
            "max(state.values, key=state.key) + sorted(state.values, key=state.key)[0]"
            " + sum(map(state.key, state.values))"
        ),
        replaced="state.key = operator.neg",
        in_place="state.values[1] = 2.0",
        deleted="del state.key",
        added="state.values.append(9.0)",
    ),
    kind(
        "context variable",
        "VARIABLE = contextvars.ContextVar('VARIABLE')\nVARIABLE.set(2.0)\nstate = Box()" + reads("VARIABLE.get(9.0)"),
        replaced="VARIABLE.set(3.0)",
        in_place="VARIABLE = contextvars.ContextVar('OTHER', default=4.0)",
    ),
    kind(
        "context variable without a value",
        "VARIABLE = contextvars.ContextVar('VARIABLE')\nstate = Box()" + reads("VARIABLE.get(9.0)"),
        added="VARIABLE.set(3.0)",
    ),
    kind(
        "context that is kept",
        """
VARIABLE = contextvars.ContextVar('VARIABLE')
CONTEXT = contextvars.Context()
CONTEXT.run(VARIABLE.set, 2.0)
state = Box()"""
        + reads("CONTEXT.get(VARIABLE, 9.0)"),
        replaced="CONTEXT = contextvars.Context()",
        in_place="CONTEXT.run(VARIABLE.set, 3.0)",
    ),
    kind(
        "thread-local",
        "LOCAL = threading.local()\nLOCAL.scale = 2.0\nstate = Box()"
        + reads("LOCAL.scale + getattr(LOCAL, 'more', 0)"),
        replaced="LOCAL.scale = 3.0",
        deleted="del LOCAL.scale",
        added="LOCAL.more = 4.0",
    ),
    kind(
        "weak reference",
        "kept = [Box(scale=2.0)]\nstate = Box(ref=weakref.ref(kept[0]))" + reads("state.ref().scale"),
        replaced="kept.append(Box(scale=3.0)); state.ref = weakref.ref(kept[1])",
        in_place="kept[0].scale = 4.0",
        deleted="kept.clear()",
    ),
    kind(
        "weak proxy",
        "kept = [Box(scale=2.0)]\nstate = Box(one=weakref.proxy(kept[0]))" + reads("state.one.scale"),
        in_place="kept[0].scale = 4.0",
        deleted="kept.clear()",
        replaced="kept.append(Box(scale=3.0)); state.one = weakref.proxy(kept[1])",
    ),
)
