"""Containers, modules, optimizers and tensors: more rows of the table of cells."""

from __future__ import annotations

from tests.guards.kinds import kind, reads

CONTAINERS = (
    kind(
        "list",
        "state = Box(many=[1.0, 2.0])" + reads("state.many[0] + sum(state.many) + len(state.many)"),
        replaced="state.many = [3.0]",
        in_place="state.many[0] = 4.0",
        deleted="state.many.pop()",
        added="state.many.append(5.0)",
    ),
    kind(
        "dict",
        "state = Box(many={'a': 1.0})" + reads("state.many['a'] + state.many.get('b', 2.0) + ('b' in state.many)"),
        replaced="state.many = {'a': 3.0}",
        in_place="state.many['a'] = 4.0",
        deleted="del state.many['a']",
        added="state.many['b'] = 5.0",
    ),
    kind(
        "views of a dict",
        "state = Box(many={'a': 1.0, 'b': 2.0})"
        + reads(
            "sum(i * v for i, v in enumerate(state.many.values())) + len(state.many.items())"
            " + ('c' in state.many.keys())"
        ),
        replaced="state.many = {'b': 2.0, 'a': 1.0}",
        in_place="state.many['a'], state.many['b'] = 5.0, 6.0",
        deleted="del state.many['a']",
        added="state.many['c'] = 5.0",
    ),
    kind(
        "OrderedDict",
        "state = Box(many=collections.OrderedDict(a=1.0, b=2.0))" + reads("list(state.many.values())[0]"),
        replaced="state.many = collections.OrderedDict(a=3.0)",
        in_place="state.many.move_to_end('a')",
        deleted="del state.many['a']",
        added="state.many['c'] = 1.0; state.many.move_to_end('c', last=False); state.many['c'] = 8.0",
    ),
    kind(
        "defaultdict and Counter",
        "state = Box(many=collections.defaultdict(float, a=1.0), count=collections.Counter('aab'))"
        + reads("state.many.get('a', 2.0) + state.count['a'] + state.count['z']"),
        replaced="state.count = collections.Counter('b')",
        in_place="state.many['a'] = 4.0",
        deleted="del state.many['a']",
        added="state.count.update('z')",
    ),
    kind(
        "UserDict and UserList",
        "state = Box(many=collections.UserDict(a=1.0), items=collections.UserList([1.0]))"
        + reads("state.many['a'] + sum(state.items)"),
        replaced="state.many = collections.UserDict(a=3.0)",
        in_place="state.many['a'] = 4.0",
        deleted="del state.many['a']",
        added="state.items.append(2.0)",
    ),
    kind(
        "ChainMap",
        "state = Box(many=collections.ChainMap({}, {'a': 1.0}))" + reads("state.many['a']"),
        replaced="state.many.maps = [{'a': 3.0}]",
        in_place="state.many.maps[1]['a'] = 4.0",
        deleted="del state.many.maps[1]['a']",
        added="state.many['a'] = 5.0",
    ),
    kind(
        "mapping proxy",
        "table = {'a': 1.0}\nstate = Box(many=types.MappingProxyType(table))"
        + reads("state.many['a'] + len(state.many)"),
        replaced="state.many = types.MappingProxyType({'a': 3.0})",
        in_place="table['a'] = 4.0",
        deleted="del table['a']",
        added="table['b'] = 5.0",
    ),
    kind(
        "set",
        "state = Box(many={1.0, 2.0})" + reads("sum(state.many) + (3.0 in state.many)"),
        replaced="state.many = {5.0}",
        deleted="state.many.discard(1.0)",
        added="state.many.add(3.0)",
    ),
    kind(
        "frozenset and tuple",
        "state = Box(many=frozenset({1.0, 2.0}), items=(1.0, [2.0]))" + reads("sum(state.many) + state.items[1][0]"),
        replaced="state.many = frozenset({3.0})",
        in_place="state.items[1][0] = 5.0",
        deleted="del state.items",
    ),
    kind(
        "deque",
        "state = Box(many=collections.deque([1.0, 2.0], maxlen=3))" + reads("state.many[0] + len(state.many)"),
        replaced="state.many = collections.deque([3.0])",
        in_place="state.many.rotate(1)",
        deleted="state.many.clear()",
        added="state.many.appendleft(4.0)",
    ),
    kind(
        "array, bytearray and memoryview",
        "state = Box(many=array.array('d', [1.0]), raw=bytearray(b'ab'))\nstate.view = memoryview(state.raw)"
        + reads("state.many[0] + state.raw[0] + state.view[1]"),
        replaced="state.many = array.array('d', [3.0])",
        in_place="state.raw[0] = 9; state.raw[1] = 7",
        deleted="state.many.pop()",
    ),
    kind(
        "own list and dict",
        """
class Many(list):
    extra = 1.0
class Table(dict):
    def __missing__(self, key):
        return 2.0
state = Box(many=Many([1.0]), table=Table(a=1.0))"""
        + reads("sum(state.many) + state.many.extra + state.table['a'] + state.table['b']"),
        replaced="Table.__missing__ = lambda self, key: 7.0",
        in_place="state.many.extra = 3.0",
        deleted="state.many.clear()",
        added="state.table['b'] = 5.0",
    ),
    kind(
        "weak dictionaries",
        """
kept = [Box(scale=2.0), Box()]
state = Box(many=weakref.WeakValueDictionary(a=kept[0]), keys=weakref.WeakKeyDictionary())
state.keys[kept[1]] = 3.0"""
        + reads("state.many['a'].scale + state.keys[kept[-1]]"),
        replaced="kept.insert(0, Box(scale=4.0)); state.many['a'] = kept[0]",
        in_place="state.keys[kept[1]] = 5.0",
        deleted="del state.many['a']",
    ),
    kind(
        "list of objects",
        "state = Box(many=[Box(scale=1.0), Box(scale=2.0)])"
        + reads("sum(one.scale for one in state.many) + max(o.scale for o in reversed(state.many))"),
        replaced="state.many[0] = Box(scale=3.0)",
        in_place="state.many[1].scale = 4.0",
        deleted="del state.many[0]",
        added="state.many.insert(0, Box(scale=5.0))",
    ),
    kind(
        "global list",
        """
HOOKS = [lambda value: value + 1.0]
state = Box()
def read(state):
    value = 1.0
    for hook in HOOKS:
        value = hook(value)
    return value
""",
        replaced="HOOKS = [lambda value: value * 5]",
        in_place="HOOKS[0] = lambda value: value * 7",
        deleted="HOOKS.clear()",
        added="HOOKS.append(lambda value: value * 3)",
    ),
    kind(
        "NumPy array",
        "import numpy\nstate = Box(many=numpy.ones(3))" + reads("state.many.sum() + state.many[0]"),
        replaced="state.many = numpy.zeros(3)",
        in_place="state.many[0] = 5.0",
        deleted="del state.many",
        added="state.many = numpy.ones(4)",
    ),
)

