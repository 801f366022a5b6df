"""``make_graphed_callables`` with the signature of ``torch.cuda.make_graphed_callables``, on captured functions.

Each callable is captured and run with its sample arguments until forward and backward passes replay: alone, all of them
one after the other in one step, and where the results of one are what the next one takes, fed to it. What these runs
wrote is put back after each of them, so that each of them meets what the first real call will meet.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, overload

import torch

from capture.api.decorator import capture, captured_state
from capture.api.inspect import recordings, warmup
from capture.api.warmup import leaves_of
from capture.core.config import current, patch
from capture.core.data import define, frozen
from capture.core.errors import AnnotationError, CaptureError
from capture.key import pytree
from capture.key.tensor_kind import refuses
from capture.observe import dispatch_mode
from capture.observe import run as _run
from capture.observe.capture_lock import locked_in_turn
from capture.observe.gradient_uses import hooks_off
from capture.observe.probes.host_reads import no_autocast_cache
from capture.state import diff

F = TypeVar("F", bound=Callable[..., Any])
Ts = TypeVarTuple("Ts")

_PASSES = 8  # a backward pass replays in its third run; a few more for state that a first call sets up
_NAME = "make_graphed_callables"


class UnusedInputError(CaptureError, RuntimeError):
    """An argument or parameter needs gradients, and no result of its callable depends on it."""


@overload
def make_graphed_callables(
    callables: F,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = ...,
    allow_unused_input: bool = ...,
    pool: Any = ...,
) -> F: ...
@overload
def make_graphed_callables(
    callables: tuple[*Ts],
    sample_args: tuple[tuple[Any, ...], ...],
    num_warmup_iters: int = ...,
    allow_unused_input: bool = ...,
    pool: Any = ...,
) -> tuple[*Ts]: ...


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
) -> Any:
    """Capture callables, and record the forward and backward passes of calls like the samples.

    A module comes back as the same object with its ``forward`` captured, a function as a captured function; a tuple of
    callables as a tuple. Modules, tensors, gradients, Python state and generators are afterwards as they were before,
    and the samples are neither written nor kept. What cannot be recorded runs eagerly, and a warning says why.

    Args:
        callables: a module or function, or a tuple of them in the order in which they run.
        sample_args: positional arguments of a call, or a tuple of those, one for each callable. Shapes, strides,
            dtypes, devices and ``requires_grad`` are those of the calls to come; others make recordings of their own.
            Values that are no tensors may be among them. Autocast and grad mode should be as in these calls.
        num_warmup_iters: eager runs of forward and backward pass before anything is recorded, for libraries that choose
            kernels or set themselves up in their first calls. Default 3, as torch has it; one is made for 0.
        allow_unused_input: take arguments and parameters that need gradients and that no result depends on; their
            gradients are None. Default False, as that is a mistake in most cases.
        pool: checked and not used. All recordings of a thread share one pool, whose memory only this library hands out.

    Raises:
        AnnotationError: arguments of another form, or what ``capture`` does not take.
        UnusedInputError: as said above. After any error the modules have the ``forward`` they had before.
    """
    _check_options(num_warmup_iters, allow_unused_input, pool)
    given = _given(callables, sample_args)
    with contextlib.ExitStack() as on_error:
        parts = []
        for given_callable in given:
            if isinstance(given_callable.target, torch.nn.Module):
                on_error.callback(
                    _put_forward_back, given_callable.target, given_callable.target.__dict__.get("forward")
                )
            parts.append(_Part.of(given_callable))
        if current().enabled:
            _warm_up(parts, max(num_warmup_iters, 1), allow_unused_input)
        on_error.pop_all()
    made = tuple(part.made for part in parts)
    return made if isinstance(callables, tuple) else made[0]


@frozen
class _Target:
    """One callable and its sample arguments, as the caller gave them."""

    source: str
    """``"callables"`` or ``"callables[1]"``, with its name; for messages."""
    target: Any
    args: tuple[Any, ...]


@define(eq=False)
class _Part:
    """One callable during its warm-up."""

    given: _Target
    made: Any
    """The object that the caller gets."""
    run: Callable[..., Any]
    """The captured function itself: hooks of a module run around it in real calls, and not here."""
    args: tuple[Any, ...]
    """The samples; those that need gradients stand in by leaves of their own on the same memory."""
    watched: _run.ObservedRun | None = None
    """The first run, which tells what there is to put back."""

    @classmethod
    def of(cls, given: _Target) -> _Part:
        """The part for a target, with its callable captured."""
        made = capture(given.target)
        run = made.forward if isinstance(made, torch.nn.Module) else made
        stand_ins: dict[int, torch.Tensor] = {}

        def leaf_of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            return stand_ins.setdefault(id(value), value.detach().requires_grad_())

        return cls(given, made, run, pytree.replace_leaves(given.args, leaf_of))

    def watch(self) -> None:
        """Run it once, eagerly and watched, and undo that."""
        captured = captured_state(self.run)
        try:
            values = captured.binder.values(*self.args)
        except TypeError as error:
            raise AnnotationError(f"{_NAME}: the sample arguments of {self.given.source} do not fit: {error}") from None
        call = captured.call(values, leaves_of(values))
        watched = self.watched = locked_in_turn(_run.run_watched, call, dispatch_mode.ObserveMode(undo=True))
        raised, watched.result, watched.error = watched.error, None, None
        self.put_back()
        if raised is not None:
            raised.add_note(f"{_NAME} ran {self.given.source} with its sample arguments")
            raise raised

    def put_back(self) -> None:
        """Undo what runs since the first one wrote: tensors, Python state, generators."""
        if self.watched is not None:
            self.watched.changed = diff.changes(self.watched.before)
            _run.undo(self.watched)
            self.watched.changed = []

    def differentiable(self) -> dict[int, tuple[str, torch.Tensor]]:
        """By ``id``, what needs gradients among arguments and parameters, with names. Other tensors, such as a
        closure's, have no name."""
        assert self.watched is not None
        named: list[tuple[str, torch.Tensor]] = [
            (f"argument '{path}'", leaf) for path, leaf in self.watched.call.paths() if isinstance(leaf, torch.Tensor)
        ]
        if isinstance(self.made, torch.nn.Module):
            named += [(f"parameter '{name}'", parameter) for name, parameter in self.made.named_parameters()]
        named += [("", tensor) for owners in self.watched.before.tensors.values() for _, tensor in owners]
        wanted = [(name, tensor) for name, tensor in named if tensor.requires_grad and not refuses(tensor)]
        return {id(tensor): (name, tensor) for name, tensor in reversed(wanted)}


