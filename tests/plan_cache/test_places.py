"""What a directory of plans may hold beside plans, who may write there, how large it gets, and what plans tell."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from capture.api.inspect import load_plans, save_plans
from capture.core import config
from capture.core.errors import CaptureWarning
from capture.core.findings import Finding, Severity
from capture.core.plan import dumps
from capture.plan_cache import files as plan_files
from capture.plan_cache import store
from tests.support.plans import (
    assert_loaded,
    assert_stale,
    described,
    details,
    files,
    module_with,
    only_file,
    plain,
    plan_of,
    run,
)
from tests.support.plans import directory as directory
from tests.support.processes import python_path, run_python

# ------------------------------------------------------------------------------------------- what is no plan of ours


def huge(path: Path, kept: Path) -> None:
    with path.open("wb") as file:
        file.truncate(plan_files.LARGEST + 1)


def of_somebody_else(path: Path, kept: Path) -> None:
    shutil.copyfile(kept, path)
    path.chmod(0o600)
    os.chown(path, 12345, -1)


def open_to_others(path: Path, kept: Path) -> None:
    shutil.copyfile(kept, path)
    path.chmod(0o666)


def socket_of(path: Path, kept: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's name is short
        try:
            server.bind(path.name)
        finally:
            os.chdir(before)


KINDS: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "FIFO": (lambda path, _: os.mkfifo(path), "not a regular file"),
    "directory": (lambda path, _: path.mkdir(), "not a regular file"),
    "socket": (socket_of, "not a regular file"),
    "link to a device": (lambda path, _: path.symlink_to("/dev/zero"), "not a regular file"),
    "link to nothing": (lambda path, _: path.symlink_to("nothing"), "not a regular file"),
    "link to itself": (lambda path, _: path.symlink_to(path), "not a regular file"),
    "link to a good plan": (lambda path, kept: path.symlink_to(kept), "not a regular file"),
    "huge": (huge, "larger than"),
    "open to others": (open_to_others, "others own it or may write to it"),
    "of somebody else": (of_somebody_else, "others own it or may write to it"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plan_of_this_user_is_named_and_not_used(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Such a file neither blocks nor is it followed, and a good file takes its place where that is possible."""
    if kind == "of somebody else" and os.geteuid() != 0:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)  # we are somebody else, then
        monkeypatch.setattr(os, "chown", lambda *_: None)
    run(plain)
    path = only_file(directory)
    kept = path.rename(tmp_path / "kept")
    KINDS[kind][0](path, kept)
    begin = time.perf_counter()
    assert_stale(run(plain), KINDS[kind][1])
    assert time.perf_counter() - begin < 5
    if kind == "directory":
        assert path.is_dir()
    else:
        assert stat.S_ISREG(path.lstat().st_mode)
        assert path.read_bytes() == kept.read_bytes()
        assert_loaded(run(plain))


