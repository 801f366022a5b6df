"""Paths of modules in the model that they belong to, for reports: ``blocks.3``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from capture.state.unreached import objects_of


def module_paths(receivers: Sequence[Any]) -> list[str]:
    """The path of each receiver that is a module inside of a larger one; an empty text for any other.

    A module does not know what holds it, so all modules of the process are looked through. Where two models share a
    module, the larger one names it. No code of the modules runs.
    """
    wanted = {id(receiver) for receiver in receivers if issubclass(type(receiver), nn.Module)}
    if not wanted:
        return [""] * len(receivers)
    modules: list[nn.Module] = objects_of(nn.Module)
    inside = {id(child) for module in modules for _, child in _children(module)}
    sizes_and_paths: dict[int, tuple[int, str]] = {}
    for root in modules:
        if id(root) in inside:
            continue
        paths = dict(_paths(root))
        for number in wanted & paths.keys():
            if number not in sizes_and_paths or len(paths) > sizes_and_paths[number][0]:
                sizes_and_paths[number] = len(paths), paths[number]
    return [sizes_and_paths.get(id(receiver), (0, ""))[1] for receiver in receivers]


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    members = vars(module).get("_modules")
    for name, child in list(members.items()) if isinstance(members, dict) else ():
        if child is not None:
            yield str(name), child


def _paths(root: nn.Module) -> Iterator[tuple[int, str]]:
    """``id`` and path of the root and all below it, each once."""
    seen, waiting = {id(root)}, [(root, "")]
    while waiting:
        module, path = waiting.pop()
        yield id(module), path
        for name, child in _children(module):
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append((child, f"{path}.{name}" if path else name))
