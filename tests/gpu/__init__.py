"""Tests on a CUDA device: values are eager's bit for bit, whatever is recorded and whatever fails.

``CAPTURE_TEST_DEVICE=cpu`` runs what needs no CUDA call of its own on the CPU engine.
"""
