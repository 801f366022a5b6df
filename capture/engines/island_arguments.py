"""What an island is called with, as a recording holds it: the same containers, with something else for each tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from capture.key import pytree


def template_of(value: Any, stand_in: Callable[[torch.Tensor], Any]) -> Any:
    """The value with ``stand_in(tensor)`` for each tensor. Objects are not kept alive."""
    if isinstance(value, torch.Tensor):
        return stand_in(value)
    if type(value) is dict:
        return {key: template_of(member, stand_in) for key, member in value.items()}
    if pytree.is_namedtuple(type(value)):
        return type(value)(*[template_of(member, stand_in) for member in value])
    if type(value) in (tuple, list):
        return type(value)([template_of(member, stand_in) for member in value])
    return value if type(value) in pytree.PLAIN_TYPES else weakref.ref(value)


def filled(template: Any, kind: type, tensor_of: Callable[[Any], torch.Tensor]) -> Any:
    """The value again: ``tensor_of(one)`` where the template has one of this kind."""
    if type(template) is kind:
        return tensor_of(template)
    if isinstance(template, weakref.ref):
        return template()
    if type(template) is dict:
        return {key: filled(member, kind, tensor_of) for key, member in template.items()}
    if pytree.is_namedtuple(type(template)):
        return type(template)(*[filled(member, kind, tensor_of) for member in template])
    if type(template) in (tuple, list):
        return type(template)([
            tensor_of(member) if type(member) is kind else filled(member, kind, tensor_of) for member in template
        ])  # fmt: skip
    return template
