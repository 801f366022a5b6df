"""Packages of AOTInductor: one is loaded twice, one copy is captured, and both are compared bit for bit."""

from __future__ import annotations

import fcntl
import queue
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import AnnotationError, CaptureWarning, capture, explain, mark_step_begin, recordings, warmup
from capture.integrations.aoti import entry_point
from capture.observe import aoti_packages
from capture.torch_private import aoti as private
from tests.gpu.support import same
from tests.support.packages import skip_where_torch_crashes
from tests.support.rows import fresh as fresh
from tests.support.rows import rand

pytestmark = [
    pytest.mark.skipif(private.runner_methods() is None, reason="this torch loads no packages"),
    pytest.mark.usefixtures("on_the_cpu"),
]
WIDTH, ROWS = 4, 6


class Decoder(nn.Module):
    """Writes its cache, draws, and counts its calls in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.calls = nn.Buffer(torch.zeros(WIDTH))

    @override
    def forward(self, x: Tensor, cache: Tensor, at: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        self.calls.add_(1)
        cache.index_copy_(0, at, self.project(x) * scale)
        noise = torch.rand(x.shape[0], WIDTH) + x
        return {"sum": cache.sum(0) + self.calls, "noise": noise, "cache": cache, "flat": noise.view(-1)}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One package for all tests of a run, whatever the number of processes: compiling takes most of the time."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if folder.name.startswith("popen-") else folder) / "aoti"
    folder.mkdir(exist_ok=True)
    path = folder / "decoder.pt2"
    with pytest.MonkeyPatch.context() as patched, (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
            compile_to(path)
        skip_where_torch_crashes(path)
    return path


def compile_to(path: Path) -> None:
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=1, max=64)
    shapes = {"x": {0: rows}, "cache": None, "at": {0: rows}, "scale": None}
    with torch.device("cpu"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the compiler
        example = (torch.zeros(2, WIDTH), torch.zeros(ROWS, WIDTH), torch.tensor([0, 1]))
        # Code that does little and runs a few times needs no optimization, which takes most of the time.
        quickly = torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"})
        program = torch.export.export(Decoder(), example, {"scale": torch.ones(())}, dynamic_shapes=shapes)
        with quickly:
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    with torch.device("cpu"):
        yield


def load(path: Path, *, single: bool = True) -> Any:
    return torch._inductor.aoti_load_package(str(path), run_single_threaded=single)


def arguments(seed: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    return rand(rows, WIDTH, seed=seed).cpu(), (torch.arange(rows) + seed) % ROWS


class Side:
    """One of the two copies that are compared, with its own cache."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.cache = function, torch.zeros(ROWS, WIDTH)

    def __call__(self, seed: int, rows: int = 2) -> tuple[Any, Tensor, Tensor]:
        torch.manual_seed(seed)
        x, at = arguments(seed, rows)
        result = self.function(x, self.cache, at, scale=torch.tensor(1.0 + seed))
        return result, self.cache.clone(), torch.get_rng_state()

    def step(self, seed: int, x: Tensor, at: Tensor) -> Any:
        """Call the package once, from a seed, as one step."""
        mark_step_begin()
        torch.manual_seed(seed)
        return self.function(x, self.cache, at, scale=torch.ones(()))


def compare(ours: Side, theirs: Side, calls: int) -> None:
    for seed in range(calls):
        mark_step_begin()
        same(ours(seed), theirs(seed))


def counts(function: Any) -> tuple[int, int, int]:
    now = recordings(function)
    return now.recordings, now.replays, now.eager_calls


@pytest.mark.slow
def test_a_package_is_recorded_and_replayed(package: Path) -> None:
    """Values, written inputs, draws, a state of its own, an output that is an input, and two that share memory."""
    captured = capture(load(package))
    ours, theirs = Side(captured), Side(load(package))
    for seed in range(7):
        mark_step_begin()
        result = ours(seed)
        same(result, theirs(seed))
        same(result[0]["flat"], result[0]["noise"].flatten())
        assert result[0]["cache"] is ours.cache
        result[0]["noise"].fill_(seed)
        assert (result[0]["flat"] == seed).all()
    assert counts(captured) == (1, 5, 0)


def test_each_shape_is_a_recording_of_its_own(package: Path) -> None:
    captured = capture(load(package))
    ours, theirs = Side(captured), Side(load(package))
    for seed in range(12):
        mark_step_begin()
        same(ours(seed, rows=1 + seed % 3), theirs(seed, rows=1 + seed % 3))
    assert counts(captured) == (3, 6, 0)


