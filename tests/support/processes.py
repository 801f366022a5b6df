"""Processes that a test starts.

``run_python`` is for programs that need a process of their own but not their own import of torch, which takes 1 to 3
seconds of CPU time: a helper process imports torch once and forks for each program.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVER = "from tests.support.forking import next_program; exec(next_program())"


def python_path(first: Path = ROOT) -> str:
    """``PYTHONPATH`` of a process that has this checkout, or another folder, in front of what this one was given."""
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_python(
    program: str | Path, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs code (as ``python -c``) or a file in a new process that has torch imported already.

    ``env`` is the whole environment, by default this process's. torch was imported under that of this process, with one
    thread. Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds.
    """
    command = [str(program), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("out", "err")]
        request = {
            "program": str(program), "is_file": isinstance(program, Path), "arguments": arguments, "files": files,
            "env": dict(os.environ if env is None else env), "cwd": os.getcwd(),
        }  # fmt: skip
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(json.dumps(request).encode() + b"\n")
            server.stdin.flush()
            if not select.select([server.stdout], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(command, timeout)
            status = int(server.stdout.readline())
        except BaseException:
            _stop(server)
            raise
        said = [Path(file).read_text(encoding="utf-8") for file in files]
    return subprocess.CompletedProcess(command, status, *said)


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the helper and the processes that it forked."""
    _server.cache_clear()
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.communicate()
