"""One eager run of a body, watched: what it read, wrote, made, drew, asked the host for, and left behind.

In: a ``Call``. Out: an ``ObservedRun`` (``run``), and of it the ``Facts`` that rules read, with the live tensors that a
recording needs beside them (``facts_builder``). Operators come through a dispatch mode (``dispatch_mode``); what no
dispatch mode sees, such as ``tolist`` or a wait for the device, is found by ``probes``. ``expectation`` is what a later
run has to do again to count as the same.

Invariant: a watched run is an eager run. Its values, its effects and its exceptions are eager's, in eager's order, and
one that is to leave no trace is undone to the last bit (``run.undo``).
"""
