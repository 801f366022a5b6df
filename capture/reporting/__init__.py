"""Findings, plans, rules and reports as text, tables, HTML and JSON.

In: values of ``core`` and ``rules``. Out: text. Invariant: no torch, and nothing is printed here. Other stages print,
warn or log the text that they get from here, so that a message reads the same everywhere.
"""
