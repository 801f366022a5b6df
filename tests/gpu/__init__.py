"""Tests on a CUDA device: values are eager's bit for bit, whatever is recorded and whatever fails.

``CAPTURE_TEST_DEVICE=cpu`` runs the tests that make no CUDA call themselves on the CPU engine.
"""