def test_a_file_that_may_not_be_read_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(plain)
    opened = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith(".json"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    assert_stale(run(plain), "Permission denied")


def test_a_file_that_becomes_another_one_while_it_is_opened_is_not_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its kind and the opening."""
    run(plain)
    path, opened = only_file(directory), os.open

    def swapping(name: Any, flags: int, *rest: Any, **named: Any) -> int:
        if name == path and not flags & os.O_CREAT:
            path.unlink()
            os.mkfifo(path)
        return opened(name, flags, *rest, **named)

    monkeypatch.setattr(os, "open", swapping)
    assert_stale(run(plain), "not a regular file")


PROGRAM = """
import contextlib, os, pathlib, sys, torch
from capture import capture, config
torch.set_grad_enabled(False)
for mask, directory in zip(sys.argv[1::2], sys.argv[2::2]):
    os.umask(int(mask))
    of_environment = directory == os.environ["CAPTURE_CACHE_DIR"]
    with contextlib.nullcontext() if of_environment else config.patch(cache_dir=pathlib.Path(directory)):
        f = capture(lambda x: torch.tanh(x) * 2, name="f")
        for _ in range(3):
            assert torch.equal(f(torch.ones(3)), torch.tanh(torch.ones(3)) * 2)
    print("fine")
"""
ROOT = Path(__file__).resolve().parents[2]


def process(*places: tuple[int, str]) -> list[str]:
    """What a process says that keeps a plan in each place, under a mask for the files that it makes. The first place is
    given by the environment."""
    environment = os.environ | {"CAPTURE_CACHE": "1", "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    environment["CAPTURE_CACHE_DIR"] = places[0][1]
    arguments = [text for mask, directory in places for text in (str(mask), directory)]
    done = run_python(PROGRAM, *arguments, env=environment)
    return [*done.stdout.splitlines(), *([done.stderr] if done.returncode else [])]


@pytest.mark.slow
def test_directories_are_made_for_their_user_alone(tmp_path: Path) -> None:
    directories = {mask: tmp_path / oct(mask) / "plans" for mask in (0o000, 0o022, 0o777)}
    assert process(*((mask, str(place)) for mask, place in directories.items())) == ["fine"] * 3
    for made in directories.values():
        assert [stat.S_IMODE(path.stat().st_mode) for path in (made.parent, made)] == [0o700, 0o700]
        (plan,) = files(made)
        assert not stat.S_IMODE(plan.stat().st_mode) & 0o077


def test_a_directory_that_is_there_keeps_its_mode(directory: Path) -> None:
    """The directory may hold other things, for others."""
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    run(plain)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert_loaded(run(plain))


def test_a_directory_that_cannot_be_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["~nobody_of_this_name/plans", "a" * 300, "/proc/self/plans", "/dev/null/plans"]
    assert process(*((0o022, name) for name in names)) == ["fine"] * 4


def test_a_full_disk_keeps_nothing(directory: Path) -> None:
    """The file system refuses the bytes, not the name."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        state = run(plain)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "not kept" in details(state, "plan")[0]
    assert files(directory) == []


def test_a_plan_that_is_too_large_is_not_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_files, "LARGEST", 1000)
    state = run(plain)
    assert "larger than 1000 bytes" in details(state, "plan")[0]
    assert files(directory) == []


# ------------------------------------------------------------------------------------------------------- how much


def test_all_files_stay_within_the_limit_and_those_unused_for_longest_go(directory: Path) -> None:
    limit = 20 * 4096
    with config.patch(cache_limit=limit):
        run(described, 0)
        hot, ages = only_file(directory), dict[Path, int]()
        for number in range(1, 35):
            for path in files(directory):  # each used at another time: of equal ones any may go
                os.utime(path, (time.time() - 1000 + ages.setdefault(path, number),) * 2) if path != hot else None
            os.utime(hot, (time.time() - 500,) * 2)  # so long ago that a use is noted
            run(described, number, num_calls=1)
            assert_loaded(run(described, 0, num_calls=1))
            assert sum(max(path.stat().st_size, 4096) for path in files(directory)) <= limit
    assert hot in files(directory)
    assert_loaded(run(described, 34))
    assert run(described, 1).log.counters.plans_loaded == 0


