"""Recordings under the exact path of recordings they followed, in one pool, and which of their outputs are alive.

In: a recording and where it was made. Out: which node may run next (``tree``, ``node``), outputs built again after a
replay (``output_planner``, ``outputs``, ``output_structure``), whether a block is still used (``liveness``), and memory
that stays with its users for longer than a step (``pins``). ``step`` has the marks between steps, ``thread_trees`` the
trees of each thread.

Invariant: a node is replayed only where everything that was dead when it was recorded is dead now, as the pool may have
given that memory to it. Without it graphs in a shared pool corrupt memory silently: a tensor's values change as another
graph runs.
"""