def _warm_up(parts: Sequence[_Part], num_iters: int, allow_unused: bool) -> None:
    """Bring all of them to replay, and undo the runs."""
    torch.clear_autocast_cache()  # it refers weakly to weights it cast, which keeps them from being lent to a body
    try:
        for part in parts:
            part.watch()
        for part in parts:
            with no_autocast_cache():
                _run_eagerly(part, num_iters, allow_unused)
            warmup(part.run)(*part.args)
        recorded = [part for part in parts if recordings(part.run).recordings]
        _until_settled(recorded, fed=False)
        if len(recorded) > 1:
            _until_settled(recorded, fed=True)
            _until_settled(recorded, fed=True, keeps=False)  # what only one of them uses comes back as one gradient
    finally:
        for part in reversed(parts):
            part.put_back()
            part.watched = None
        torch.clear_autocast_cache()  # a weight that was cast here would be used by the caller's own code


def _run_eagerly(part: _Part, num_iters: int, allow_unused: bool) -> None:
    needed = part.differentiable()
    for _ in range(num_iters):
        with patch(enabled=False):
            result = part.run(*part.args)
            gradients = _gradients([result], needed)
        del result
        part.put_back()
        unused = [name for key, (name, _) in needed.items() if name and gradients and gradients[key] is None]
        if unused and not allow_unused:
            raise UnusedInputError(
                f"{_NAME}: no result of {part.given.source} depends on {', '.join(sorted(unused))}, which need "
                "gradients: these would be None in every backward pass. Call requires_grad_(False) on "
                "what is meant to get none, or pass allow_unused_input=True"
            )


def _until_settled(parts: Sequence[_Part], *, fed: bool, keeps: bool = True) -> None:
    """Run a step of them until no body runs in it any more but those that stay eager. A recording may be refused once,
    as of what sets up a library in the pool."""
    before = None
    for _ in range(_PASSES):
        now = [
            counters.body_runs - counters.eager_calls - counters.measured_calls
            for counters in (recordings(part.run) for part in parts)
        ]
        if now == before:
            return
        before = now
        _step(parts, fed=fed, keeps=keeps)
        for part in reversed(parts):
            part.put_back()


def _step(parts: Sequence[_Part], *, fed: bool, keeps: bool) -> None:
    """All forward passes, then all backward passes, the last first. ``keeps``: what was given out stays alive until the
    end, as a recording may run again where less is alive, and not where more is."""
    results: list[Any] = []
    ends: list[Any] = []
    needed: dict[int, tuple[str, torch.Tensor]] = {}
    for part in parts:
        args = _fed(part.args, ends[-1]) if fed and ends else None
        if args is not None:
            given = ends.pop()
            results += [given] if keeps else ()
            del given
        ends.append(part.run(*(part.args if args is None else args)))
        needed |= part.differentiable()
        del args
    _gradients(ends, needed)


