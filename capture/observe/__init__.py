"""One eager run of a body, watched: what it read, wrote, allocated, drew, asked the host for, and changed.

In: a ``Call``. Out: an ``ObservedRun`` (``run``), and made of it the ``Facts`` that rules read, with the live tensors
that a recording needs (``facts_builder``). Operators are seen at a dispatch key (``dispatch_mode``); what none of them
shows, such as ``tolist`` or a wait for the device, is found by ``probes``. ``expectation`` is what a later run has
to do again to count as equal.

Invariant: a watched run is an eager run. Its values, effects and exceptions are eager's, in eager's order, and a run
that must not change anything is undone to the last bit (``run.undo``).
"""
