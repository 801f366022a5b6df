"""Modes and switches that torch keeps in C++, read by its own functions there: 3 ns each, through Python 50 to 400.

Functions are found by name in torch's libraries. The name tells their arguments, not what they give, so that they are
called only in versions of torch whose headers were read for it. There each is tried against what Python says. The
stated fallback, for all of them, is to ask in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from capture._fast import native

Reader = tuple[int, int, int, int, int, int]
"""Address, kind (as in ``native/modes.c``), three arguments, and the bits that count."""
_READ_IN = ((2, 11), (2, 13))
"""The first and the last version of torch whose headers were read."""
_VALUE, _BEHIND, _APART, _WRITTEN, _THERE = range(5)
_BYTE, _INT, _WORD = (1 << 8) - 1, (1 << 32) - 1, (1 << 64) - 1
_CPU, _CUDA = 0, 1  # c10::DeviceType
_KINDS = {"cpu": _CPU, "cuda": _CUDA}
_PRECISIONS = {"cuda": 1, "cpu": 2}  # at::Float32Backend: CUDA and MKLDNN
_OPS = (1, 2, 3)  # at::Float32Op: CONV, RNN, MATMUL

_DISPATCH_MODES = "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv"
_FUNCTION_MODES = "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv"
_THREADS = "_ZN2at15get_num_threadsEv"
_STATES = {
    _DISPATCH_MODES: (_VALUE, _WORD),
    _FUNCTION_MODES: (_VALUE, _WORD),
    "_ZN2at4impl22PythonTorchFunctionTLS18get_disabled_stateEv": (_VALUE, _INT),
    "_ZN2at9functorch20getDynamicLayerStackEv": (_APART, _WORD),
    "_ZN5torch3jit6tracer15getTracingStateEv": (_BEHIND, _WORD),
    "_ZN2at8autocast25is_autocast_cache_enabledEv": (_VALUE, _BYTE),
    _THREADS: (_VALUE, _INT),
    "_ZN3c1031get_default_dtype_as_scalartypeEv": (_VALUE, _BYTE),
}
"""Of this thread, or of all."""
_OFFSETS = (0, 8, 16, 24)  # of the words of an AutogradState; 2.13 has its flags in the last one
_GRADIENTS = "_ZN3c1013AutogradState13get_tls_stateEv"
_KEYS = "_ZN3c104impl26raw_local_dispatch_key_setE"
"""A variable of each thread: two words, the dispatch keys that are turned on and off in it."""
_AUTOCAST = "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE"
_AUTOCAST_TYPE = "_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE"
_SWITCHES = {
    "deterministicAlgorithms": "", "deterministicAlgorithmsWarnOnly": "", "userEnabledFlashSDP": "",
    "userEnabledMathSDP": "", "userEnabledOverrideableSDP": "", "allowFP16BF16ReductionMathSDP": "",
    "userEnabledMkldnn": "cpu", "deterministicMkldnn": "cpu", "allowFP16ReductionCPU": "cpu",
    "userEnabledMemEfficientSDP": "cuda", "userEnabledCuDNNSDP": "cuda", "userEnabledFA3SDP": "cuda",
    "userEnabledCuDNN": "cuda", "deterministicCuDNN": "cuda", "benchmarkCuDNN": "cuda",
    "allowFP16ReductionCuBLAS": "cuda", "allowBF16ReductionCuBLAS": "cuda", "allowFP16AccumulationCuBLAS": "cuda",
    "linalgPreferredBackend": "cuda",
}  # fmt: skip
"""Methods of ``at::Context`` that give a bool or a small number; kinds of device, as in ``_torch_private_flags``."""
_CHECKED: dict[str, Callable[[], bool]] = {
    "deterministicAlgorithms": torch.are_deterministic_algorithms_enabled,
    "deterministicAlgorithmsWarnOnly": torch.is_deterministic_algorithms_warn_only_enabled,
    "userEnabledFlashSDP": torch.backends.cuda.flash_sdp_enabled,
    "userEnabledMathSDP": torch.backends.cuda.math_sdp_enabled,
    "userEnabledMemEfficientSDP": torch.backends.cuda.mem_efficient_sdp_enabled,
    "userEnabledCuDNNSDP": torch.backends.cuda.cudnn_sdp_enabled,
    "userEnabledCuDNN": lambda: bool(torch.backends.cudnn.enabled),
    "deterministicCuDNN": lambda: bool(torch.backends.cudnn.deterministic),
    "benchmarkCuDNN": lambda: bool(torch.backends.cudnn.benchmark),
    "userEnabledMkldnn": lambda: bool(torch.backends.mkldnn.enabled),
}


def library(name: str) -> ctypes.CDLL:
    """One of torch's, which this process has loaded. Raises ``OSError`` where it has not."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"{name}.so"), os.RTLD_NOLOAD | os.RTLD_NOW)


