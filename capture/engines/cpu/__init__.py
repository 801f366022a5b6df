"""The CPU engine: a body becomes a tape of operators that write into the memory they had while recording.

It obeys the contract of a CUDA graph: fixed addresses, no values read on the host, one pool. So a program that records
here is fit to record on a GPU, and everything above the engines is tested without one. ``arena`` is the pool, ``tape``
the recording, ``engine`` runs a body onto a tape.
"""
