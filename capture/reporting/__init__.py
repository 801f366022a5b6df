"""Text of findings, plans, rules and tables, for messages, ``explain`` and the command line.

In: values of ``core`` and ``rules``. Out: text. Invariant: no torch, and no output: whoever prints, warns or logs takes
the text from here, so that a message reads the same in all places.
"""
