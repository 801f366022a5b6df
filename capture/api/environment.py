"""What this machine offers: versions, the C module, and what is read of torch. For bug reports."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

import capture
from capture.core import config
from capture.core.sizes import bytes_text
from capture.native import native
from capture.plan_cache.store import default_dir
from capture.reporting.tables import format_table
from capture.torch_private import capabilities, setter_calls, switches, tensor_reads

Row = tuple[str, ...]


def environment_text() -> str:
    """Versions, what each private name of torch's was found to do, and every property and switch that a call compares,
    with where it is read and what that costs."""
    properties = [(read.name, read.read_by, f"{read.nanoseconds} ns") for read in tensor_reads.PROPERTIES]
    noticed = setter_calls.notices_setters()
    shown = [
        (switch.name, _read_by(switch, noticed=noticed), f"{switch.nanoseconds} ns") for switch in switches.SWITCHES
    ]
    parts = [
        format_table(list(_versions())),
        "What is compared of each tensor that a recording reads where it is:",
        format_table(properties),
        "Switches that every call compares:",
        format_table(shown),
        "Private names of torch, and whether they were found:",
        format_table([(name, _yes(is_there)) for name, is_there in attrs.asdict(capabilities.CAPABILITIES).items()]),
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _versions() -> Iterator[Row]:
    yield "capture", capture.__version__
    yield "Python", f"{platform.python_version()} ({platform.machine()})"
    yield "torch", torch.__version__
    yield "CUDA", torch.version.cuda or "none in this build"
    accelerator = torch.accelerator.current_accelerator()
    # torch may be built for a device whose driver is missing
    if accelerator is not None and torch.accelerator.is_available():
        yield "device", torch.get_device_module(accelerator).get_device_name()
    yield "driver", _driver()
    yield "fast path", "yes" if capabilities.HAS_METADATA_GUARD else "no: this torch has no TensorGuards"
    yield "cuda-bindings", _installed("cuda-bindings")
    yield "C module", f"version {native.VERSION}"
    yield "tensors through torch's C ABI", _yes(tensor_reads.reads_tensors())
    yield "holders of gradients counted", _yes(tensor_reads.counts_holders())
    yield "setters of switches noticed", _yes(setter_calls.notices_setters())
    file = config.settings_file()
    yield "settings file", str(file) if file is not None else "none"
    folder = default_dir()
    kept = [file.stat().st_size for file in folder.glob("*.json")] if folder.is_dir() else []
    plans = "1 plan" if len(kept) == 1 else f"{len(kept)} plans"
    yield "plans kept in", f"{folder} ({plans}, {bytes_text(sum(kept))})"


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError:
        return "none of NVIDIA's"


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _read_by(switch: switches.Switch, *, noticed: bool) -> str:
    name = getattr(switch.read, "__name__", str(switch.read))
    return f"{name}, after somebody set one" if noticed and switch.nanoseconds >= switches.SLOW else name


def _yes(found: object) -> str:
    return "yes" if found else "no"
