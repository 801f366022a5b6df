"""Proofs on a GPU: real models, and ratios to what an expert writes by hand. ``python -m benchmarks.gpu NAME``.

``--tiny`` runs the same programs on the CPU engine with tiny sizes: it shows that they run and measures nothing.
"""
