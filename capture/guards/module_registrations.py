"""Modules: notice that a parameter, buffer or submodule was registered anywhere in the process.

``module.weight = nn.Parameter(...)`` registers, also where it replaces another one. Writing to ``module._parameters``
and ``parameter.data = ...`` do not.
"""

from __future__ import annotations

import torch
from torch.nn.modules import module as _module

_count = 0
_following = False


def _registered(owner: torch.nn.Module, name: str, value: object) -> None:
    global _count
    _count += 1


def registrations() -> int:
    """How many there were since this was asked first."""
    global _following
    if not _following:
        _following = True
        _module.register_module_parameter_registration_hook(_registered)
        _module.register_module_buffer_registration_hook(_registered)
        _module.register_module_module_registration_hook(_registered)
    return _count
