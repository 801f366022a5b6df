"""Whether other threads may run users' code now; the one place that decides it.

Threads are left out of which it is known that they do not: those that carry batches from and to the workers of a
``DataLoader`` or code from those of a compiler, and those that update a progress bar or write what was logged. Most
training programs have such threads. torch's documented interface does not name them; the stated fallback is that any
thread which is not known counts: what must not be seen by others waits until it ends, and what was drawn meanwhile may
be its draws.
"""

from __future__ import annotations

import threading

from capture.native import native
from capture.torch_private.capabilities import NO_TASK, graph_task

_HELPERS = (
    "multiprocessing.queues", "torch.utils.data._utils.pin_memory", "torch._inductor.",
    "tqdm.", "rich.", "tensorboard.", "tensorboardX.", "wandb.sdk.",
)  # fmt: skip
"""Modules of their classes, or of what they run. No rule stands for this list: other threads of torch's own, such as
those of ``torch.nn.parallel``, run code of users, those of an executor may from the next moment on, and a class that an
installed package has for a thread may be the one in which a server runs models."""


def others_may_run() -> bool:
    """Whether another thread than this one may run code of users. A thread of C++ that Python has seen once, such as
    one of autograd's, counts while it runs Python. One of autograd's own, in which a checkpointed block runs anew on a
    device, has one beside it that waits for the backward pass."""
    here = threading.current_thread()  # from then on a thread of C++ is known
    if threading.active_count() == 1:
        return False
    running = set(native.current_frames())  # of the frames none is kept: this one's would hold itself, and all that run
    others = [thread for thread in threading.enumerate() if thread is not here and not _is_helper(thread)]
    awake = [thread for thread in others if not isinstance(thread, threading._DummyThread) or thread.ident in running]
    return len(awake) > is_autograds_own()


def is_autograds_own() -> bool:
    """Whether this is a thread of autograd's that runs a backward pass, for which another one waits."""
    return graph_task() != NO_TASK and isinstance(threading.current_thread(), threading._DummyThread)


def _is_helper(thread: threading.Thread) -> bool:
    """Whether it is a helper of a library, by its class and by what it runs, which ``threading`` keeps as long as it
    does; else it counts as anybody's."""
    runs = getattr(thread, "_target", None)
    return any(str(getattr(one, "__module__", "")).startswith(_HELPERS) for one in (type(thread), runs))
