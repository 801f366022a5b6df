"""torch's compiler is imported when somebody asks for it, not for each watched run, and it sees torch as it is."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import capture, recordings
from capture.torch_private import imports
from tests.support.decorated import fresh as fresh
from tests.support.device import EXECUTES
from tests.support.processes import python_path

ENVIRONMENT = {**os.environ, "CAPTURE_CACHE": "0", "CAPTURE_DROP_SLOW": "0", "PYTHONPATH": python_path()}
NOT_IMPORTED = """
import sys, torch
from capture import capture, recordings

captured = capture(lambda x: torch.relu(x) * 2)
for _ in range(4):
    captured(torch.ones(3))
assert recordings(captured).replays >= 1, recordings(captured)
assert "torch._dynamo" not in sys.modules
"""
IMPORTED_BY_A_BODY = """
import sys, torch
from capture import capture, recordings
from capture.torch_private import devices

devices.has_captures = lambda: True  # as where there is a GPU: indexing is replaced, too

def step(x, w):
    optimizer = torch.optim.SGD([w], lr=0.1)
    loss = (x[0] @ w).sum()
    if loss.item() > -1e9:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

assert "torch._dynamo" not in sys.modules
captured = capture(step)
with torch.device("cpu"):
    for number in range(8):
        x, w = torch.randn(2, 3, 4), torch.randn(4, 2, requires_grad=True)
        twin = w.detach().clone().requires_grad_()
        assert torch.equal(captured(x, w), step(x, twin)) and torch.equal(w, twin), number
        assert "torch._dynamo" in sys.modules
assert recordings(captured).replays >= 4, recordings(captured)
later = torch.compile(lambda x: x[1].cos() * x.sum().relu(), backend="eager", fullgraph=True)
with torch.device("cpu"):
    assert later(torch.ones(3, 4)).shape == (4,)
kept = {"__getitem__", "__setitem__", "item", "new_tensor", "__bool__"} & set(vars(torch.Tensor))
assert not kept, kept
"""
COMPILED_BY_THE_BODY_THAT_IMPORTED_IT = """
import sys, torch
from capture import capture, recordings

compiled = []

def body(x):
    if not compiled:
        compiled.append(torch.compile(lambda x: x.sin() * 2, backend="eager", fullgraph=True))
    return compiled[0](x) + x.sum().item()

captured = capture(body)
for number in range(8):
    x = torch.full((3,), float(number))
    assert torch.equal(captured(x), body(x)), number
assert recordings(captured).replays > 2, recordings(captured)
"""
IMPORTED_BY_ANOTHER_THREAD = """
import threading, torch
from capture import capture

begun, done = threading.Event(), threading.Event()

def import_it():
    begun.wait()
    import torch._dynamo
    done.set()

def body(x):
    begun.set()
    done.wait()
    return x * x.sum().item()

thread = threading.Thread(target=import_it)
thread.start()
captured = capture(body)
for number in range(8):
    x = torch.full((3,), float(number))
    assert torch.equal(captured(x), body(x)), number
thread.join()
later = torch.compile(lambda x: x[1].cos(), backend="eager", fullgraph=True)
assert torch.equal(later(x[None].repeat(2, 1)), x.cos())
"""


@pytest.mark.parametrize(
    "program",
    [
        NOT_IMPORTED,
        IMPORTED_BY_A_BODY,
        pytest.param(COMPILED_BY_THE_BODY_THAT_IMPORTED_IT, marks=pytest.mark.slow),
        pytest.param(IMPORTED_BY_ANOTHER_THREAD, marks=pytest.mark.slow),
    ],
)
def test_the_compiler_is_imported_by_those_who_need_it(program: str) -> None:
    # not `run_python`, as that has imported it
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


class Told:
    def __init__(self) -> None:
        self.seen = list[str]()

    def begin(self) -> None:
        self.seen.append("begin")

    def end(self) -> None:
        self.seen.append("end")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a module of torch's that runs some lines when it is imported."""

    def make(lines: str) -> str:
        (tmp_path / "made_for_a_test.py").write_text(lines)
        monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
        importlib.invalidate_caches()
        return "torch.made_for_a_test"

    yield make
    sys.modules.pop("torch.made_for_a_test", None)
    vars(torch).pop("made_for_a_test", None)


@pytest.mark.parametrize("error", [ImportError, RuntimeError, AttributeError, SystemError])
def test_an_import_that_fails_is_the_bodys_own_error(module: Any, error: type[Exception]) -> None:
    name, captured = module(f"import torch\nraise {error.__name__}('stopped')"), capture(body := _imports_it)
    for _ in range(3):
        for function in (captured, body):
            with pytest.raises(error, match="stopped"):
                function(torch.ones(3), name)
    assert torch.equal(capture(torch.relu)(torch.ones(3)), torch.ones(3))


def _imports_it(x: torch.Tensor, name: str) -> torch.Tensor:
    importlib.import_module(name)
    return torch.relu(x) * 2


def test_a_module_that_is_imported_sees_torch_as_it_is(module: Any) -> None:
    before = torch.Tensor.item, torch.randn
    name = module("import torch\nkept = torch.Tensor.item, torch.randn\nof_it = torch.ones(3).sum().item()")
    captured = capture(_imports_it)
    for number in range(5 if EXECUTES else 8):  # where a capture executes nothing, a run that reads nothing comes first
        x = torch.full((3,), float(number))
        assert torch.equal(captured(x, name), torch.relu(x) * 2)
    kept: Any = sys.modules[name]
    assert kept.kept[0] is before[0]
    assert kept.kept[1] == before[1]
    assert kept.of_it == 3.0
    replays = recordings(captured).replays
    assert replays == 3 if EXECUTES else replays >= 3


def test_the_loader_stays_what_it_is(module: Any) -> None:
    told, name = Told(), module("loader = __spec__.loader")
    imports.tell()
    imports.listeners.append(told)
    try:
        imported: Any = importlib.import_module(name)
    finally:
        imports.listeners.remove(told)
    assert told.seen == ["begin", "end"]
    assert imported.loader is imported.__spec__.loader is imported.__loader__
    assert "exec_module" not in vars(imported.loader)
    importlib.reload(imported)
    assert told.seen == ["begin", "end"]  # who listens no more is told no more


def test_a_loader_that_takes_no_attribute_is_left_alone() -> None:
    class Slots:
        __slots__ = ()

        @staticmethod
        def create_module(spec: ModuleSpec) -> None:
            pass

        @staticmethod
        def exec_module(module: types.ModuleType) -> None:
            vars(module)["ran"] = True

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            return ModuleSpec(name, Slots()) if name == "torch.made_for_a_test" else None  # type: ignore[arg-type]

    imports.tell()
    sys.meta_path.append(Finder)
    try:
        imported: Any = importlib.import_module("torch.made_for_a_test")
        assert imported.ran
    finally:
        sys.meta_path.remove(Finder)
        sys.modules.pop("torch.made_for_a_test", None)
        vars(torch).pop("made_for_a_test", None)