_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.parts = nn.ModuleList([Part(), Part()])
    def forward(self, x):
        for one in self.parts:
            x = one(x)
        return x * self.scale
class Part(nn.Module):
    gain = 2.0
    def forward(self, x):
        return x * self.gain + (1.0 if self.training else 0.0)
state = Net()
state.eval()
"""
_RUN = """
def read(state):
    return state(torch.ones(()))
"""

MODULES = (
    kind(
        "submodules",
        _NET + _RUN,
        replaced="state.parts[0] = nn.Identity()",
        in_place="state.parts[1].gain = 3.0",
        deleted="del state.parts[0]",
        added="state.parts.append(Part().eval())",
    ),
    kind(
        "training flag",
        _NET + _RUN,
        replaced="state.train()",
        in_place="state.parts[0].train()",
        deleted="del state.parts[0].training",
    ),
    kind(
        "forward",
        _NET + _RUN,
        replaced="Part.forward = lambda self, x: x + 5.0",
        in_place="Part.forward.__code__ = (lambda self, x: x + 6.0).__code__",
        deleted="del Part.forward",
        added="state.parts[0].forward = lambda x: x + 7.0",
    ),
    kind(
        "forward hooks",
        _NET + "handle = state.parts[0].register_forward_hook(lambda module, args, out: out + 1.0)\n" + _RUN,
        replaced="handle.remove(); state.parts[0].register_forward_hook(lambda module, args, out: out + 2.0)",
        in_place="for hook in state.parts[0]._forward_hooks.values(): hook.__code__ = (lambda m, x, y: y + 3).__code__",
        deleted="handle.remove()",
        added="state.parts[1].register_forward_hook(lambda module, args, out: out * 2)",
    ),
    kind(
        "forward pre-hooks",
        _NET + "\nhandle = state.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))\n" + _RUN,
        replaced="handle.remove(); state.register_forward_pre_hook(lambda module, args: (args[0] + 2.0,))",
        deleted="handle.remove()",
        added="state.register_forward_pre_hook(lambda module, args, named: ((args[0] * 3,), named), with_kwargs=True)",
    ),
    kind(
        "hooks of all modules",
        _NET + _RUN,
        added="CLEAN.append(nn.modules.module.register_module_forward_hook(lambda m, args, out: out + 1.0).remove)",
        replaced="CLEAN.append(nn.modules.module.register_module_forward_pre_hook(lambda m, x: (x[0] * 2,)).remove)",
    ),
    kind(
        "parametrization",
        """
