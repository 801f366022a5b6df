"""Random training programs over captured functions, run beside an eager twin and compared bit for bit each time.

A ``Program`` is plain integers, as in ``machine.py``: ``run(Program(...))`` runs a failure again from its text.

Differences from eager that are allowed here, all on the page of CG501. Gradients of an argument that a region uses
several times, and other code as well, are added in another order: no argument goes into two regions. A backward
pass that raises has done other parts of its work by then: afterwards both worlds drop all gradients. A region is freed
and checked as a whole: where eager asks for some gradients alone, ours may raise and eager not, never the other way. A
result that another one is made of is no part of that one's graph: it retains no gradient here, and parameters of such
regions get no hooks.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor, nn

from capture import CaptureError, config, mark_step_begin, recordings, release, reset
from capture.tree import step as _step
from capture.tree import thread_trees
from tests.generated.comparison import Comparison, tensors_of
from tests.generated.gradient_bodies import SEVERAL, loss_of, make_part
from tests.generated.gradient_worlds import KNOWN, LIMIT, ROWS, WIDTH, Part, Pending, World, everything
from tests.generated.machine import Tally
from tests.generated.worlds import Mismatch, fresh
from tests.support.device import rng_state, set_rng_state

# -------------------------------------------------------------------------------------------------------------- actions
Act = Callable[[World, int, int, int], Any]


def part_of(w: World, target: int) -> Part:
    """The part that a number stands for."""
    return w.parts[target % len(w.parts)]


def argument(w: World, part: Part, form: int, seed: int) -> Tensor:
    """An input for a part: plain, a leaf, with a graph of its own, an output of before, something held."""
    if part.ids:
        return (fresh((ROWS,), seed=seed) * 2).long().abs() % 6
    plain_one = fresh((ROWS, WIDTH), seed=seed)
    kind = form % 8
    if kind in (2, 3):
        return plain_one.requires_grad_()
    if kind == 4:
        return fresh((ROWS, WIDTH), seed=seed).requires_grad_() * 1
    if kind == 5:
        kept = [t for pending in w.pending for t in pending.outputs if t.shape == (ROWS, WIDTH)]
        return kept[-1].detach() if kept else plain_one
    if kind == 6:
        return fresh((WIDTH, ROWS), seed=seed).t().requires_grad_(bool(seed % 2))
    return plain_one if kind < 2 else fresh((ROWS - 1, WIDTH), seed=seed)


def through(part: Part, x: Tensor, seed: int) -> Any:
    """The result of one of a part's functions."""
    return part.functions[seed % len(part.functions)](x)


