"""Forward and backward of one function apart: what a replayed forward pass needs for its gradients.

In: a call whose results need gradients. Out: the results without a graph, the tensors that the backward pass needs, and
the graph itself, kept without tensors (``saved_graph``), which gives gradients for any later call. ``leaf_swap`` lends
parameters to a body under nodes of its own, ``accumulate_grad`` puts gradients into ``.grad`` as autograd would,
``philox_seeds`` keeps what attention kernels drew.

Invariant: the caller's autograd sees one ordinary node a call, and its own rules hold: ``retain_graph``, a second
backward pass, a saved tensor that was written.
"""
