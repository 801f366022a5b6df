"""Objects, their classes and methods: rows of the table of cells."""

from __future__ import annotations

from tests.guards.kinds import kind, reads

_ATTRIBUTE = {
    "replaced": "state.scale = 3.0",
    "in_place": "state.more[0] = 5.0",
    "deleted": "del state.scale",
    "added": "state.extra = 7.0",
}
_ALL = "state.scale + state.more[0] + getattr(state, 'extra', 0.0)"

OBJECTS = (
    kind("plain attribute", "state = Box(scale=2.0, more=[1.0])" + reads(_ALL), **_ATTRIBUTE),
    kind(
        "dataclass",
        """
@dataclasses.dataclass
class Config:
    scale: float = 2.0
    more: list = dataclasses.field(default_factory=lambda: [1.0])
state = Config()"""
        + reads(_ALL),
        **{**_ATTRIBUTE, "deleted": "del state.more"},
    ),
    kind(
        "frozen dataclass",
        """
@dataclasses.dataclass(frozen=True)
class Config:
    scale: float = 2.0
state = Box(cfg=Config())"""
        + reads("state.cfg.scale"),
        replaced="state.cfg = Config(3.0)",
        in_place="object.__setattr__(state.cfg, 'scale', 4.0)",
        deleted="del state.cfg",
        added="Config.scale = property(lambda self: 9.0)",
    ),
    kind(
        "slots",
        """
class Slots:
    __slots__ = ("scale", "more", "extra")
state = Slots()
state.scale, state.more = 2.0, [1.0]"""
        + reads(_ALL),
        **_ATTRIBUTE,
    ),
    kind(
        "enumeration",
        """
class Mode(enum.Enum):
    A = 2.0
    B = 3.0
state = Box(mode=Mode.A)"""
        + reads("state.mode.value if state.mode is Mode.A else -state.mode.value + getattr(Mode, 'extra', 0.0)"),
        replaced="state.mode = Mode.B",
        in_place="Mode.A._value_ = 5.0",
        deleted="del state.mode",
    ),
    kind(
        "enumeration by value",
        """
class Mode(enum.IntEnum):
    A = 2
    B = 3
state = Box(value=2)"""
        + reads("Mode(state.value) * 2 + len(Mode)"),
        replaced="state.value = 3",
        deleted="del state.value",
        added="state.value = 4",
    ),
    kind(
        "namedtuple",
        """
Pair = collections.namedtuple("Pair", "scale more")
state = Box(pair=Pair(2.0, [1.0]))"""
        + reads("state.pair.scale + sum(state.pair.more) + sum(state.pair._asdict()['more'])"),
        replaced="state.pair = Pair(3.0, [1.0])",
        in_place="state.pair.more[0] = 5.0",
        deleted="del state.pair",
        added="state.pair.more.append(2.0)",
    ),
    kind("SimpleNamespace", "state = types.SimpleNamespace(scale=2.0, more=[1.0])" + reads(_ALL), **_ATTRIBUTE),
    kind(
        "nested configs",
        "state = Box(cfg=Box(inner=Box(scale=2.0)))" + reads("state.cfg.inner.scale + getattr(state.cfg, 'extra', 0)"),
        replaced="state.cfg = Box(inner=Box(scale=3.0))",
        in_place="state.cfg.inner.scale = 4.0",
        deleted="del state.cfg.inner",
        added="state.cfg.extra = 1.0",
    ),
    kind(
        "property",
        """
class Config:
    _scale = 1.0
    @property
    def scale(self):
        return self._scale
state = Config()"""
        + reads("state.scale"),
        replaced="Config.scale = property(lambda self: self._scale + 1)",
        in_place="Config._scale = 4.0",
        deleted="del Config.scale",
        added="state._scale = 3.0",
    ),
    kind(
        "descriptor",
        """
class Field:
    def __init__(self, store):
        self.store = store
    def __get__(self, obj, kind=None):
        return self.store["scale"] + len(self.store)
class Config:
    scale = Field({"scale": 2.0})
state = Config()"""
        + reads("state.scale"),
        replaced="Config.scale = Field({'scale': 3.0})",
        in_place="Config.__dict__['scale'].store['scale'] = 4.0",
        deleted="del Config.scale",
        added="state.scale = 8.0",
    ),
    kind(
        "data descriptor added later",
        """
class Field:
    def __get__(self, obj, kind=None):
        return 5.0
class Config:
    scale = Field()
state = Config()
state.__dict__["scale"] = 2.0"""
        + reads("state.scale"),
        added="Field.__set__ = lambda self, obj, value: None",
        deleted="del state.__dict__['scale']",
        replaced="state.__dict__['scale'] = 3.0",
    ),
    kind(
        "class attribute",
        "class Config:\n    scale = 2.0\n    more = [1.0]\nstate = Config()" + reads("state.scale + state.more[0]"),
        replaced="Config.scale = 3.0",
        in_place="Config.more[0] = 4.0",
        deleted="del Config.scale",
        added="state.scale = 5.0",
    ),
    kind(
        "attribute of a class itself",
        "class Config:\n    scale = 2.0\nstate = Config()" + reads("type(state).scale + state.__class__.scale"),
        replaced="Config.scale = 3.0",
        deleted="del Config.scale",
    ),
    kind(
        "metaclass attribute",
        """
class Meta(type):
    scale = 2.0
    @property
    def half(cls):
        return cls.scale / 2
class Config(metaclass=Meta):
    pass
state = Box(kind=Config)"""
        + reads("state.kind.scale + state.kind.half"),
        replaced="Meta.scale = 3.0",
        in_place="Meta.half = property(lambda cls: 9.0)",
        deleted="del Meta.half",
        added="Config.scale = 4.0",
    ),
    kind(
        "inherited attribute",
        """
class Base:
    scale = 2.0
class Config(Base):
    pass
state = Config()"""
        + reads("state.scale"),
        replaced="Base.scale = 3.0",
        deleted="del Base.scale",
        added="Config.scale = 5.0",
        in_place="Config.__bases__ = (type('Other', (), {'scale': 7.0}),)",
    ),
    kind(
        "super()",
        """
class Base:
    scale = 2.0
    def gain(self):
        return 1.0
class Middle(Base):
    pass
class Config(Middle):
    def gain(self):
        return super().gain() + super().scale
state = Config()"""
        + reads("state.gain()"),
        replaced="Base.gain = lambda self: 4.0",
        deleted="del Base.gain",
        added="Middle.scale = 6.0",
        in_place="Base.scale = 8.0",
    ),
    kind(
        "method",
        """
class Config:
    def gain(self):
        return 2.0
state = Config()"""
        + reads("state.gain()"),
        replaced="Config.gain = lambda self: 3.0",
        in_place="Config.gain.__code__ = (lambda self: 4.0).__code__",
        deleted="del Config.gain",
        added="state.gain = lambda: 5.0",
    ),
    kind(
        "method of the instance",
        """
class Config:
    def gain(self):
        return 2.0
state = Config()
state.gain = lambda: 7.0"""
        + reads("state.gain()"),
        replaced="state.gain = lambda: 3.0",
        deleted="del state.gain",
        in_place="state.gain.__code__ = (lambda: 4.0).__code__",
    ),
    kind(
        "static, class and partial methods",
        """
class Config:
    base = 1.0
    @staticmethod
    def one():
        return 1.0
    @classmethod
    def two(cls):
        return cls.base
    def _times(self, factor):
        return factor * 2
    three = functools.partialmethod(_times, 3.0)
state = Config()"""
        + reads("state.one() + state.two() + state.three()"),
        replaced="Config.one = staticmethod(lambda: 4.0)",
        in_place="Config.base = 5.0",
        deleted="del Config.two",
        added="state.three = lambda: 9.0",
    ),
    kind(
        "__call__",
        "class Config:\n    def __call__(self):\n        return 2.0\nstate = Config()" + reads("state()"),
        replaced="Config.__call__ = lambda self: 3.0",
        deleted="del Config.__call__",
        in_place="Config.__call__.__code__ = (lambda self: 4.0).__code__",
        added="state.__call__ = lambda: 5.0",
    ),
    kind(
        "__getattr__",
        """
class Proxy:
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)
state = Proxy(Box(scale=2.0))"""
        + reads("state.scale"),
        replaced="state.inner = Box(scale=3.0)",
        in_place="state.inner.scale = 4.0",
        deleted="del state.inner.scale",
        added="state.scale = 5.0",
    ),
    kind(
        "__getattribute__",
        """
class Proxy:
    table = {"scale": 2.0}
    def __getattribute__(self, name):
        return object.__getattribute__(self, name) if name[:2] == "__" else Proxy.table[name]
state = Proxy()"""
        + reads("state.scale"),
        replaced="Proxy.table = {'scale': 3.0}",
        in_place="Proxy.table['scale'] = 4.0",
        deleted="del Proxy.table['scale']",
    ),
    kind(
        "__getitem__",
        """
class Table:
    def __init__(self):
        self.rows = {"scale": 2.0}
    def __getitem__(self, key):
        return self.rows[key]
state = Table()"""
        + reads("state['scale']"),
        replaced="Table.__getitem__ = lambda self, key: 3.0",
        in_place="state.rows['scale'] = 4.0",
        deleted="del state.rows['scale']",
    ),
    kind(
        "special methods",
        """
class Config:
    def __len__(self): return 2
    def __bool__(self): return True
    def __iter__(self): return iter([1.0, 2.0])
    def __contains__(self, one): return True
    def __eq__(self, other): return True
    def __float__(self): return 1.5
    __hash__ = None
state = Config()"""
        + reads("len(state) + (10 if state else 20) + sum(state) + (3 in state) + (state == 2) + float(state)"),
        replaced="Config.__bool__ = lambda self: False",
        in_place="Config.__iter__.__code__ = (lambda self: iter([5.0])).__code__",
        deleted="del Config.__contains__",
        added="Config.__radd__ = lambda self, other: 0",
    ),
    kind(
        "swapped __class__",
        """
class One:
    scale = 2.0
class Two:
    scale = 3.0
class Both(One):
    pass
state = One()"""
        + reads("state.scale + (10.0 if isinstance(state, Two) else 20.0) + (type(state) is One)"),
        replaced="state.__class__ = Two",
        in_place="state.__class__ = Both",
        added="One.__instancecheck__ = 1; One.scale = 8.0",
    ),
    kind(
        "abstract base class",
        """
class Kind(abc.ABC):
    pass
class Other:
    pass
state = Box(one=Other(), kind=Kind)"""
        + reads("2.0 if isinstance(state.one, state.kind) else 3.0"),
        added="Kind.register(Other)",
        replaced="state.kind = Other",
    ),
    kind(
        "__instancecheck__",
        """
class Meta(type):
    answer = True
    def __instancecheck__(cls, one):
        return cls.answer
class Kind(metaclass=Meta):
    pass
state = Box(one=1.0)"""
        + reads("2.0 if isinstance(state.one, Kind) else 3.0"),
        replaced="Meta.answer = False",
        in_place="Meta.__instancecheck__ = lambda cls, one: False",
        added="Kind.answer = False",
        deleted="del Meta.__instancecheck__",
    ),
    kind(
        "cached property",
        """
class Config:
    base = 2.0
    @functools.cached_property
    def scale(self):
        return self.base
state = Config()
state.scale"""
        + reads("state.scale"),
        replaced="state.scale = 3.0",
        deleted="Config.base = 5.0; del state.scale",
        in_place="state.__dict__['scale'] = 4.0",
    ),
)
