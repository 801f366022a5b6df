"""A Llama-shaped 1B decodes, batch 1, ``StaticCache`` 2048: every mechanism in one run, rounds in turn."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from attrs import define
from torch import Tensor

from benchmarks.gpu import nets
from benchmarks.gpu.graphs import Hands
from benchmarks.gpu.setting import Outcome, Setting, last_lines, ratio, wall_ms
from benchmarks.timing import Figure, undisturbed
from capture import CaptureWarning, capture, mark_step_begin, recordings

LENGTH, ROUNDS, TOKENS, WARM = 2048, 7, 50, 8
Step = nets.Step


@define
class Session:
    """One mechanism with its own cache and loop. The loop clones every token, whichever mechanism made it."""

    model: Any
    cache: Any
    prompt: Tensor
    ids: Tensor
    step: Step
    tokens: list[Tensor]
    captured: Any = None
    note: str = ""

    def restart(self) -> None:
        """Restore cache and token to what they were after the prompt, in the same tensors."""
        self.cache.reset()
        logits = self.model(self.prompt, past_key_values=self.cache, use_cache=True).logits
        self.ids = logits[:, -1:].argmax(-1).clone()
        self.tokens = []

    def decode(self, count: int) -> None:
        """Greedy tokens, each fed back."""
        for _ in range(count):
            self.ids = self.step(self.ids).clone()
            self.tokens.append(self.ids)

    def text(self) -> list[int]:
        """The tokens so far."""
        return [int(token) for token in self.tokens]


def measure(setting: Setting) -> Outcome:
    """Milliseconds a token, and the two ratios."""
    model = nets.llama(setting)
    allow_recompiles()
    sessions: dict[str, Session] = {}
    rows: list[tuple[str, ...]] = [("mechanism", "ms/token", "set-up s", "tokens", "note")]
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name, build in MECHANISMS.items():
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CaptureWarning)
                session = build(model, setting)
                session.decode(WARM)
            setting.synchronize()
            sessions[name] = session
        except Exception as error:  # noqa: BLE001 - the other mechanisms still run
            print(f"{name}:\n" + "".join(traceback.format_exc().splitlines(keepends=True)[-12:]), flush=True)
            failed[name] = last_lines(error)
        seconds[name] = time.perf_counter() - begin
        print(f"{name}: set up in {seconds[name]:.1f} s", flush=True)
    times = _rounds(sessions, setting)
    expected = _reproducible(sessions)
    for name in MECHANISMS:
        if name in failed:
            rows.append((name, "", f"{seconds[name]:.1f}", "FAILED", failed[name]))
            continue
        ms = statistics.median(times[name])
        rows.append((name, f"{ms:.3f}", f"{seconds[name]:.1f}", _same(sessions[name].text(), expected),
                     _note(sessions[name])))  # fmt: skip
    return Outcome(figures=_figures(times), rows=tuple(rows), wrong=_wrong(sessions, failed, expected))


def _reproducible(sessions: dict[str, Session]) -> list[int]:
    """The first tokens that all give alike who launch eager's own kernels, as far as they are no part of this library:
    some kernels sum in another order in every run."""
    if EAGER not in sessions or AGAIN not in sessions:
        return []
    texts = [sessions[name].text() for name in (EAGER, AGAIN, CUDAGRAPHS, BY_HAND) if name in sessions]
    alike = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*texts, strict=True))
    return [tokens[0] for tokens in alike]


def allow_recompiles() -> None:
    """One compiled code object serves 16 layers and several caches; the default limit of 8 would stop it silently."""
    dynamo: Any = torch._dynamo
    dynamo.config.recompile_limit = 64


def _rounds(sessions: dict[str, Session], setting: Setting) -> dict[str, list[float]]:
    """Milliseconds a token, one value a round; who goes first changes with the round."""
    count = setting.pick(TOKENS, 4)
    times: dict[str, list[float]] = {name: [] for name in sessions}
    names = list(sessions)
    with undisturbed():
        for number in range(setting.pick(ROUNDS, 2)):
            first = number % max(len(names), 1)
            for name in names[first:] + names[:first]:
                session = sessions[name]
                times[name].append(wall_ms(lambda session=session: session.decode(count), setting) / count)  # type: ignore[misc]
    return times


def _figures(times: dict[str, list[float]]) -> tuple[Figure, ...]:
    figures = [Figure(name=name, unit="ms a token", values=tuple(values)) for name, values in times.items()]
    for name, below, bar in (
        (OURS, BY_HAND, 1.03),
        (OURS_COMPILED, REDUCE_OVERHEAD, 1.00),
        (OURS_LAYERS, REDUCE_OVERHEAD, None),
    ):
        if name in times and below in times:
            figures.append(ratio(name, f"/ {below}", times[name], times[below], bar))
    return tuple(figures)


def _same(tokens: list[int], expected: list[int]) -> str:
    for number, (one, other) in enumerate(zip(tokens, expected, strict=False)):
        if one != other:
            return f"differ from eager at {number}"
    return f"{min(len(tokens), len(expected))} equal eager"


def _note(session: Session) -> str:
    if session.captured is None:
        return session.note
    totals = recordings(session.captured)
    reasons = [f"{one.code}: {one.what}" for one in totals.findings if str(one.severity) in ("eager", "error")]
    counted = f"{totals.recordings} recordings, {totals.replays} replays, {totals.eager_calls} eager calls"
    return "; ".join(filter(None, [counted, session.note, *reasons]))


def _wrong(sessions: dict[str, Session], failed: dict[str, str], expected: list[int]) -> tuple[str, ...]:
    """What is wrong: our tokens must be eager's, and those of ours around compiled code the compiled code's."""
    ours = (OURS, OURS_LAYERS, OURS_COMPILED)
    mistakes = [f"{name} failed: {text}" for name, text in failed.items() if name in ours]
    for name in ours:
        session = sessions.get(name)
        if session is None:
            continue
        if name == OURS and session.text()[: len(expected)] != expected:
            mistakes.append(f"{name}: tokens {_same(session.text(), expected)}")
        if "differ" in session.note:
            mistakes.append(f"{name}: {session.note}")
        if not recordings(session.captured).replays:
            mistakes.append(f"{name}: never replayed: {_note(session)}")
    return tuple(mistakes)


# ------------------------------------------------------------------------------------------------------- mechanisms


def _session(model: Any, setting: Setting) -> Session:
    cache = nets.static_cache(model, setting.pick(LENGTH, 128), setting)
    prompt = nets.prompt(model, setting)
    session = Session(model, cache, prompt, prompt, nets.token_step(model, cache), [])
    session.restart()
    return session


def _compiled(**options: Any) -> Callable[[Any, Setting], Session]:
    def build(model: Any, setting: Setting) -> Session:
        session = _session(model, setting)
        compiled = torch.compile(session.step, **options)

        def step(ids: Tensor) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(ids)

        session.step = step
        return session

    return build


def _by_hand(model: Any, setting: Setting) -> Session:
    session = _session(model, setting)
    buffer = session.ids.clone()
    body = session.step
    hand = Hands(setting).capture(lambda: body(buffer), warmups=3)

    def step(ids: Tensor) -> Tensor:
        buffer.copy_(ids)
        hand.replay()
        return hand.output

    session.restart()  # the warm-ups wrote to the cache and advanced its position
    session.step = step
    return session


def _ours(model: Any, setting: Setting) -> Session:
    session = _session(model, setting)
    session.captured = session.step = capture(session.step)
    return _marked(session)


def _marked(session: Session) -> Session:
    captured = session.step

    def step(ids: Tensor) -> Tensor:
        mark_step_begin()
        return captured(ids)

    session.step = step
    return session


def _ours_around(compiled: Callable[[Any, Session], Step], what: str) -> Callable[[Any, Setting], Session]:
    """Run without us first, which compiles and gives the tokens to compare with."""

    def build(model: Any, setting: Setting) -> Session:
        session = _session(model, setting)
        step = session.step = compiled(model, session)
        session.decode(WARM)
        setting.synchronize()
        alone: list[float] = [wall_ms(lambda: session.decode(WARM), setting) / WARM for _ in range(3)]
        expected = session.text()
        session.restart()
        session.step = session.captured = capture(step)
        _marked(session)
        session.decode(len(expected))
        text = _same(session.text(), expected).replace("eager", what)
        session.note = f"{text}; {what} without us {statistics.median(alone):.3f} ms"
        session.restart()
        return session

    return build


def _compiled_layers(model: Any, session: Session) -> Step:
    inner = copy.deepcopy(model)
    for layer in inner.model.layers:
        layer.forward = torch.compile(layer.forward)
    return nets.token_step(inner, session.cache)


def _compiled_step(model: Any, session: Session) -> Step:
    step: Step = torch.compile(nets.token_step(model, session.cache))
    return step


EAGER, AGAIN, BY_HAND, OURS = "eager", "eager, another cache", "by hand: copy_, replay", "ours"
REDUCE_OVERHEAD, OURS_COMPILED = 'compile(mode="reduce-overhead")', "ours around a compiled step"
OURS_LAYERS, CUDAGRAPHS = "ours around compiled layers", 'compile(backend="cudagraphs")'
MECHANISMS: dict[str, Callable[[Any, Setting], Session]] = {
    EAGER: _session,
    AGAIN: _session,
    CUDAGRAPHS: _compiled(backend="cudagraphs"),
    REDUCE_OVERHEAD: _compiled(mode="reduce-overhead"),
    BY_HAND: _by_hand,
    OURS: _ours,
    OURS_LAYERS: _ours_around(_compiled_layers, "compiled layers"),
    OURS_COMPILED: _ours_around(_compiled_step, "the compiled step"),
}
