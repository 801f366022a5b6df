"""Conditions on Python and tensor state that must hold before a replay.

In: what a watched run read, each thing with the ``Source`` it is reached by. Out: guards that every replay of a
recording checks before it runs. Invariant: checking runs no user's code. What does not hold leads to the general way,
where ``runtime`` says what moved; it never leads to a replay.
"""
