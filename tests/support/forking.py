"""The helper process of ``tests.support.processes``: imports torch once, then forks for each program it is sent.

A child returns from ``next_program`` and runs the program at the top of its own ``__main__``, so that it ends as any
Python process does: ``atexit``, threads, module globals.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import CodeType
from typing import Any


def next_program() -> CodeType:
    """Wait for programs and fork for each. Returns in the child, with the program; never in the helper itself."""
    for module in ("torch", "torch._dynamo"):  # an optimizer's first step imports the second
        importlib.import_module(module)
    replies = os.dup(1)
    os.dup2(2, 1)  # what torch prints must not be taken for a reply
    for line in sys.stdin.buffer:
        request = json.loads(line)
        child = os.fork()
        if not child:
            os.close(replies)
            return _become(request)
        _, status = os.waitpid(child, 0)
        os.write(replies, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any]) -> CodeType:
    """Take over the program's environment, folder, arguments and output."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for number, file in enumerate(request["files"], 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    program, main = request["program"], vars(sys.modules["__main__"])
    main.clear()
    main.update(__name__="__main__", __builtins__=__builtins__)
    if not request["is_file"]:
        sys.argv = ["-c", *request["arguments"]]
        return compile(program, "<string>", "exec")
    sys.argv = [program, *request["arguments"]]
    sys.path[0] = os.path.dirname(program)
    main["__file__"] = program
    with open(program, "rb") as source:
        return compile(source.read(), program, "exec")
