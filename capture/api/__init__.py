"""What users call: the decorator, ``explain``, ``recordings`` and the like, and warming up.

In: users' functions and arguments. Out: real functions of the same signature, and frozen reports. Invariant: a
decorated function is a function as before for type checkers, ``inspect``, ``pickle``, ``deepcopy`` and
``torch.compile``; its state lies beside it, weakly held by instance.
"""
