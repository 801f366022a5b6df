"""One captured callable, from a call to its result.

``dispatch`` is what a call comes to and the only one to decide; read it first. It asks stages, which hand back what
they found and know neither it nor each other's front doors:

    fast_path         the call repeats an earlier one: C takes it
    planning          a plan, from the store or from a watched run
    record            a recording of this call; ``record_outputs`` its outputs, ``record_failure`` if it is none,
                      ``gradient_offload`` makes room for it
    replay            run a recording that fits
    rebind            point it at a tensor that moved
    verify            compare it with the body
    training_region   forward and backward apart, where results need gradients
    miss_reason       why one more recording is asked for, in words

Around them, each named after what it does: ``matching`` (entry and recording of a call), ``phases`` (what moves an
entry), ``eager_call``, ``watched_call``, ``checked_replay``, ``undone_runs`` (for a warm-up), ``limits``,
``state_changes``, ``padded_call``, ``lifted_call`` and ``fault_boundary``.

``captured`` (a callable), ``entry`` (one of its keys) and ``verdict`` (what a stage replies) are the data they share;
``inputs`` says how arguments reach a recording. Imports go from ``dispatch`` to stages to data, and never back.

Invariant: whatever a stage finds, the call gives what eager gives, once: its effects happen one time, generators move
as in one eager call, and an exception of the body comes out unchanged.
"""
