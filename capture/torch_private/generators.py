"""Where draws come from when code names no generator: torch's default generators, Python's ``random``, NumPy's.

A run that only captured must leave those of the host as they were, as it leaves torch's: what the body draws with them
decides what it does (layers that are left out, augmentation).
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

import torch

from capture.core.interrupts import let_through
from capture.native import native


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that draws on a device use by default."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index: int | None = device.index  # None for "cuda" alone, whatever the stub says
    index = torch.cuda.current_device() if index is None else index
    return torch.cuda.default_generators[index]


def default_generators() -> list[torch.Generator]:
    """Default generators of all devices in use."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *devices]


def numpy_random() -> Any:
    """``numpy.random``, once it is imported: another thread may be in the middle of that."""
    found = sys.modules.get("numpy.random")
    for name in _NUMPYS:
        if not hasattr(found, name):
            return None
    return found


def host_random_state() -> tuple[Any, Any]:
    """The states of ``random``, and of ``numpy.random`` if that is in use."""
    numpy = numpy_random()
    return random.getstate(), numpy.get_state() if numpy is not None else None


def restore_host_random(state: tuple[Any, Any]) -> None:
    """Set ``random`` and ``numpy.random`` to these states."""
    own, numpys = state
    if random.getstate() != own:
        random.setstate(own)
    if numpys is not None:
        sys.modules["numpy.random"].set_state(numpys)


_NUMPYS = ("BitGenerator", "Generator", "RandomState", "get_state", "set_state")
_WORDS = slice(24, 24 + 624 * 8)
_TWISTER = 5056  # bytes of a CPU generator's state: the seed, the rest of a block, the position in it, 624 words
_PHILOX = 16  # bytes of an accelerator's state: the seed, and how much was drawn
_BLOCKS = 1000
_BLOCKS_A_SECOND = 1_000_000  # of 624 numbers: no generator draws as many


def was_drawn(before: torch.Tensor, after: torch.Tensor, seconds: float) -> bool:
    """Whether a generator in the first state comes to the second one by drawing alone, at most so long. Others draw
    from the default generator while a body is watched; a body that seeds it, or sets its state, leaves what no draw
    does."""
    first_bytes, last_bytes = _bytes_of(before), _bytes_of(after)
    if first_bytes[:8] != last_bytes[:8] or len(first_bytes) != len(last_bytes):  # another seed
        return False
    if len(first_bytes) == _PHILOX:
        return bool(
            first_bytes[8:] <= last_bytes[8:] if sys.byteorder == "big" else first_bytes[:7:-1] <= last_bytes[:7:-1]
        )
    if len(first_bytes) != _TWISTER or not _knows_twister:
        return False
    limit = _BLOCKS + int(seconds * _BLOCKS_A_SECOND)
    blocks = native.blocks_between(first_bytes[_WORDS], last_bytes[_WORDS], limit)
    return blocks > 0 or (blocks == 0 and _place(first_bytes) <= _place(last_bytes))


def is_same_state(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both states are equal. A watch does not see the comparison, as it runs no operator."""
    return _bytes_of(one) == _bytes_of(other)


def advanced(state: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
    """The state that comes after ``state`` as ``after`` comes after ``before``, all of them of CPU generators, where
    nothing but numbers of 32 bits were drawn in between; None where that cannot be told."""
    if is_same_state(before, after):
        return state
    found = _advanced(_bytes_of(state), _bytes_of(before), _bytes_of(after))
    return None if found is None else torch.frombuffer(bytearray(found), dtype=torch.uint8)


def can_advance(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether ``advanced`` gives a state."""
    one, other = _bytes_of(before), _bytes_of(after)
    return one == other or _advanced(one, one, other) == other


def _advanced(state: bytes, before: bytes, after: bytes) -> bytes | None:
    blocks = native.blocks_between(before[_WORDS], after[_WORDS], _BLOCKS) if _knows_twister else -1
    if blocks < 0:
        return None
    used = _used(state) + 624 * blocks + _used(after) - _used(before)
    turns = (used - 1) // 624
    used -= 624 * turns
    words = native.after_blocks(state[_WORDS], turns)
    return b"".join((state[:8], struct.pack("=i", 625 - used), state[12:16], struct.pack("=Q", used), words,
                     state[_WORDS.stop :]))  # fmt: skip


def _used(state: bytes) -> int:
    """How many numbers of a block were drawn; all of the one that a seed stands for."""
    left: int = struct.unpack_from("=i", state, 8)[0]
    return 625 - left


def _bytes_of(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _place(state: bytes) -> int:
    found: int = struct.unpack_from("=Q", state, 16)[0]
    return found


def _reads_twister() -> bool:
    """Whether the state of a CPU generator is laid out as it is read here."""
    try:
        generator, numbers = torch.Generator("cpu"), torch.empty(1000, dtype=torch.int32, device="cpu")
        states = [generator.manual_seed(5).get_state()]
        for count in (3, 300, 1000, 1000):
            numbers[:count].random_(generator=generator)
            states.append(generator.get_state())
    except (RuntimeError, TypeError) as error:
        let_through(error)
        return False
    drawn = [[was_drawn(first, second, 0) for second in states] for first in states]
    return drawn == [[second >= first for second in range(5)] for first in range(5)]


_knows_twister = True
_knows_twister = _reads_twister()
