"""The order between the kernels of a graph that their memory asks for, and no more.

Stage: between what an engine knows of its nodes and the edges it gives a graph. In: nodes in recorded order, each with
its operator and the ranges of addresses it reads and writes. Out: edges. Pure: numbers in, numbers out, no torch.
Invariant: every order that the edges allow gives each node the memory that it had in the recorded order.
"""
