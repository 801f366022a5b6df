"""Python objects that a body can reach: where they keep values, and how a run changed these.

In: the roots of a call: receiver, arguments, closure cells, globals that the code names. Out: a ``Snapshot`` of all
sources below them (``snapshot``), the differences after a run and how they are undone (``diff``), which attributes a
body runs (``code_run``), settings of optimizers (``optimizers``). A ``Source`` says how a value is reached, as
in TorchDynamo: ``self.layers[3].p``.

Invariant: names come from dicts, slots, cells and containers, so that a walk calls no property of a user's class. Every
tensor that a run read is found at a path or told as unknown: a parameter that went unnoticed would be read by replays
at the address of a tensor that is gone.
"""
