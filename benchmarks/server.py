"""``python -m benchmarks.server``: a server that runs for long, with the things that go wrong in real ones.

Eight threads answer requests of thirty functions and modules, training among them, for 300 sizes with a long tail.
Adapters are swapped, weights loaded, a hundredth of the requests fails, outputs and arrays of them are kept at random,
and requests of the main thread time out by a signal. Each answer is compared with eager's, bit for bit.

Before the clock starts each thread fills its places for recordings, and torch's own kernels see each size: how long
that takes is a matter of the machine, and would be told as growth. A "minute" is a tenth of the run. Bars: no wrong
value, no unexpected exception, the resident size of the last minute within 2 % of the third; the 99th percentile of the
last below that of the second; hot sizes replayed at 95 % and more.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from array import array
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, define, field

from benchmarks.services import Service, disarm, services
from capture import config

SIZES, TAIL, HOT = 300, 1.6, 2
SAMPLED = 20_000  # latencies of a minute
KEPT = 60  # answers that a thread keeps at most
FILLED, CALLS = 5, 8  # sizes that each thread asks of each service first, as many as it may record; calls of each
PAGE = 4096
_LONG = 60  # seconds of a run whose growth is told


@define
class Counts:
    """Counts over all threads."""

    requests: int = 0
    failed: int = 0
    """Requests for which eager raises, too."""
    timeouts: int = 0
    changes: int = 0
    kept: int = 0
    probes: int = 0
    replayed: int = 0
    """Probes in the second half of the run that were replayed."""
    misses: list[str] = field(factory=list)
    """Why the other probes were not replayed."""
    wrong: list[str] = field(factory=list)
    unexpected: list[str] = field(factory=list)


def same(ours: Any, eager: Any) -> bool:
    """Whether two answers are equal bit for bit."""
    if isinstance(ours, torch.Tensor) and isinstance(eager, torch.Tensor):
        return ours.shape == eager.shape and (ours.cpu().numpy().tobytes() == eager.cpu().numpy().tobytes())
    if isinstance(ours, dict) and isinstance(eager, dict):
        return ours.keys() == eager.keys() and all(same(ours[key], eager[key]) for key in ours)
    if isinstance(ours, (list, tuple)) and isinstance(eager, (list, tuple)):
        return len(ours) == len(eager) and all(map(same, ours, eager))
    return type(ours) is type(eager) and ours == eager


class Sample:
    """A sample of values, of a size that does not grow: what the run itself keeps would be told as growth."""

    def __init__(self) -> None:
        self.values, self.count, self._random = array("d", bytes(8 * SAMPLED)), 0, random.Random(0)

    def add(self, value: float) -> None:
        """Each value has the same chance to be in the sample."""
        at = self.count if self.count < SAMPLED else self._random.randrange(self.count + 1)
        if at < SAMPLED:
            self.values[at] = value
        self.count += 1

    def percentile(self, part: float) -> float:
        """A percentile of the sample; 0 if there is none."""
        ordered = sorted(self.values[: min(self.count, SAMPLED)])
        return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else 0.0


class Run:
    """One run of the server."""

    def __init__(
        self,
        seconds: float,
        threads: int,
        device: torch.device,
        sizes: int = SIZES,
        *,
        eager: bool = False,
        filled: int = FILLED,
        profiled: bool = False,
    ) -> None:
        self.profiled = profiled
        self.seconds, self.threads, self.device, self.eager = seconds, threads, device, eager
        self.services = services(device, eager=eager)
        self.counts, self.lock = Counts(), threading.Lock()
        self.latencies, self.eager_latencies = ([Sample() for _ in range(11)] for _ in range(2))
        self.sizes: list[list[int]] = [[] for _ in range(11)]
        self.objects = [0] * 10
        self.parts: list[dict[str, int]] = []
        self.tensors: list[int] = []
        self.weights = [1 / (number + 1) ** TAIL for number in range(sizes)]
        self.filled = min(filled, sizes)
        self.begin = self.called = time.monotonic()
        self.is_stage_over, self.is_filled = threading.Barrier(threads), threading.Barrier(threads, self.start)
        self.started = threading.Event()

    def start(self) -> None:
        """All places for recordings are filled: start the clock."""
        self.begin = time.monotonic()
        self.started.set()

    def minute(self) -> int:
        """Which tenth of the run it is."""
        return min(int((time.monotonic() - self.begin) / self.seconds * 10), 10)

    def note(self, name: str, text: str = "") -> None:
        """Count an event, and note its text if it has one."""
        with self.lock:
            if text:
                getattr(self.counts, name).append(text)
            else:
                setattr(self.counts, name, getattr(self.counts, name) + 1)

    def work(self, seed: int) -> None:
        """Answer requests in one thread until the time is over. Recordings are kept also where eager is as fast."""
        with config.patch(cache=False, drop_slow=False):
            self._work(seed)

    def fill(self, seed: int) -> None:
        """Ask each service for as many sizes as this thread may record, before its weights change for the first time
        and after that: what follows them is made then. Wait for the other threads."""
        drawn = random.Random(seed)
        self._ask_all(drawn)
        if self.is_stage_over.wait() == 0 and self.filled:
            for service in self.services:
                service.change(drawn)
        self.is_stage_over.wait()
        self._ask_all(drawn)
        self.is_filled.wait()

    def _fill_caches_of_torch(self) -> None:
        """Call each service eagerly with each size. torch's kernels keep what they made for a shape (oneDNN up to 1,024
        of them), which is 10 MB until a tail of rare sizes was seen, with this library or without."""
        drawn = random.Random(0)
        for service in self.services:
            for size in range(1, len(self.weights) + 1):
                service.answer_eagerly(drawn, size)

    def _ask_all(self, drawn: random.Random) -> None:
        for service in drawn.sample(self.services, len(self.services)):
            for size in range(1, self.filled + 1):
                for _ in range(CALLS):
                    ours, eager, *_ = service.answer(drawn, size, _nothing)
                    if not same(ours, eager):
                        self.note("wrong", f"{type(service).__name__} of size {size}, at first: {ours!r:.300}")

    def _work(self, seed: int) -> None:
        self.fill(seed)
        drawn, kept = random.Random(seed), deque[tuple[Any, bytes]]()
        while self.minute() < 10:
            service = drawn.choice(self.services)
            size = drawn.choices(range(1, len(self.weights) + 1), self.weights)[0]
            try:
                self.one(drawn, service, size, kept)
            except TimeoutError:
                self.note("timeouts")
            except Exception:  # noqa: BLE001 - any exception here is a failure that the run reports
                self.note("unexpected", traceback.format_exc())
            finally:
                disarm()
        for value, expected in kept:
            self.compare_kept(value, expected)

    def one(self, drawn: random.Random, service: Service, size: int, kept: deque[tuple[Any, bytes]]) -> None:
        """Answer one request, and sometimes do what happens between two."""
        torch.set_grad_enabled(True)  # a timeout may have left eager's block without restoring this
        if drawn.random() < 0.01:
            service.change(drawn)
            self.note("changes")
        if drawn.random() < 0.02 and self.minute() >= 5 and not self.eager:
            self.note("probes")
            why = service.probe(drawn, drawn.randint(1, HOT))
            self.note("misses" if why else "replayed", why)
        times_out = service.may_time_out and drawn.random() < 0.1
        ours, eager, took, eager_took = service.answer(drawn, size, self.arm if times_out else _nothing)
        disarm()
        self.note("requests")
        with self.lock:
            minute = self.minute()
            self.latencies[minute].add(took)
            self.eager_latencies[minute].add(eager_took)
        if isinstance(eager, str):
            self.note("failed")
        if not same(ours, eager):
            self.note("wrong", f"{type(service).__name__} of size {size}: {ours!r:.300}")
        if isinstance(ours, (tuple, list)) and ours:
            ours = ours[0]
        if isinstance(ours, torch.Tensor) and drawn.random() < 0.1:
            array = drawn.random() < 0.5 and self.device.type == "cpu" and not ours.requires_grad
            value = ours.numpy() if array else ours.detach()
            kept.append((value, _bytes(value)))
            self.note("kept")
        while len(kept) > drawn.randrange(KEPT):
            self.compare_kept(*kept.popleft())

    def arm(self) -> None:
        """Set the time after which the next request is stopped."""
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.02))

    def compare_kept(self, value: Any, expected: bytes) -> None:
        """Compare kept answers with copies from when they were given."""
        if _bytes(value) != expected:
            self.note("wrong", f"a kept {type(value).__name__} of {value.shape}")

    def watch(self) -> None:
        """Sample the resident size ten times a minute, and once what it is made of."""
        self.started.wait()
        while self.minute() < 10:
            minute = self.minute()
            self.sizes[minute].append(resident())
            if not self.objects[minute]:
                self.objects[minute] = sys.getallocatedblocks()
                self.parts.append({"minute": minute, **parts_of_memory(), "requests": self.counts.requests})
                if self.profiled:
                    self.tensors.append(count_tensors())
            time.sleep(self.seconds / 100)

    def __call__(self) -> dict[str, Any]:
        """Run for the whole time, and give the results."""
        signal.signal(signal.SIGALRM, _ring)
        self.called = time.monotonic()
        if self.profiled:
            importlib.import_module("torch._dynamo")  # a tuple that somebody else has cannot grow any more (CPython)
        if self.seconds >= _LONG:
            self._fill_caches_of_torch()
        threads = [threading.Thread(target=self.work, args=(seed,)) for seed in range(1, self.threads)]
        threads.append(threading.Thread(target=self.watch))
        for thread in threads:
            thread.start()
        self.work(0)
        for thread in threads:
            thread.join()
        return self.told()

    def told(self) -> dict[str, Any]:
        """What was measured, and which bars are missed."""
        outcome = asdict(self.counts)
        ratio = self.counts.replayed / max(self.counts.probes, 1)
        third, last = (sum(self.sizes[at]) / max(len(self.sizes[at]), 1) for at in (2, 9))
        second, tenth = (self.latencies[at].percentile(0.99) for at in (1, 9))
        outcome |= {
            "device": str(self.device), "torch": torch.__version__, "seconds": self.seconds, "threads": self.threads,
            "seconds_to_fill": round(self.begin - self.called, 1),
            "hot_replayed": round(ratio, 4), "resident_third": int(third), "resident_last": int(last),
            "p99_second_ms": round(second * 1e3, 3), "p99_last_ms": round(tenth * 1e3, 3),
            "objects": self.objects, "parts": self.parts, "tensors": self.tensors,
            "resident": [int(sum(nbytes) / len(nbytes)) for nbytes in self.sizes if nbytes],
            "p99_ms": [round(sample.percentile(0.99) * 1e3, 3) for sample in self.latencies if sample.count],
        }  # fmt: skip
        outcome["eager_p99_ms"] = [round(one.percentile(0.99) * 1e3, 3) for one in self.eager_latencies if one.count]
        if self.device.type == "cuda":
            outcome["device_bytes"] = torch.cuda.max_memory_reserved()
        outcome["misses"] = Counter(outcome["misses"])
        bars = {
            "a wrong value": not outcome["wrong"], "an unexpected exception": not outcome["unexpected"],
            "the resident size grows": last <= third * 1.02, "the 99th percentile grows": tenth < second,
            "hot sizes are not replayed": ratio >= 0.95 or self.eager,
        }  # fmt: skip
        outcome["missed"] = [name for name, held in bars.items() if not held]
        return outcome


def _nothing() -> None:
    """No time limit for this request."""


def _ring(*_: object) -> None:
    raise TimeoutError


def _bytes(value: Any) -> bytes:
    array = value.cpu().numpy() if isinstance(value, torch.Tensor) else value
    found: bytes = array.tobytes()
    return found


def resident() -> int:
    """The resident size of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def count_tensors() -> int:
    """Look at all objects of the process, and have each tensor for a moment."""
    return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())


def parts_of_memory() -> dict[str, int]:
    """What may make the resident size grow, in kB: memory, and mapped code that was read for the first time. Modules
    that were imported late take both."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return {"anonymous": found["RssAnon"], "files": found["RssFile"], "modules": len(sys.modules)}


def main() -> int:
    """Exit status 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--sizes", type=int, default=SIZES)
    parser.add_argument("--eager", action="store_true", help="without this library, to compare memory and latency")
    parser.add_argument("--cold", action="store_true", help="begin without recordings")
    parser.add_argument("--profiled", action="store_true", help="a thread looks for all tensors ten times in the run")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.unraisablehook = lambda _: None  # a timeout in a weak reference's callback cannot come out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        filled = 0 if options.cold else FILLED
        flags = {"eager": options.eager, "filled": filled, "profiled": options.profiled}
        run = Run(options.seconds, options.threads, options.device, options.sizes, **flags)
        outcome = run()
    text = json.dumps(outcome, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if outcome["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