from torch.nn.utils import parametrize
class Scale(nn.Module):
    factor = 2.0
    def forward(self, weight):
        return weight * self.factor
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()), requires_grad=False)
    def forward(self, x):
        return x * self.weight
state = Net()
parametrize.register_parametrization(state, "weight", Scale())"""
        + _RUN,
        in_place="state.parametrizations.weight[0].factor = 3.0",
        deleted="parametrize.remove_parametrizations(state, 'weight', leave_parametrized=False)",
        added="parametrize.register_parametrization(state, 'weight', Scale())",
        replaced="Scale.forward = lambda self, weight: weight + 5.0",
    ),
    kind(
        "parameters and buffers",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("shift", torch.ones(()))
        self.bias = None
    def forward(self, x):
        x = x * self.weight + self.shift
        return x if self.bias is None else x + self.bias
state = Net()"""
        + _RUN,
        replaced="state.weight = nn.Parameter(torch.full((), 3.0), requires_grad=False)",
        in_place="state.weight.data = torch.full((), 4.0)",
        deleted="del state.shift",
        added="state.bias = torch.ones(())",
    ),
    kind(
        "containers of modules",
        """
state = nn.ModuleDict({'a': nn.Sequential(nn.Identity(), nn.ReLU()), 'b': nn.Hardtanh(0.0, 0.5)})
state.order = ['a', 'b']
def read(state):
    x = torch.ones(())
    for name in state.order:
        x = state[name](x)
    return x + len(state['a'])
""",
        replaced="state['a'] = nn.Sequential(nn.Hardtanh(0.0, 0.25))",
        in_place="state.order.reverse(); state['b'].max_val = 0.75",
        deleted="del state['b']",
        added="state['a'].append(nn.Hardtanh(0.0, 0.1))",
    ),
    kind(
        "param_groups",
        "state = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=2.0)"
        + reads("state.param_groups[0]['lr'] + len(state.param_groups) + state.defaults['momentum']"),
        replaced="state.param_groups[0]['lr'] = 3.0",
        in_place="state.defaults['momentum'] = 0.5",
        deleted="del state.param_groups[0]['lr']",
        added="state.add_param_group({'params': [nn.Parameter(torch.ones(()))]})",
    ),
    kind(
        "switches of torch",
        "state = Box()"
        + reads("2.0 if torch.backends.mkldnn.enabled else 3.0")
        + "CLEAN.append(functools.partial(torch.backends.mkldnn.set_flags, torch.backends.mkldnn.enabled))\n",
        replaced="torch.backends.mkldnn.set_flags(False)",
    ),
    kind(
        "default dtype",
        "state = Box()\nCLEAN.append(functools.partial(torch.set_default_dtype, torch.get_default_dtype()))"
        + reads("torch.tensor(2.0).element_size()"),
        replaced="torch.set_default_dtype(torch.float64)",
    ),
    kind(
        "what a tensor tells",
        "state = Box(one=torch.ones(3))"
        + reads("state.one.requires_grad + 2 * state.one.is_leaf + 4 * (state.one.grad is None) + len(state.one)"),
        replaced="state.one = torch.ones(4)",
        in_place="state.one.requires_grad_()",
        added="state.one.requires_grad_(); state.one.grad = torch.ones(3)",
        deleted="del state.one",
    ),
    kind(
        "attribute of a tensor",
        "state = Box(one=nn.Parameter(torch.ones(()), requires_grad=False))\nstate.one.tag = 2.0"
        + reads("state.one.tag + getattr(state.one, 'extra', 0.0)"),
        replaced="state.one.tag = 3.0",
        deleted="del state.one.tag",
        added="state.one.extra = 4.0",
    ),
)
