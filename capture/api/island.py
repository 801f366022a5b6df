"""``island``: a function that runs eagerly in every replay, in the middle of what is recorded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from capture.core.errors import AnnotationError
from capture.observe.run import run_island

F = TypeVar("F", bound=Callable[..., Any])


def island(function: F) -> F:
    """Mark a function that is to run, as it is, in every call, though what is around it is recorded.

    In a captured function that calls it, a recording is cut there: a replay runs the segment before it, then this
    function in Python, on the tensors that the segment gave, and then the segment after it. So it may log, print,
    count, draw numbers, ask NumPy or a server, and call what no graph holds. Elsewhere it is an ordinary call.

    Arguments: tensors of any shape and dtype, plain values (numbers, texts, None, dtypes, devices), and tuples, lists
    and dicts of these; and ``self``, where it is a method of the object whose method is captured. All else it finds by
    itself, in a closure, a global or ``self``, in each call as it is then.

    Result: the same kinds. Tensors that it makes are copied to where the segment after it reads them, each of its own
    memory, which the function is not to keep; what it was given, and views of that, it may give back. Plain values that
    it gives count like values that the host reads: each that was not seen before is one more branch of the recording
    (at most 8), so give a tensor where the number changes from call to call.

    An island costs its own time, that of two launches, and on a device one wait where it reads values.

    What keeps the captured function eager, with a finding (CG208) that names the line: results that need gradients,
    Python state that the body changed before the island (the island would see it as it was), state that the island
    changes and the body reads, other kinds of arguments and results, and an island that raises an error which the body
    catches. On a device tensors that it gets and gives lie there.

    Raises ``AnnotationError`` where the function is a coroutine or a generator, whose body runs later.

    ```python
    @capture.island
    def log(loss):
        history.append(float(loss))
    ```
    """
    if isinstance(function, type) or not callable(function):
        raise AnnotationError(f"island() marks a function; got {type(function).__name__}")
    later = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(function) for kind in later):
        raise AnnotationError("island() marks a function that runs when it is called, no coroutine or generator")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return run_island(function, args, kwargs)

    return cast(F, call)
