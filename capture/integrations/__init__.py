"""Integrations: what lets systems that make graphs of their own run them as captured functions."""

from __future__ import annotations