def forward(w: World, target: int, form: int, seed: int) -> Any:
    """A region, and a loss of it that waits for its backward pass."""
    part = part_of(w, target)
    x = argument(w, part, form, seed)
    result = through(part, x, form // 8)
    kept = [t for t in tensors_of(result) if t.is_floating_point()] if seed % 2 else []
    if len(kept) == 1 and kept[0].requires_grad and seed % 8 == 7:
        kept[0].retain_grad()
    await_backward(w, Pending(loss_of(result, form // 16), [x], kept, (part,)))
    return result if seed % 4 == 2 else None


def await_backward(w: World, one: Pending) -> None:
    """Keep a loss, whose backward pass may come later."""
    w.pending.append(one)
    del w.pending[:-LIMIT]


def chain(w: World, target: int, form: int, seed: int) -> None:
    """A region of a region; what lies between is dropped or kept."""
    first = part_of(w, target)
    x = argument(w, first, form % 4, seed)
    y, kept, parts = through(first, x, form // 8), [], [first]
    for turn in range(1 + seed % 2):
        matrices = [t for t in tensors_of(y) if t.is_floating_point() and t.shape == (ROWS, WIDTH)]
        then = part_of(w, target + turn + form // 16 % 3)
        if then.ids or not matrices:
            continue
        kept += matrices[:1] if form // 64 % 2 else []
        parts.append(then)
        y = through(then, matrices[-1], form // 8 + turn)
    await_backward(w, Pending(loss_of(y, form // 128), [x], kept, tuple(parts)))


def go_back(w: World, losses: Sequence[Tensor], **options: Any) -> None:
    """A backward pass. If it raises, gradients may differ from eager's, so all are dropped."""
    try:
        torch.autograd.backward(losses, **options)
    except RuntimeError:
        w.forget_gradients()
        raise


def backward(w: World, target: int, form: int, seed: int) -> Any:
    """The backward pass of something pending: once, retained, twice, two losses at once, into some leaves only."""
    if not w.pending:
        return forward(w, target, form, seed)
    pending = w.pending[-1 - target % len(w.pending)]
    kind = form % 8
    if kind == 0:
        go_back(w, [pending.loss], retain_graph=True)
    elif kind == 1:
        go_back(w, [pending.loss], retain_graph=True)
        go_back(w, [pending.loss])
    elif kind == 2:
        go_back(w, [pending.loss])
        go_back(w, [pending.loss])  # raises, if anything was saved
    elif kind == 3:
        second = w.pending[seed % len(w.pending)]
        if may_go_together(pending, second):
            go_back(w, [pending.loss, second.loss], retain_graph=bool(seed % 2))
            return None
        go_back(w, [pending.loss])
    elif kind == 4:
        leaves = [p for p in pending.parts[0].module.parameters() if p.requires_grad]
        if leaves:
            go_back(w, [pending.loss], inputs=leaves[seed % 2 :: 2] or leaves)
    else:
        go_back(w, [pending.loss])
        w.pending.remove(pending)
    return None


def may_go_together(one: Pending, other: Pending) -> bool:
    """Whether two losses may be differentiated together: no argument may go into several regions."""
    return one.inputs[0] is not other.inputs[0] or (one is not other and len(one.parts) == len(other.parts) == 1)


def differentiate(w: World, target: int, form: int, seed: int) -> Any:
    """Call ``torch.autograd.grad`` for some inputs."""
    if not w.pending:
        return forward(w, target, form, seed)
    pending = w.pending[-1 - target % len(w.pending)]
    of = [p for p in (*pending.inputs, *pending.parts[0].module.parameters()) if p.requires_grad]
    leaves = of[:1] if form % 4 == 0 else of[1:] if form % 4 == 1 else of
    if not leaves:
        return None
    try:
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            pending.loss, leaves, retain_graph=bool(form // 4 % 2), allow_unused=bool(form // 8 % 4)
        )
    except RuntimeError:
        w.forget_gradients()
        raise
    grads = [grad for grad in gradients if grad is not None]
    if seed % 3 == 0:
        hold(w, grads[:1])
    return grads, [grad is None for grad in gradients]


def hold(w: World, tensors: Sequence[Tensor]) -> None:
    """Keep tensors longer than they are used."""
    w.held.extend(tensors)
    del w.held[:-LIMIT]


def hold_gradient(w: World, target: int, form: int, seed: int) -> None:
    """Keep a ``.grad``, or a view of one."""
    grads = [p.grad for p in (*w.parameters(), *[x for one in w.pending for x in one.inputs if x.is_leaf])]
    there = [grad for grad in grads if grad is not None]
    if there:
        one = there[form % len(there)]
        hold(w, [one[:1] if seed % 4 == 3 and one.dim() else one])


def drop(w: World, target: int, form: int, seed: int) -> None:
    """Forget a pending loss, all of them, or something held."""
    if form % 3 == 0 and w.held:
        del w.held[target % len(w.held)]
    elif form % 3 == 1 and w.pending:
        del w.pending[target % len(w.pending)]
    else:
        w.pending.clear()


def zero(w: World, target: int, form: int, seed: int) -> None:
    """Call ``zero_grad``, in both ways, of a module or an optimizer."""
    part = part_of(w, target)
    (part.module if form % 4 < 2 else part.optimizer).zero_grad(set_to_none=bool(form % 2))


def optimize(w: World, target: int, form: int, seed: int) -> None:
    """An optimizer's step in eager code, with or without clipping. Pending backward passes may raise after it."""
    part = part_of(w, target)
    if seed % 4:
        w.pending.clear()
    if seed % 3 == 0:
        nn.utils.clip_grad_norm_(part.module.parameters(), 0.2)
    part.optimizer.step()


def step(w: World, target: int, form: int, seed: int) -> Any:
    """Whole captured steps, one after the other."""
    part, found = part_of(w, target), []
    for turn in range(3 + form % 2):
        if form // 2 % 2 and w.captured:
            mark_step_begin()
        found.append(part.step(argument(w, part, 0, seed + turn)))
    return found if seed % 2 else None


def loop(w: World, target: int, form: int, seed: int) -> Any:
    """An eager training loop around regions."""
    first, then = part_of(w, target), part_of(w, target + form % 3)
    losses = []
    for turn in range(4):
        if form // 4 % 2 and w.captured:
            mark_step_begin()
        for part in {id(p): p for p in (first, then)}.values():
            part.optimizer.zero_grad(set_to_none=bool(form // 8 % 2))
        y = through(first, argument(w, first, form // 16 % 4, seed + turn), seed)
        if then is not first and not then.ids:
            y = through(then, next(t for t in tensors_of(y) if t.is_floating_point()), seed)
        loss = loss_of(y, 2 + form // 64)
        go_back(w, [loss])
        for part in {id(p): p for p in (first, then)}.values():
            part.optimizer.step()
        losses.append(loss.detach())
    return losses


def accumulate(w: World, target: int, form: int, seed: int) -> Any:
    """Micro-batches through one region, each forward and backward or all forwards first."""
    part = part_of(w, target)
    losses = []
    for turn in range(4):
        losses.append(loss_of(through(part, argument(w, part, form % 4, seed + turn), seed), form // 16) / 4)
        if form // 4 % 2:
            go_back(w, [losses[-1]])
    for loss in losses if not form // 4 % 2 else ():
        go_back(w, [loss])
    return [loss.detach() for loss in losses]


def without(w: World, target: int, form: int, seed: int) -> Any:
    """Make a call without gradients."""
    part = part_of(w, target)
    with (torch.no_grad, torch.inference_mode)[form % 2]():
        found = tensors_of(through(part, argument(w, part, 0, seed), seed))
        return [t.clone() for t in found] if form % 2 else found


def write(w: World, target: int, form: int, seed: int) -> None:
    """Write in place into what the caller can reach. Another loss of a written output may be made then."""
    outputs = [(pending, t) for pending in w.pending for t in pending.outputs if t.dim()]
    if form % 2 and outputs:
        pending, tensor = outputs[target % len(outputs)]
        if form // 2 % 3 == 0:
            tensor.add_(1)
        elif form // 2 % 3 == 1:
            tensor[:1].mul_(2)
        else:
            with torch.no_grad():
                tensor.mul_(0.5)
        if form // 8 % 2:
            await_backward(w, Pending(loss_of([tensor], form // 16), pending.inputs, [tensor], pending.parts))
        return
    inputs = [x for pending in w.pending for x in pending.inputs if x.is_floating_point()]
    there = [*w.held, *[p.grad for p in w.parameters() if p.grad is not None], *inputs, *w.parameters()]
    with torch.no_grad():
        there[target * 7 % len(there)].mul_(0.5).add_(seed % 3)


def again(w: World, target: int, form: int, seed: int) -> None:
    """Differentiate one more loss of outputs that were kept."""
    kept = [one for one in w.pending if one.outputs]
    if kept:
        one = kept[target % len(kept)]
        some = one.outputs if len(one.parts) == 1 else [one.outputs[form % len(one.outputs)]]
        await_backward(w, Pending(loss_of(some, form), one.inputs, one.outputs, one.parts))


def replace(w: World, target: int, form: int, seed: int) -> None:
    """Replace a parameter, its memory or its gradient."""
    part = part_of(w, target)
    places = [(m, name) for m in part.module.modules() for name, p in m._parameters.items() if p is not None]
    member, name = places[form // 8 % len(places)]
    old: Any = member._parameters[name]
    new = fresh(tuple(old.shape), seed=seed)
    kind = form % 8
    if kind < 3:
        old.data = new
    elif kind < 5:
        setattr(member, name, nn.Parameter(new))
        w.former = [*w.former[-1:], old]
        if kind == 4:
            part.optimizer.add_param_group({"params": [member._parameters[name]]})
    elif kind == 5:
        old.grad = new
    elif kind == 6:
        old.grad = None
    else:
        part.module.load_state_dict({key: value * 0.5 for key, value in part.module.state_dict().items()})


def freeze(w: World, target: int, form: int, seed: int) -> None:
    """Freeze or unfreeze a parameter, or all of a part."""
    part = part_of(w, target)
    parameters = list(part.module.parameters())
    some = parameters if form % 4 == 0 else [parameters[form // 4 % len(parameters)]]
    for one in some:
        one.requires_grad_(bool(seed % 3))


def train(w: World, target: int, form: int, seed: int) -> None:
    """Switch between training and evaluation."""
    part_of(w, target).module.train(bool(seed % 2))


def settings(w: World, target: int, form: int, seed: int) -> None:
    """Set another learning rate."""
    part_of(w, target).optimizer.param_groups[0]["lr"] = (0.1, 0.05, 0.02)[seed % 3]


def hook(w: World, target: int, form: int, seed: int) -> None:
    """A hook on a parameter, or one less."""
    if w.hooks and form % 2:
        w.hooks.pop(seed % len(w.hooks)).remove()
        return
    part = part_of(w, target)
    parameters = [p for p in part.module.parameters() if p.requires_grad and part.name not in SEVERAL]
    if parameters:
        w.hooks.append(parameters[form // 2 % len(parameters)].register_hook(_halved))


def _halved(grad: Tensor) -> Tensor:
    return grad * 0.5


def reseed(w: World, target: int, form: int, seed: int) -> None:
    """Seed the default generator."""
    torch.manual_seed(seed)


def mark(w: World, target: int, form: int, seed: int) -> None:
    """Begin a new step."""
    if w.captured:
        mark_step_begin()


def forget(w: World, target: int, form: int, seed: int) -> None:
    """Call ``reset`` or ``release`` for one function or all."""
    if w.captured:
        one = w.decorated[target % len(w.decorated)] if form % 4 else None
        (reset if seed % 2 else release)(one)


def collect(w: World, target: int, form: int, seed: int) -> None:
    """Collect garbage."""
    if w.captured:
        gc.collect()


def disabled(w: World, target: int, form: int, seed: int) -> Any:
    """A forward pass while capturing is switched off."""
    with config.patch(enabled=False):
        return forward(w, target, form, seed)


ACTIONS: dict[str, tuple[int, Act]] = {
    "forward": (8, forward),
    "chain": (4, chain),
    "backward": (10, backward),
    "differentiate": (2, differentiate),
    "hold_gradient": (2, hold_gradient),
    "drop": (2, drop),
    "zero": (2, zero),
    "optimize": (2, optimize),
    "step": (6, step),
    "loop": (5, loop),
    "accumulate": (4, accumulate),
    "without": (1, without),
    "write": (3, write),
    "again": (2, again),
    "replace": (3, replace),
    "freeze": (1, freeze),
    "train": (1, train),
    "settings": (1, settings),
    "hook": (1, hook),
    "reseed": (1, reseed),
    "mark": (2, mark),
    "forget": (1, forget),
    "collect": (1, collect),
    "disabled": (1, disabled),
}
DECK: tuple[str, ...] = tuple(name for name, (weight, _) in ACTIONS.items() for _ in range(weight))


# -------------------------------------------------------------------------------------------------------------- running
@frozen
class Program:
    """A program as integers. ``cast``: (region, step, optimizer) each; steps: (action, target, form, seed)."""

    cast: tuple[tuple[int, int, int], ...]
    steps: tuple[tuple[int, int, int, int], ...]
    poison: bool = False
    clone: bool = False
    """Captured with ``outputs="clone"``."""
    verify: bool = False
    rounds: int = 1
    """How often all steps are done, with other values."""
    bind: bool = False
    """Captured with ``inputs="bind"``."""


def build(captured: bool, program: Program) -> World:
    """A world as it stands before the first action."""
    world = World(captured, "clone" if program.clone else "preserve", "bind" if program.bind else "auto")
    torch.manual_seed(11)
    world.parts = [make_part(world, *one) for one in program.cast]
    return world


def micro(program: Program) -> Iterator[tuple[str, int, int, int]]:
    """The program's actions one by one."""
    for turn in range(program.rounds):
        for action, target, form, seed in program.steps:
            name = DECK[action % len(DECK)]
            if name not in KNOWN:
                yield name, target, form, seed + 5 * turn


class Runner:
    """Runs one program in both worlds."""

    def __init__(self, program: Program, tally: Tally | None = None) -> None:
        self._program, self._tally = program, tally
        self._log: list[str] = []

    def run(self) -> None:
        """Raise ``Mismatch`` where the worlds part, with the actions up to there."""
        thread_trees.forget_trees()
        _step.marks().begun = 0
        program, state = self._program, rng_state()
        verify: Literal["first", "off"] = "first" if program.verify else "off"
        try:
            with warnings.catch_warnings(), config.patch(cache=False, poison=program.poison, verify=verify):
                warnings.simplefilter("ignore")
                self._run()
        except Mismatch as error:
            raise Mismatch(f"{error}\n{program!r}\n  " + "\n  ".join(self._log)) from error
        finally:
            set_rng_state(state)

    def _run(self) -> None:
        eager, ours = build(False, self._program), build(True, self._program)
        comparison = Comparison(everything)
        for name, target, form, seed in micro(self._program):
            part = part_of(eager, target)
            self._log.append(f"{name} {part.name} ({part.said}) target={target} form={form} seed={seed}")
            outcomes = [_outcome(world, ACTIONS[name][1], target, form, seed) for world in (eager, ours)]
            if outcomes == [None, REFUSED] and _is_partial(name, form, ours):
                for world in (eager, ours):
                    world.forget_gradients()
                    world.pending.clear()
            elif outcomes[0] != outcomes[1]:
                raise Mismatch(f"{outcomes[0]} eagerly, {outcomes[1]} captured")
            self._log[-1] += f" -> {outcomes[0]}" if outcomes[0] else ""
            comparison.check(eager, ours)
            for world in (eager, ours):
                world.scratch.clear()
        self._count(ours)

    def _count(self, ours: World) -> None:
        if self._tally is None:
            return
        for part in ours.parts:
            for name, functions in ((part.name, part.functions), (f"step {part.said}", [part.step])):
                for function in functions:
                    try:
                        counted = recordings(part.module if part.name == "recomputed" and function is not part.step
                                             else function)  # fmt: skip
                    except CaptureError:
                        continue
                    self._tally.add(name, counted.body_runs + counted.replays, counted.replays)
                    self._tally.recordings += counted.recordings


def _is_partial(name: str, form: int, world: World) -> bool:
    """Whether only some gradients of a region are asked for, or gradients of only some results: eager then runs only
    the nodes that these need."""
    some = (name == "differentiate") or (name == "backward" and form % 8 == 4)
    return some or any(part.name in SEVERAL for part in world.parts)


REFUSED = "autograd refuses"
_REFUSALS = ("one of the variables needed for gradient", "Trying to backward through the graph a second time")
"""Errors of eager and of a replay may differ between these: which one comes first depends on the order of the nodes."""


def _outcome(world: World, act: Act, target: int, form: int, seed: int) -> str | None:
    """The type of what an action raised, and how its text begins. The result goes to the world's scratch."""
    with world.modes():
        try:
            world.scratch.append(("result", act(world, target, form, seed)))
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, CaptureError):
                raise
            text = str(error)
            return REFUSED if text.startswith(_REFUSALS) else f"{type(error).__name__}: {text[:60]}"
    return None


def run(program: Program, tally: Tally | None = None) -> None:
    """Run one program in both worlds."""
    Runner(program, tally).run()
