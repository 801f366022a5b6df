"""What torch does not document, by subject, each name with a probe and a stated fallback.

In: the torch that is installed. Out: functions and flags that other stages use as if they were public. A name that is
missing, or that a probe finds to behave otherwise, makes something slower or keeps something from being recorded; it
never makes a result wrong, and each docstring says which.

Invariant: no other folder names anything private of torch (``tests/architecture/test_sources.py`` looks). A new torch
is looked through here, in one place.
"""