def _fed(args: tuple[Any, ...], result: Any) -> tuple[Any, ...] | None:
    """These arguments with a result in place of the first ones; None where its tensors are of another kind."""
    results = [leaf for _, leaf in pytree.leaves(result)]
    samples = [leaf for _, leaf in pytree.leaves(args)][: len(results)]
    if (
        not results
        or [_kind(result) for result in results] != [_kind(sample) for sample in samples]
        or None in map(_kind, results)
    ):
        return None
    rest = iter(results)
    fed: tuple[Any, ...] = pytree.replace_leaves(args, lambda leaf: next(rest, leaf))
    return fed


def _kind(leaf: Any) -> tuple[Any, ...] | None:
    """The metadata of a tensor that a recording fixes; None for a tensor that is not plain."""
    if type(leaf) not in pytree.TENSOR_TYPES or leaf.layout is not torch.strided:
        return None
    return leaf.dtype, leaf.shape, leaf.stride(), leaf.device, leaf.requires_grad


def _gradients(results: Sequence[Any], needed: dict[int, tuple[str, torch.Tensor]]) -> dict[int, torch.Tensor | None]:
    """One backward pass from all results to what needs gradients, by ``id``; nothing is accumulated. Empty where no
    result needs gradients."""
    leaves = [leaf for result in results for _, leaf in pytree.leaves(result) if isinstance(leaf, torch.Tensor)]
    ends = list({id(leaf): leaf for leaf in leaves if leaf.requires_grad}.values())
    wanted = [tensor for _, tensor in needed.values()]
    if not ends or not wanted:
        return {}
    with hooks_off(wanted):
        gradients = torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
    return dict(zip(needed, gradients, strict=True))


def _put_forward_back(module: torch.nn.Module, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = forward


def _given(callables: Any, sample_args: Any) -> list[_Target]:
    """The callables with their samples. Raises ``AnnotationError`` where their numbers or forms do not match."""
    if not isinstance(callables, tuple):
        if isinstance(callables, (list, dict, set)) or not callable(callables):
            raise AnnotationError(
                f"{_NAME}: callables is a {_type(callables)}; give a module, a function, or a tuple of them"
            )
        return [_Target(f"callables ({_title(callables)})", callables, _sample("sample_args", sample_args))]
    if not isinstance(sample_args, (tuple, list)) or len(sample_args) != len(callables):
        number = f"{len(sample_args)} samples" if isinstance(sample_args, (tuple, list)) else f"a {_type(sample_args)}"
        raise AnnotationError(
            f"{_NAME}: {len(callables)} callables and {number} in sample_args; give one tuple of arguments a callable, "
            "as in ((x,), (h,))"
        )
    all_given = []
    for index, (target, args) in enumerate(zip(callables, sample_args, strict=True)):
        source = f"callables[{index}]"
        if not callable(target):
            raise AnnotationError(f"{_NAME}: {source} is a {_type(target)}; give a module or a function")
        same = [n for n, earlier in enumerate(callables[:index]) if earlier is target and _is_module(target)]
        if same:
            raise AnnotationError(
                f"{_NAME}: {source} is callables[{same[0]}] again; name a module once, it may be called as often as "
                "you like"
            )
        all_given.append(_Target(f"{source} ({_title(target)})", target, _sample(f"sample_args[{index}]", args)))
    return all_given


def _sample(source: str, args: Any) -> tuple[Any, ...]:
    if isinstance(args, (tuple, list)):
        return tuple(args)
    raise AnnotationError(
        f"{_NAME}: {source} is a {_type(args)}; give a tuple of positional arguments, as in (x,); a tensor alone would "
        "be unpacked into its rows"
    )


def _check_options(num_warmup_iters: object, allow_unused_input: object, pool: object) -> None:
    if not isinstance(num_warmup_iters, int) or isinstance(num_warmup_iters, bool) or num_warmup_iters < 0:
        raise AnnotationError(f"{_NAME}: num_warmup_iters={num_warmup_iters!r} is not a whole number from 0 on")
    if not isinstance(allow_unused_input, bool):
        raise AnnotationError(f"{_NAME}: allow_unused_input={allow_unused_input!r} is neither True nor False")
    is_token = isinstance(pool, tuple) and len(pool) == 2 and all(isinstance(part, int) for part in pool)
    if pool is not None and not is_token:
        raise AnnotationError(
            f"{_NAME}: pool is a {_type(pool)} and no pool's token, which torch.cuda.graph_pool_handle() and "
            "torch.cuda.MemPool().id give; leave it out, as this library has a pool of its own"
        )


def _is_module(value: object) -> bool:
    return isinstance(value, torch.nn.Module)


def _type(value: object) -> str:
    return type(value).__qualname__


def _title(target: Any) -> str:
    return target.__qualname__ if isinstance(target, (types.FunctionType, types.MethodType)) else _type(target)
