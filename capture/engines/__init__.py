"""What records and replays: one Protocol (``base``), an engine for each kind of device, and what they share.

In: a call, how each of its inputs reaches it, a pool. Out: ``Recorded``: a recording that can be replayed and the
blocks its outputs lie in, or the reason why there is none. ``registry`` knows which engine serves a device and loads
it at its first use; ``staging`` has the buffers for inputs that are copied.

Invariant: an engine decides nothing. The tree says what runs when and which blocks are taken; the plan says how
inputs come. A run that came to nothing leaves pool, tensors, generators and Python state as if it had not been.
"""
