"""Small programs that keep outputs of captured functions, in every way that Python has.

Each takes ``cap``, which captures a function or returns it unchanged, and ``said``, to which it reports values as they
are at that time, and values that it still holds at its end.
"""

from __future__ import annotations

import collections
import copy
import functools
import gc
import io
import itertools
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import mark_step_begin

Cap = Callable[..., Any]
CALLS = 9
SIZE = 6


def of(number: int, *shape: int) -> Tensor:
    count = torch.Size(shape or (3, SIZE)).numel()
    return ((torch.arange(count) % 7 - 3) * 0.25 + number * 0.5).reshape(shape or (3, SIZE))


def one(x: Tensor) -> Tensor:
    return torch.relu(x) * 2 + 1


def two(x: Tensor) -> Tensor:
    return (torch.tanh(x) - 0.5).exp()


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 3 - 1
    return y, torch.sin(y)


def views(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 3 - 1
    return y, y.t()[1:]


def add(x: Tensor, y: Tensor) -> Tensor:
    return x * 0.5 + torch.sin(y)


class Net(nn.Module):
    """Keeps what it saw last, and a running state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.out = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.last: Any = None
        self.state = torch.zeros(3, SIZE)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.last = y.detach() * 2
        self.state = self.state * 0.5 + y.detach()
        return torch.as_tensor(self.out(y))


def net_of(cap: Cap, **options: Any) -> tuple[Net, Any]:
    net = Net().to(torch.get_default_device())
    return net, cap(net, **options)


class Said:
    """What a program reported."""

    def __init__(self) -> None:
        self.now: list[Any] = []
        self.held: list[Any] = []

    def see(self, *values: Any) -> None:
        """Note these values as they are now."""
        self.now += [value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value) for value in values]

    def hold(self, *values: Any) -> None:
        """Note these values as they are at the end of the program."""
        self.held += values


def in_a_list(cap: Cap, said: Said) -> None:
    f = cap(one)
    for number in range(CALLS):
        said.hold(f(of(number)))


def in_a_dict_by_turns(cap: Cap, said: Said) -> None:
    f, kept = cap(one), {}
    for number in range(CALLS):
        kept[number % 3] = f(of(number))
        said.see(*kept.values())
    said.hold(*kept.values())


def in_attributes(cap: Cap, said: Said) -> None:
    class Holder:
        of_class: Any = None

    f, g, holder = cap(one), cap(two), Holder()
    for number in range(CALLS):
        holder.before, holder.now = getattr(holder, "now", None), f(of(number))  # type: ignore[attr-defined]
        Holder.of_class = g(of(number)) if number % 3 else Holder.of_class
        said.see(holder.before, holder.now, Holder.of_class)  # type: ignore[attr-defined]


def as_gradients(cap: Cap, said: Said) -> None:
    f, parameter = cap(one), nn.Parameter(of(0))
    for number in range(CALLS):
        parameter.grad = f(of(number))
        said.hold(parameter.grad)
        said.see(parameter.grad.sum())
        f(of(number + 3))
    said.hold(parameter.grad)


def in_partials(cap: Cap, said: Said) -> None:
    f = cap(one)
    makers = []
    for number in range(CALLS):
        y = f(of(number))
        makers.append(functools.partial(torch.mul, y, 2))
        said.see(*[make() for make in makers])


def weakly(cap: Cap, said: Said) -> None:
    f = cap(one)
    references = []
    for number in range(CALLS):
        y = f(of(number))
        references.append(weakref.ref(y))
        if number % 2:
            said.hold(y)
        del y
        said.see([reference() is None for reference in references])


def views_without_their_base(cap: Cap, said: Said) -> None:
    f = cap(one)
    for number in range(CALLS):
        said.hold(f(of(number))[1:], f(of(number + 1)).t()[2], f(of(number + 2)).view(-1)[::2])


def views_of_views(cap: Cap, said: Said) -> None:
    f = cap(one)
    for number in range(CALLS):
        view = f(of(number))[1:].t()[1:].flatten()[1:].unfold(0, 2, 1)
        said.hold(view, view.detach()[0], view.view(torch.int32))


def through_another_function(cap: Cap, said: Said) -> None:
    f, g = cap(one), cap(two)
    for number in range(CALLS):
        y = f(of(number))
        z = g(y)
        said.hold(*((y, z) if number % 3 == 0 else (y,) if number % 3 == 1 else (z,)))


def in_swapped_order(cap: Cap, said: Said) -> None:
    f, g, h = cap(one), cap(two), cap(add)
    for number in range(2 * CALLS):
        order = [f, g] if number % 3 else [g, f]
        first, second = [function(of(number)) for function in order]
        said.see(first, second, h(first, second), h(second, first))
        if number % 4 == 1:
            said.hold(second)
        if number % 4 == 2:
            said.hold(first)


def by_threads(cap: Cap, said: Said) -> None:
    f, kept = cap(one), {}

    def run(part: int) -> None:
        with torch.no_grad():
            for number in range(CALLS):
                kept[part, number] = f(of(number + part))

    for part in range(3):
        thread = threading.Thread(target=run, args=(part,))
        thread.start()
        thread.join()
        said.see(f(of(part)))
    said.hold(*[kept[key] for key in sorted(kept)])


def beside_exceptions(cap: Cap, said: Said) -> None:
    def fails(x: Tensor, stop: bool) -> Tensor:
        y = torch.relu(x) * 2
        if stop:
            raise ValueError("stopped")
        return y + 1

    f, g = cap(fails), cap(two)
    for number in range(CALLS):
        said.hold(f(of(number), False))
        try:
            f(of(number), number % 2 == 0)
        except ValueError as error:
            said.hold(error)
        said.hold(g(of(number)))
    said.held = [value for value in said.held if isinstance(value, Tensor)]


def in_tracebacks(cap: Cap, said: Said) -> None:
    f = cap(one)

    def fails(number: int) -> None:
        y = f(of(number))
        raise ValueError(y.sum().item())

    errors = []
    for number in range(CALLS):
        try:
            fails(number)
        except ValueError as error:
            errors.append(error)
        f(of(number + 1))
    for one_error in errors:
        frame = one_error.__traceback__.tb_next.tb_frame  # type: ignore[union-attr]
        said.hold(frame.f_locals["y"])


def in_generators(cap: Cap, said: Said) -> None:
    f = cap(one)

    def frames(number: int) -> Any:
        y = f(of(number))
        yield None
        yield y

    running = []
    for number in range(CALLS):
        running.append(frames(number))
        next(running[-1])
    said.hold(*[next(frame) for frame in running])


def the_last_three(cap: Cap, said: Said) -> None:
    f, kept = cap(one), collections.deque(maxlen=3)  # type: ignore[var-annotated]
    for number in range(CALLS):
        kept.append(f(of(number)))
        said.see(torch.stack(list(kept)))
    said.hold(*kept)


def written_in_place(cap: Cap, said: Said) -> None:
    f, g = cap(one), cap(two)
    for number in range(CALLS):
        y = f(of(number))
        version = y._version
        y.mul_(2).add_(number)
        y[0] = -1
        said.see(y._version - version)
        z = g(y)
        z.sub_(y)
        said.hold(y, z)


def recurrence(cap: Cap, said: Said) -> None:
    f, h = cap(add), of(0)
    for number in range(3 * CALLS):
        h = f(h, of(number))
        said.see(h)
        if number % 5 == 0:
            said.hold(h)


def recurrence_of_two(cap: Cap, said: Said) -> None:
    f, a, b = cap(lambda a, b: (a * 0.5 + b, b - a * 0.25)), of(0), of(1)
    for number in range(2 * CALLS):
        a, b = f(a, b) if number % 3 else f(b, a)
        said.see(a, b)
    said.hold(a, b)


def swapped_buffers(cap: Cap, said: Said) -> None:
    f, a, b = cap(one), of(0), of(1)
    for _ in range(2 * CALLS):
        a, b = f(b) * 0.25, a
        said.see(a, b)


def ids_that_grow(cap: Cap, said: Said) -> None:
    f, ids = cap(lambda ids: torch.cat([ids, (ids.sum(-1, keepdim=True) * 7 + 1) % 11], -1)), torch.ones(1, 2)
    seen = []
    for _ in range(CALLS):
        ids = f(ids)
        seen.append(ids)
    said.hold(*seen)


def a_moving_average(cap: Cap, said: Said) -> None:
    f, g, average = cap(one), cap(lambda a, y: a * 0.9 + y * 0.1), None
    for number in range(2 * CALLS):
        y = f(of(number))
        average = y if average is None else g(average, y)
        said.see(average)


def the_best_so_far(cap: Cap, said: Said) -> None:
    f, best = cap(two), None
    for number in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9):
        y = f(of(number) * 0.1)
        best = y if best is None or y.sum() > best.sum() else best
        said.see(best)
    said.hold(best)


def two_outputs_of_which_one_is_kept(cap: Cap, said: Said) -> None:
    f = cap(both)
    for number in range(2 * CALLS):
        y, z = f(of(number))
        said.see(y, z)
        said.hold(*((y,) if number % 4 == 1 else (z,) if number % 4 == 2 else ()))


def outputs_that_are_views_of_each_other(cap: Cap, said: Said) -> None:
    f = cap(views)
    for number in range(CALLS):
        y, v = f(of(number))
        (v if number % 2 else y).add_(number)
        said.see(y, v, y._version, v._version)
        said.hold(*((v,) if number % 3 else (y,)))


def one_object_twice(cap: Cap, said: Said) -> None:
    def body(x: Tensor) -> Any:
        y = x * 2
        return {"a": y, "b": [y, (y, x + 1)], "c": None}

    f = cap(body)
    for number in range(CALLS):
        results = f(of(number))
        said.see(results["a"] is results["b"][0], results["b"][0] is results["b"][1][0])
        results["a"].add_(1)
        said.hold(results["b"][0], results["b"][1][1])


def a_cache_of_outputs(cap: Cap, said: Said) -> None:
    f, g, cache = cap(one), cap(lambda *parts: torch.cat(parts).sum(0)), []
    for number in range(CALLS):
        cache.append(f(of(number)))
        said.see(g(*cache[-3:]))
    said.hold(*cache)


def changed_by_a_captured_function(cap: Cap, said: Said) -> None:
    f, g = cap(one), cap(lambda y, x: y.add_(x).sum())
    for number in range(CALLS):
        y = f(of(number))
        said.see(g(y, of(1)), y, y._version)
        said.hold(y)
        if number % 2:
            said.see(g(said.held[number // 2], of(2)))


def as_a_buffer_of_a_module(cap: Cap, said: Said) -> None:
    f, net = cap(one), nn.Module()
    net.register_buffer("memory", of(0))

    def reads(x: Tensor) -> Tensor:
        return x + net.memory * 2  # type: ignore[operator]

    g = cap(reads)
    for number in range(2 * CALLS):
        said.see(g(of(number)))
        if number % 3 == 0:
            net.memory = f(of(number))
        if number % 5 == 0:
            said.hold(net.memory)
    said.see(net.memory)


def as_a_parameter(cap: Cap, said: Said) -> None:
    f, linear = cap(one), nn.Linear(SIZE, SIZE, bias=False)
    g = cap(linear)
    for number in range(2 * CALLS):
        if number % 4 == 0:
            linear.weight.data = f(of(number, SIZE, SIZE))
        said.see(g(of(number)))
        if number % 6 == 0:
            said.hold(linear.weight.data)


def states_that_the_body_keeps(cap: Cap, said: Said) -> None:
    net, run = net_of(cap)
    for number in range(2 * CALLS):
        y = run(of(number))
        said.see(y, net.last, net.state)
        if number % 3 == 1:
            said.hold(net.last, net.state, y)


def copied_and_pickled(cap: Cap, said: Said) -> None:
    f = cap(one)
    for number in range(CALLS):
        y = f(of(number))
        file = io.BytesIO()
        torch.save({"y": y, "view": y[1:]}, file)
        said.see(file.getbuffer().nbytes)
        file.seek(0)
        again = torch.load(file)
        said.hold(copy.deepcopy(y), copy.copy(y), pickle.loads(pickle.dumps(y)), *again.values())  # noqa: S301
        said.see(y.untyped_storage().nbytes(), y.is_shared(), y.is_inference(), y.is_leaf, y.grad_fn)


def the_storage_alone(cap: Cap, said: Said) -> None:
    f = cap(one)
    for number in range(CALLS):
        storage = f(of(number)).untyped_storage()
        said.hold(torch.empty(0).set_(storage, 0, (3, SIZE), (SIZE, 1)))


def given_other_memory(cap: Cap, said: Said) -> None:
    f = cap(one)
    for number in range(CALLS):
        y, z = f(of(number)), f(of(number + 1))
        y.set_(z)
        z.data = of(number + 5) * 2
        said.hold(y, z, f(of(number + 2)))


def made_smaller(cap: Cap, said: Said) -> None:
    f = cap(one)
    for number in range(CALLS):
        y = f(of(number))
        y.resize_(2, 2)
        torch.add(y, 1, out=y)
        torch.add(f(of(number)), y[0, 0], out=(z := f(of(number + 1))))
        said.hold(y, z)


def shapes_that_vary(cap: Cap, said: Said) -> None:
    f, g = cap(one, max_recordings=32), cap(two, max_recordings=32)
    for number in range(4 * CALLS):
        y = f(of(number, number * 7 % 5 + 1, SIZE))
        z = g(y)
        said.hold(*((y,) if number % 3 == 0 else (z,) if number % 7 == 0 else ()))
        said.see(z)


def after_the_functions_are_gone(cap: Cap, said: Said) -> None:
    for turn in range(4):
        f, g = cap(lambda x, turn=turn: x * (turn + 2)), cap(lambda x, turn=turn: x - turn)
        for number in range(4):
            said.hold(f(of(number)))
            said.see(g(of(number)))
        said.hold(g(said.held[-1]))
        del f, g
        if turn % 2:
            gc.collect()


def across_marks(cap: Cap, said: Said) -> None:
    f, g = cap(one), cap(two)
    for number in range(2 * CALLS):
        mark_step_begin()
        y = f(of(number))
        z = g(y)
        said.hold(*((y, z) if number % 5 == 0 else (z,) if number % 3 == 0 else ()))
        said.see(f(z), g(f(y)))


def in_inference_mode_by_turns(cap: Cap, said: Said) -> None:
    f = cap(one)
    for number in range(2 * CALLS):
        with torch.inference_mode(number % 3 == 0):
            y = f(of(number))
        said.see(y.is_inference(), y)
        said.hold(y)


def a_chain_of_many(cap: Cap, said: Said) -> None:
    layers = [cap(lambda x, k=k: torch.sin(x * (k + 1)) + 0.5) for k in range(6)]
    draw = random.Random(1)
    for number in range(2 * CALLS):
        x, kept = of(number), draw.randrange(6)
        for at, layer in enumerate(layers):
            x = layer(x)
            if at == kept and number % 2:
                said.hold(x)
        said.see(x)


def let_go_at_random(cap: Cap, said: Said) -> None:
    functions, draw = [cap(one), cap(two), cap(both)], random.Random(7)
    kept: list[Any] = []
    for number in range(5 * CALLS):
        result = functions[draw.randrange(3)](draw.choice(kept) if kept and draw.random() < 0.4 else of(number))
        kept += result if isinstance(result, tuple) else [result]
        while kept and draw.random() < 0.5:
            kept.pop(draw.randrange(len(kept)))
        said.see(*kept)
    said.hold(*kept)


def an_argument_given_back(cap: Cap, said: Said) -> None:
    f, g, h = cap(one), cap(lambda y: (y, y[1:], y + 1)), cap(lambda y: y.mul_(2))
    for number in range(CALLS):
        y = f(of(number))
        same, view, other = g(y)
        view.add_(1)
        said.see(same is y, h(y) is y, view._base is y)
        said.hold(view, *((other,) if number % 2 else (same,)))


def in_c_containers(cap: Cap, said: Said) -> None:
    f = cap(one)
    calls = []
    for number in range(CALLS):
        calls.append(functools.partial(torch.add, f(of(number)), 1))
        calls.append(functools.partial(next, itertools.cycle([f(of(number + 1))])))
        said.see(*[call() for call in calls])


def repeated_order(cap: Cap, said: Said) -> None:
    f, g = cap(one), cap(two)
    for number in range(2 * CALLS):
        x = of(number)
        for function in ((g, f), (f, g), (f, f), (f, g, g))[number % 4]:
            x = function(x)
        said.hold(x)
        if number % 5 == 4:
            said.held = said.held[3:]
        said.see(*said.held)


def kept_by_hooks(cap: Cap, said: Said) -> None:
    linear, seen = nn.Linear(SIZE, SIZE), []
    with torch.no_grad():
        linear.weight.copy_(of(1, SIZE, SIZE))
        linear.bias.zero_()
    linear.register_forward_hook(lambda _, args, result: seen.append(result.detach() * 2))
    f = cap(lambda x: torch.relu(linear(x)))
    for number in range(CALLS):
        said.see(f(of(number)), len(seen))
    said.hold(*[value.detach() for value in seen])


NO_GRAD = [
    in_a_list, in_a_dict_by_turns, in_attributes, as_gradients, in_partials, weakly, views_without_their_base,
    views_of_views, through_another_function, in_swapped_order, by_threads, beside_exceptions, in_tracebacks,
    in_generators, the_last_three, written_in_place, recurrence, recurrence_of_two, swapped_buffers, ids_that_grow,
    a_moving_average, the_best_so_far, two_outputs_of_which_one_is_kept, outputs_that_are_views_of_each_other,
    one_object_twice, a_cache_of_outputs, changed_by_a_captured_function, as_a_buffer_of_a_module, as_a_parameter,
    states_that_the_body_keeps, copied_and_pickled, the_storage_alone, given_other_memory, made_smaller,
    shapes_that_vary, after_the_functions_are_gone, across_marks, in_inference_mode_by_turns, a_chain_of_many,
    let_go_at_random, an_argument_given_back, in_c_containers, repeated_order, kept_by_hooks,
]  # fmt: skip