def test_a_new_process_counts_what_others_left(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        run(described, number, num_calls=1)
    monkeypatch.setattr(plan_files, "_sizes", {})
    with config.patch(cache_limit=5 * 4096):
        run(described, 99, num_calls=1)
    assert 1 <= len(files(directory)) <= 5
    assert_loaded(run(described, 99))


def test_only_what_was_written_there_is_deleted(directory: Path) -> None:
    directory.mkdir(parents=True)
    foreign = [directory / name for name in ("notes.json", "f-0123456789abcdef.json.bak", "f-0123.json", "data.bin")]
    for path in foreign:
        path.write_bytes(b"x" * 10000)
    (directory / "g-0123456789abcdef.json").symlink_to(foreign[0])
    left_over, at_work = (directory / f".f-0123456789abcdef.json.{digit * 12}.tmp" for digit in "12")
    left_over.write_bytes(b"x")
    left_over.chmod(0o600)
    os.utime(left_over, (1, 1))
    at_work.write_bytes(b"x")
    with config.patch(cache_limit=0):
        run(plain)
        run(described, 1)
    (newest,) = set(files(directory)) - {*foreign, directory / "g-0123456789abcdef.json", at_work}
    assert "described" in newest.name
    assert all(path.stat().st_size == 10000 for path in foreign)


def test_a_directory_that_vanishes_is_made_again(directory: Path) -> None:
    run(plain)
    shutil.rmtree(directory)
    run(described, 1)
    assert len(files(directory)) == 1


# -------------------------------------------------------------------------------------------------- what plans tell


def test_no_directory_of_this_machine_is_in_a_plan(directory: Path, tmp_path: Path) -> None:
    """Whether the file is below ``sys.path`` or not; the place is right again where the plan is used."""
    text = (
        "import numpy as np\n\ndef body(x):\n    return x * 3 if float(np.from_dlpack(x.sum().cpu())) > 0 else x * 5\n"
    )
    module = module_with(tmp_path, "users", text)
    with pytest.warns(CaptureWarning):
        run(module.body)
    with torch.enable_grad():
        run(plain)
    for path in files(directory):
        text = path.read_text(encoding="utf-8")
        assert str(tmp_path) not in text
        assert str(ROOT) not in text
        assert not re.search(r'"file": "(/|[A-Za-z]:)', text)
    with pytest.warns(CaptureWarning, match=re.escape(f"{module.__file__}:4")):
        assert_loaded(run(module.body))


def test_a_relative_place_is_found_below_the_path(directory: Path, tmp_path: Path) -> None:
    state = run(plain)
    places = [placeholder.first_use.file for placeholder in plan_of(state).placeholders if placeholder.first_use]
    assert places
    assert all(os.path.isabs(place) for place in places)
    data = json.loads(only_file(directory).read_text(encoding="utf-8"))
    kept = [placeholder["first_use"]["file"] for placeholder in data["placeholders"] if placeholder["first_use"]]
    assert kept
    assert not any(os.path.isabs(place) for place in kept)
    again = [placeholder.first_use.file for placeholder in plan_of(run(plain)).placeholders if placeholder.first_use]
    assert again == places


# ------------------------------------------------------------------------------------- a kept plan that says eager


def refusing() -> Finding:
    return Finding(
        code="CG201", name="host-sync", severity=Severity.EAGER, what="a value was read", why="it was", fix=("none",)
    )


def test_a_kept_plan_that_says_eager_is_looked_at_once_in_a_process(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if what kept the function eager, in deeper code, had been mended meanwhile."""
    state = run(plain)
    path = only_file(directory)
    path.write_text(dumps(evolve(plan_of(state), outcome="eager", findings=(refusing(),))), encoding="utf-8")
    path.chmod(0o600)
    monkeypatch.setattr(store, "_looked_at", type(store._looked_at)())
    again = run(plain)
    assert again.log.counters.observations == 1
    assert again.log.counters.recordings >= 1
    assert '"record"' in path.read_text(encoding="utf-8")


def test_one_that_still_holds_is_believed_from_then_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * 3 if float(np.from_dlpack(x.sum().cpu())) > 0 else x * 5

    with pytest.warns(CaptureWarning):
        assert run(reads, num_calls=5).log.counters.observations == 1
    monkeypatch.setattr(store, "_looked_at", type(store._looked_at)())
    for observations in (1, 0, 0):
        with pytest.warns(CaptureWarning):
            counters = run(reads, num_calls=5).log.counters
        assert (counters.observations, counters.plans_loaded) == (observations, 1)


def test_shipped_plans_may_be_links_and_of_others_but_no_pipes(directory: Path, tmp_path: Path) -> None:
    with config.patch(cache=False):
        plan = plan_of(run(plain))
        save_plans(tmp_path / "made")
        store.save_plans(tmp_path / "ship", [plan])
        path = only_file(tmp_path / "ship")
        path.rename(tmp_path / "kept")
        path.symlink_to(tmp_path / "kept")
        (tmp_path / "kept").chmod(0o664)
        os.mkfifo(tmp_path / "ship" / "a.json")
        report = load_plans(tmp_path / "ship")
        assert report.used == (plan.function,)
        assert [name for name, _ in report.stale] == ["a.json"]
        assert_loaded(run(plain))
