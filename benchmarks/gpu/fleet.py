"""Prepare jobs in several processes at once, then measure them in one process after another while the others wait.

If a process dies or takes too long its jobs are lost and named; the others go on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
from attrs import define, field, frozen

from benchmarks.gpu.setting import Setting, last_lines
from capture import config

LONGEST_S = 40  # of one measurement
Job = tuple[str, ...]
Result = dict[str, Any]
Measure = Callable[[], Result]
Prepare = Callable[[Job, Setting], Measure]
"""A function of a module: it is sent to the processes by its name."""
Phase = Literal["prepare", "measure"]


@frozen(kw_only=True)
class Limits:
    """``workers``: processes at once. Seconds in which jobs are begun, in which begun jobs have to be ready then, and
    for all measurements."""

    workers: int
    begun_s: float
    ready_s: float = 50
    measured_s: float


@define(eq=False)
class Worker:
    """A process, and the jobs it holds."""

    process: Any
    pipe: Connection
    job: Job | None = None
    """The job that it works on."""
    since: float = 0.0
    ready: list[Job] = field(factory=list)

    def ask(self, phase: Phase, job: Job) -> None:
        """Send a job. If the process has died, reading its answer shows it."""
        self.job, self.since = job, time.monotonic()
        with contextlib.suppress(OSError):
            self.pipe.send((phase, job))

    def end(self) -> None:
        """End the process at once, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


@define(eq=False)
class Fleet:
    """All processes and jobs; ``run`` is called once."""

    prepare: Prepare
    setting: Setting
    limits: Limits
    waiting: deque[Job]
    results: dict[Job, Result] = field(factory=dict)
    failed: dict[Job, str] = field(factory=dict)
    workers: list[Worker] = field(factory=list)

    def run(self) -> None:
        """Fill ``results`` and ``failed``."""
        try:
            for _ in range(min(self.limits.workers, len(self.waiting))):
                self._start()
            self._get_ready(time.monotonic() + self.limits.begun_s)
            self._measure(time.monotonic() + self.limits.measured_s)
        finally:
            for worker in self.workers:
                worker.end()

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.prepare, self.setting), daemon=True)
        process.start()
        theirs.close()  # else the pipe would not end when the process does
        self.workers.append(Worker(process, ours))

    def _get_ready(self, until: float) -> None:
        deadline = until + self.limits.ready_s
        while (left := deadline - time.monotonic()) > 0:
            for worker in self.workers:
                if worker.job is None and self.waiting and time.monotonic() < until:
                    worker.ask("prepare", self.waiting.popleft())
            busy = {worker.pipe: worker for worker in self.workers if worker.job is not None}
            if not busy:
                break
            for pipe in wait(list(busy), timeout=left):
                self._answered(busy[pipe])  # type: ignore[index]
        self.failed |= dict.fromkeys(self.waiting, "not begun: no time was left")
        for worker in [not_ready for not_ready in self.workers if not_ready.job is not None]:
            self._lost(worker, "not ready in time", again=False)

    def _measure(self, deadline: float) -> None:
        for worker in list(self.workers):
            for job in list(worker.ready):
                if job not in worker.ready:  # its process died at another job
                    continue
                worker.ask("measure", job)
                if worker.pipe.poll(min(max(deadline - time.monotonic(), 0), LONGEST_S)):
                    self._answered(worker, keep=True)
                else:
                    self._lost(worker, "not measured in time", again=False)

    def _answered(self, worker: Worker, *, keep: bool = False) -> None:
        job = worker.job
        assert job is not None
        try:
            result, error = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(10)
            self._lost(worker, f"the process ended with {worker.process.exitcode}", again=not keep)
            return
        worker.job = None
        took = f"{time.monotonic() - worker.since:.1f} s"
        print(f"{', '.join(job)}: {'measured' if keep else 'ready'} in {took}  {error}", flush=True)
        if error:
            self.failed[job] = error
        elif keep:
            self.results[job] = result
        else:
            worker.ready.append(job)

    def _lost(self, worker: Worker, why: str, *, again: bool) -> None:
        """Note that a process is lost. Its other jobs are prepared again by another process (``again``), or lost
        too."""
        culprit = worker.job or ()
        print(f"{', '.join(culprit)}: {why}", flush=True)
        self.failed[culprit] = why
        gone_with_it = [held for held in worker.ready if held != culprit and held not in self.results]
        worker.ready.clear()
        self.workers.remove(worker)
        worker.end()
        if not again:
            self.failed |= dict.fromkeys(gone_with_it, f"gone with {', '.join(culprit)}: {why}")
            return
        self.waiting.extend(gone_with_it)
        if self.waiting:
            self._start()


def run(
    prepare: Prepare, jobs: Sequence[Job], setting: Setting, limits: Limits, **environment: str
) -> tuple[dict[Job, Result], dict[Job, str]]:
    """Results by job, and the reasons for missing ones. ``environment``: variables of the processes."""
    fleet = Fleet(prepare, setting, limits, deque(jobs))
    with _surroundings(environment):
        fleet.run()
    return fleet.results, fleet.failed


@contextlib.contextmanager
def _surroundings(environment: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection, prepare: Prepare, setting: Setting) -> None:
    """Inside a process: answers with a result and an error's text, of which one is empty."""
    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the tables say what is left out
    ready: dict[Job, Measure] = {}
    with config.patch(cache=False, verify="off", poison=False), torch.no_grad(), contextlib.suppress(EOFError):
        while True:
            phase, job = pipe.recv()
            try:
                if phase == "prepare":
                    ready[job] = prepare(job, setting)
                    answer: tuple[Result, str] = {}, ""
                else:
                    gc.collect()
                    gc.freeze()  # so that no measurement begins with a collection of all prepared objects
                    answer = ready.pop(job)(), ""
            except Exception as error:  # noqa: BLE001 - the other jobs still run
                print("".join(traceback.format_exc().splitlines(keepends=True)[-12:]), flush=True)
                answer = {}, last_lines(error)
            pipe.send(answer)
