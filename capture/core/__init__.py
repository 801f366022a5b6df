"""Data that all stages share: options, facts, findings, the plan, errors, settings, events.

In: what users write (``options``) and what other stages tell (facts, counts). Out: frozen values that every stage may
hold, print, compare and keep on disk. ``facts`` is what a watched run showed, ``findings`` what a rule says of it,
``plan`` the decisions. Only ``facts.Facts`` is called facts.

Invariant: nothing here imports torch or another stage. Dtypes and devices are texts, so that the facts of a job can be
replayed in a test on another machine, and a plan can be read where torch is not installed.
"""
