"""Systems that make graphs or callables of their own, run as captured functions.

``compile`` is the backend of ``torch.compile``, ``fx`` takes graph modules, ``graphed`` has the signature of
``torch.cuda.make_graphed_callables``, ``aoti`` tells what a package of AOTInductor can be used for. Invariant: each
goes through the functions of ``api`` and ``runtime`` that any user's call goes through; no integration has a way of
its own past plan, tree or guards.
"""
