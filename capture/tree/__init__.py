"""Recordings under the exact path of recordings they followed, in one pool, and who of their outputs is alive.

In: a recording and where it was made. Out: which node may run next (``tree``, ``node``), outputs built again after a
replay (``output_planner``, ``outputs``, ``output_structure``), whether somebody still uses a block (``liveness``), and
memory that stays with those who use it for longer than a step (``pins``). ``step`` has the marks between steps,
``thread_trees`` the trees of each thread.

Invariant: a node is replayed only where everything that was dead when it was recorded is dead now, as the pool may have
given that memory to it. It prevents the silent corruption that graphs in a shared pool are known for: a tensor whose
values change as another graph runs.
"""