def test_either_runner_is_recorded_on_the_cpu(package: Path) -> None:
    captured = capture(load(package, single=False))
    ours, theirs = Side(captured), Side(load(package))
    compare(ours, theirs, 5)
    assert counts(captured) == (1, 3, 0)
    assert not [one for one in recordings(captured).findings if one.code == "CG806"]


def test_in_a_chain_with_captured_functions(package: Path) -> None:
    """Outputs of one recording are inputs of the next, in one pool, and keep their values."""

    def before(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    def after(y: dict[str, Tensor]) -> Tensor:
        return (y["noise"] + y["sum"]).softmax(-1)

    def chain(first: Any, model: Any, second: Any) -> Callable[..., Any]:
        return lambda x, *rest, **named: second(model(first(x), *rest, **named))

    first, captured, second = capture(before), capture(load(package)), capture(after)
    ours, theirs = Side(chain(first, captured, second)), Side(chain(before, load(package), after))
    kept = []
    for seed in range(9):
        mark_step_begin()
        kept.append((ours(seed, rows=2 + seed % 2), theirs(seed, rows=2 + seed % 2)))
    for outputs, expected in kept:
        same(outputs, expected)
    assert [counts(function)[1:] for function in (first, captured, second)] == [(5, 0)] * 3


def test_called_by_a_captured_function(package: Path) -> None:
    """A captured body calls a package that is not captured itself, through the model and through its loader, with a
    tensor that the body makes."""

    def body(model: Any) -> Callable[..., Any]:
        def run(x: Tensor, cache: Tensor, at: Tensor, scale: Tensor) -> tuple[Any, Tensor]:
            found = model(x * 2, cache, at, scale=scale)
            direct = model.loader.run([x, cache, at, scale])
            return found["noise"] + direct[0], cache + 1

        return run

    captured = capture(body(load(package)))
    ours, theirs = Side(captured), Side(body(load(package)))
    compare(ours, theirs, 6)
    assert counts(captured) == (1, 4, 0)


def test_writes_that_change_nothing_at_first(package: Path) -> None:
    """The package writes its cache with the values that are there, in the watched and in the recorded run, and no
    version counter rises: later writes have to show all the same."""
    captured = capture(load(package))
    ours, theirs = Side(captured), Side(load(package))
    for seed in range(6):
        for side in (ours, theirs):
            side.step(seed, torch.full((2, WIDTH), float(seed > 2)), torch.tensor([0, 1]))
        same(ours.cache, theirs.cache)
    assert ours.cache.any()
    assert counts(captured) == (1, 4, 0)


INPUTS: dict[str, Callable[[int], Tensor]] = {
    "in the middle": lambda seed: rand(5, WIDTH, seed=seed).cpu()[2:4],
    "misaligned": lambda seed: rand(2 * WIDTH + 1, seed=seed).cpu()[1:].view(2, WIDTH),
    "requires grad": lambda seed: rand(2, WIDTH, seed=seed).cpu().requires_grad_(),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_other_places(package: Path, kind: str) -> None:
    captured = capture(load(package))
    ours, theirs = Side(captured), Side(load(package))
    for seed in range(5):
        results = [side.step(seed, INPUTS[kind](seed), torch.tensor([0, 3])) for side in (ours, theirs)]
        same(*results)
        same(ours.cache, theirs.cache)
        assert not any(tensor.requires_grad for tensor in results[0].values())
        del results  # other tests hold outputs
    assert counts(captured)[1:] == (3, 0)


def test_inputs_that_share_memory(package: Path) -> None:
    """Two inputs on one memory, of which one is written: the other shows the write exactly where it does uncaptured."""
    captured = capture(load(package))
    ours, theirs = Side(captured), Side(load(package))
    for seed in range(6):
        for side in (ours, theirs):
            side.cache += rand(ROWS, WIDTH, seed=seed).cpu()
            side.step(seed, side.cache[2:4], torch.tensor([seed, 2]))
        same(ours.cache, theirs.cache)
    assert counts(captured)[2] == 0


def test_tensors_of_inference_mode_and_read_only_memory(package: Path, tmp_path: Path) -> None:
    """Inputs that eager code may not write are read without being written."""
    file = tmp_path / "x"
    file.write_bytes(bytes(range(2 * WIDTH * 4)))
    file.chmod(0o444)
    mapped = torch.from_file(str(file), shared=False, size=2 * WIDTH).view(2, WIDTH)
    with torch.inference_mode():
        made = torch.ones(2, WIDTH)
    for x in (mapped, made):
        captured = capture(load(package))
        ours, theirs = Side(captured), Side(load(package))
        for seed in range(5):
            for side in (ours, theirs):
                mark_step_begin()
                torch.manual_seed(seed)
                side.function(x, side.cache, torch.tensor([seed, 3]), scale=torch.ones(()))
            same(ours.cache, theirs.cache)
        assert counts(captured) == (1, 3, 0)


def test_an_input_that_another_graph_saved(package: Path) -> None:
    """A package that reads a tensor does not keep a backward pass from using it."""
    teacher, student, x = capture(load(package)), nn.Linear(WIDTH, WIDTH), rand(2, WIDTH).cpu()
    cache = torch.zeros(ROWS, WIDTH)
    for seed in range(5):
        mark_step_begin()
        loss = student(x).square().sum()
        with torch.no_grad():
            teacher(x, cache, torch.tensor([seed, 5]), scale=torch.ones(()))
        loss.backward()
    assert counts(teacher)[1] == 3


def test_under_autocast(package: Path) -> None:
    captured = capture(load(package))
    ours, theirs = Side(captured), Side(load(package))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(ours, theirs, 5)
    assert counts(captured) == (1, 3, 0)


def test_other_constants(package: Path) -> None:
    """Constants that are loaded into the package later are those of the next replay."""
    models = load(package), load(package)
    captured = capture(models[0])
    ours, theirs, kept = Side(captured), Side(models[1]), []
    for seed in range(8):
        mark_step_begin()
        if seed in (3, 6):
            for model in models:
                weight = rand(WIDTH, WIDTH, seed=seed).cpu()
                given = {"project.weight": weight, "calls": torch.zeros(WIDTH)}
                model.load_constants(given, check_full_update=False, user_managed=seed == 6)
                kept.append(given)
        same(ours(seed), theirs(seed))
    assert counts(captured)[2] == 0


def test_constants_given_inside_a_body_keep_it_eager(package: Path) -> None:
    models = load(package), load(package)

    def body(model: Any) -> Callable[..., Any]:
        def run(x: Tensor, cache: Tensor, at: Tensor, scale: Tensor) -> Any:
            model.load_constants({"project.weight": x.t() @ x}, check_full_update=False)
            return model(x, cache, at, scale=scale)

        return run

    captured = capture(body(models[0]))
    ours, theirs = Side(captured), Side(body(models[1]))
    with pytest.warns(CaptureWarning, match="CG202"):
        compare(ours, theirs, 4)
    assert counts(captured)[:2] == (0, 0)


@pytest.mark.slow  # compiles a second package
def test_another_package_under_the_same_name(package: Path) -> None:
    """A body reads the package by a name: another package under that name makes another recording."""
    model = load(package)

    def body(x: Tensor, cache: Tensor, at: Tensor, scale: Tensor) -> Any:
        return model(x, cache, at, scale=scale)

    captured = capture(body)
    ours = Side(captured)
    for _ in range(2):
        ours.cache.zero_()
        theirs = Side(load(package))
        compare(ours, theirs, 4)
        model = load(package)
    assert counts(captured) == (2, 4, 0)


def test_a_package_loaded_by_the_body_runs_eagerly(package: Path) -> None:
    def body(x: Tensor, cache: Tensor, at: Tensor, scale: Tensor) -> Any:
        return load(package)(x, cache, at, scale=scale)["noise"]

    captured = capture(body)
    ours, theirs = Side(captured), Side(body)
    with pytest.warns(CaptureWarning, match="CG205"):
        compare(ours, theirs, 4)
    assert counts(captured)[1] == 0


def test_explain_and_warmup_put_the_arguments_back(package: Path) -> None:
    captured = capture(load(package))
    x, at = arguments(1)
    cache = rand(ROWS, WIDTH, seed=5).cpu()
    before, state = cache.clone(), torch.get_rng_state()
    plan = explain(captured)(x, cache, at, scale=torch.ones(())).plan
    same([cache, torch.get_rng_state()], [before, state])
    assert [placeholder.path for placeholder in plan.placeholders if placeholder.mutated] == ["args.1"]
    warmup(captured)(x, cache, at, scale=torch.ones(()))
    same([cache, torch.get_rng_state()], [before, state])
    mark_step_begin()
    captured(x, cache, at, scale=torch.ones(()))
    assert counts(captured) == (1, 1, 0)
    assert not torch.equal(cache, before)


def test_other_threads_and_later_calls_meet_the_loader_itself(package: Path) -> None:
    model, plain = load(package), (private.Loader.run, private.Loader.boxed_run)
    results: queue.SimpleQueue[Tensor] = queue.SimpleQueue()  # not a list, which explain would put back

    def body(x: Tensor) -> Tensor:
        work = threading.Thread(target=lambda: results.put(call(model, x)))
        work.start()
        work.join()
        return x + 1

    def call(model: Any, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        outputs = model(x, torch.zeros(ROWS, WIDTH), torch.tensor([0, 1]), scale=torch.ones(()))
        return outputs["noise"]  # type: ignore[no-any-return]

    x = rand(2, WIDTH).cpu()
    explain(body)(x)
    same(results.get_nowait(), call(load(package), x))
    assert (private.Loader.run, private.Loader.boxed_run) == plain


# --------------------------------------------------------------------------------------- what only a device cannot hold


@contextmanager
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(aoti_packages, "runs_on_device", lambda loader: True)
        patched.setattr(aoti_packages, "is_capturing_now", lambda: False)
        yield


def test_the_entry_point_is_told_without_a_call(package: Path) -> None:
    assert entry_point(load(package)) == "single-threaded"
    assert entry_point(load(package, single=False)) == "threaded"


def test_the_entry_point_of_a_loader_of_its_own_is_told(package: Path) -> None:
    assert private.entry_point(private.Loader(str(package), "model", True, 1, -1)) == "single-threaded"
    assert private.entry_point(private.Loader(str(package), "model", False, 1, -1)) == "threaded"


def test_each_of_many_packages_tells_of_its_own(package: Path) -> None:
    choose, held = random.Random(1), []
    for _ in range(30):
        single = choose.random() < 0.5
        held.append(("single-threaded" if single else "threaded", load(package, single=single)))
        if choose.random() < 0.5:
            held.pop(choose.randrange(len(held)))
        assert [entry_point(model) for _, model in held] == [kind for kind, _ in held]


def test_what_is_no_package_is_told() -> None:
    with pytest.raises(AnnotationError, match="Linear"):
        entry_point(nn.Linear(1, 1))
    assert private.entry_point(object()) == "unknown"
    assert private.entry_point(0) == "unknown"


def test_nothing_is_known_of_a_package_that_was_loaded_before(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(private.Loader, "__init__", private.Loader.__init__.__wrapped__)
        model = load(package)
    assert entry_point(model) == "unknown"


@pytest.mark.parametrize("kind", ["threaded", "unknown"])
def test_on_a_device_a_rule_names_the_fix(package: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    words = {
        "threaded": ("for many threads", "run_single_threaded=True"),
        "unknown": ("nothing tells", "run_single_threaded=True"),
    }
    with as_on_a_device(monkeypatch):
        if kind == "unknown":
            monkeypatch.setattr(aoti_packages, "entry_point", lambda loader: "unknown")
        captured = capture(load(package, single=False))
        ours, theirs = Side(captured), Side(load(package))
        with pytest.warns(CaptureWarning, match="(.|\n)*test_aoti.py(.|\n)*".join(words[kind])):
            compare(ours, theirs, 4)
    assert counts(captured)[:2] == (0, 0)


def test_on_a_device_a_package_for_one_thread_is_recorded(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading other constants drops the recordings: the next call is eager, and the package folds the constants in
    it."""
    with as_on_a_device(monkeypatch):
        models = load(package), load(package)
        captured = capture(models[0])
        ours, theirs = Side(captured), Side(models[1])
        for seed in range(8):
            mark_step_begin()
            if seed == 4:
                for model in models:
                    model.load_constants({"project.weight": rand(WIDTH, WIDTH).cpu()}, check_full_update=False)
            same(ours(seed), theirs(seed))
    assert counts(captured) == (2, 4, 0)
    assert recordings(captured).observations == 2


def test_a_capture_is_stopped_before_the_package_runs(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first call captures at once, as with a plan from disk, the capture stops before the package runs."""
    with as_on_a_device(monkeypatch):
        monkeypatch.setattr(aoti_packages, "is_capturing_now", lambda: True)
        x, at = arguments(1)
        cache = torch.zeros(ROWS, WIDTH)
        for single, words in ((True, "did not run"), (False, "cannot be captured")):
            model = load(package, single=single)
            with pytest.raises(RuntimeError, match=words):
                explain(lambda x: model(x, cache, at, scale=torch.ones(())))(x)  # noqa: B023 - called at once
        assert not cache.any()
