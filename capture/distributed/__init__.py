"""Several processes: ranks agree on whether to record, and recordings end with their process group.

In: what this rank found about one call, and the groups its body uses. Out: what all ranks found. Invariant: a rank
never runs a collective that the others do not run. One that recorded, compared or gave up alone would wait for ever.
"""
