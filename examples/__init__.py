"""Numbered examples, each a file to read and to run, and the demo. Run one with ``python examples/01_function.py``."""