class _Functions:
    """Of torch's libraries."""

    def __init__(self) -> None:
        self._libraries = [library(name) for name in ("libc10", "libtorch_cpu")]
        world = self._find("_ZN2at13globalContextEv")
        world.restype, world.argtypes = ctypes.c_void_p, []
        self._context = int(world())

    def _find(self, name: str) -> Any:
        """Raises ``AttributeError`` for one that is not there."""
        for library in self._libraries[:-1]:
            with contextlib.suppress(AttributeError):
                return getattr(library, name)
        return getattr(self._libraries[-1], name)

    def _address(self, name: str) -> int:
        return ctypes.cast(self._find(name), ctypes.c_void_p).value or 0

    def state(self, name: str, kind: int, mask: int, argument: int = 0, offset: int = 0) -> Reader:
        """A function."""
        return self._address(name), kind, argument, 0, offset, mask

    def switch(self, name: str, kind: int = _VALUE, mask: int = _BYTE, *, const: bool = True) -> Reader:
        """A method of ``at::Context`` without arguments."""
        mangled = f"_ZN{'K' if const else ''}2at7Context{len(name)}{name}Ev"
        return self._address(mangled), kind, self._context, 0, 0, mask

    def dispatch_keys(self) -> tuple[Reader, ...]:
        """Of this thread. Raises ``ValueError`` where there is none."""
        address = ctypes.addressof((2 * ctypes.c_uint64).in_dll(self._libraries[0], _KEYS))
        return tuple((address + offset, _THERE, 0, 0, 0, _WORD) for offset in (0, 8))

    def precision(self, backend: int, op: int) -> Reader:
        """Of products in single precision."""
        name = "_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE"
        return self._address(name), _VALUE, self._context, backend, op, _INT


def _gradients(functions: _Functions) -> Reader:
    """What tells grad mode and inference mode: the bits that each turns on, of one word of the state, which is
    looked for from its begin. Raises ``ValueError`` where there is none."""
    with torch.inference_mode(False), torch.no_grad():
        for offset in _OFFSETS:
            whole = functions.state(_GRADIENTS, _BEHIND, _WORD, offset=offset)
            neither = native.read_mode(whole)
            with torch.enable_grad():
                grad = native.read_mode(whole) & ~neither
            with torch.inference_mode():
                inference = native.read_mode(whole) & ~neither
            if grad.bit_count() == 1 and inference.bit_count() == 1:
                return functions.state(_GRADIENTS, _BEHIND, int(grad | inference), offset=offset)
    raise ValueError("grad mode is kept elsewhere")


def _readers(functions: _Functions, device: str) -> Iterator[Reader]:
    yield _gradients(functions)
    for name, (kind, mask) in _STATES.items():
        yield functions.state(name, kind, mask)
    for number in _KINDS.values():
        yield functions.state(_AUTOCAST, _VALUE, _BYTE, number)
        yield functions.state(_AUTOCAST_TYPE, _VALUE, _BYTE, number)
    for name, kind_of_device in _SWITCHES.items():
        if kind_of_device in ("", device):
            yield functions.switch(name)
    for op in _OPS:
        yield functions.precision(_PRECISIONS[device], op)
    yield functions.switch("sDPPriorityOrder", _WRITTEN, _WORD, const=False)
    if device == "cuda":
        yield functions.switch("blasPreferredBackend", const=False)
        with contextlib.suppress(AttributeError):  # since torch 2.13
            yield functions.switch("cudnnDepthwiseKernel", mask=_INT)


def _is_right(functions: _Functions) -> bool:
    """The functions say what Python does, also where that is something else for once, in this thread."""
    read = native.read_mode
    if any(bool(read(functions.switch(name))) is not ask() for name, ask in _CHECKED.items()):
        return False
    autocast, depth, dispatch = (
        functions.state(_AUTOCAST, _VALUE, _BYTE, _CPU), functions.state(_FUNCTION_MODES, _VALUE, _WORD),
        functions.state(_DISPATCH_MODES, _VALUE, _WORD),
    )  # fmt: skip
    right = bool(read(autocast)) is torch.is_autocast_enabled("cpu")
    right = right and read(functions.state(_THREADS, _VALUE, _INT)) == torch.get_num_threads()
    before = read(depth), read(dispatch)
    with torch.autocast("cpu", enabled=not torch.is_autocast_enabled("cpu")):
        right = right and bool(read(autocast)) is torch.is_autocast_enabled("cpu")
    with TorchFunctionMode():
        right = right and read(depth) == before[0] + 1
    with TorchDispatchMode():
        right = right and read(dispatch) == before[1] + 1
    return right


@functools.cache
def _keys() -> _Functions | None:
    """What finds the variable, if it says what Python does."""

    def both() -> tuple[list[int], list[int]]:
        asked = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        return [native.read_mode(one) for one in functions.dispatch_keys()], [one.raw_repr() for one in asked]

    try:
        functions = _Functions()
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            plain = both()
            with torch.inference_mode(), torch.autocast("cpu"):
                other = both()
    except (OSError, AttributeError, ValueError, RuntimeError):
        return None
    read, asked = ([one ^ now for one, now in zip(*pair, strict=True)] for pair in zip(plain, other, strict=True))
    return functions if read == asked and any(read) else None


def reads_dispatch_keys(device: str) -> bool:
    """Whether ``dispatch_keys`` finds them; else torch has to be asked, as its guard of metadata does."""
    return readers(device) is not None and _keys() is not None


def dispatch_keys(device: str) -> tuple[Reader, ...]:
    """What tells the dispatch keys that are on in this thread, beside ``readers``."""
    functions = _keys() if reads_dispatch_keys(device) else None
    return () if functions is None else functions.dispatch_keys()


@functools.cache
def readers(device: str) -> tuple[Reader, ...] | None:
    """What tells all of this thread's modes for operators on a kind of device, but for hooks on saved tensors, levels
    of forward-mode differentiation, and which function mode there is. None where Python has to be asked."""
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) if native is not None else ()
    if not version or not _READ_IN[0] <= version <= _READ_IN[1] or device not in _KINDS:
        return None
    if platform.machine() not in ("x86_64", "AMD64"):  # where a structure is written to is another argument there
        return None
    try:
        functions = _Functions()
        return tuple(_readers(functions, device)) if _is_right(functions) else None
    except (OSError, AttributeError, ValueError, RuntimeError):
        return None
