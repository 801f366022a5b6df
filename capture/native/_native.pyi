from collections.abc import Callable, Sequence
from typing import Any

_Reader = tuple[int, int, int, int, int, int]

def tell(kind: type, /) -> None: ...
def read_mode(reader: _Reader, /) -> int: ...

class Modes:
    def __init__(
        self,
        terms: tuple[tuple[Callable[..., object] | str, tuple[Any, ...], object], ...],
        readers: tuple[_Reader, ...] = ...,
    ) -> None: ...
    def __call__(self) -> bool: ...

class Copies:
    def __init__(self, graph: int, copies: tuple[tuple[int, int, int, int], ...]) -> None: ...
    def __call__(self, leaves: Sequence[Any], /) -> None: ...
    def use(self, executable: int, /) -> None: ...
    def nodes(self) -> list[int]: ...

class Launch:
    def __init__(
        self,
        *,
        slow: Callable[[Sequence[Any]], None],
        pool: Any,
        stream_of: Callable[[int], int],
        device: Callable[[], int],
        index: int,
        executable: int,
        copies: Copies | None,
        copy_in: Callable[[Sequence[Any]], None] | None,
    ) -> None: ...
    def __call__(self, leaves: Sequence[Any], /) -> None: ...

_Layout = tuple[int, int, int, int, int, tuple[int, ...], int, int, int]

class Alike:
    def __init__(self, tensors: tuple[Any, ...], layout: _Layout) -> None: ...
    def __call__(self, tensors: tuple[Any, ...]) -> tuple[int, ...] | None: ...

class Tensors:
    def __init__(self, tensors: tuple[Any, ...], layout: _Layout, /) -> None: ...
    def __call__(self) -> bool: ...

class Facts:
    def __init__(self, facts: tuple[tuple[int, Any, Any, Any, int], ...], tensors: Tensors | None, /) -> None: ...
    def __call__(self, *tensors: Any) -> bool: ...

class NodeView:
    def __init__(
        self,
        *,
        outputs: Any,
        source: Any,
        several: tuple[Any, ...] | None,
        live: list[Any],
        pattern: tuple[int | None, ...],
        before: tuple[tuple[list[Any], int], ...],
        tensors: list[Any],
        preserving: bool,
    ) -> None: ...

class Held:
    def __init__(
        self,
        count: Callable[[int], int],
        storage: Any,
        address: int,
        first: Any = ...,
        layout: _Layout | None = ...,
        shown: bool = ...,
    ) -> None: ...
    def __call__(self) -> Any: ...
    def settle(self) -> int: ...
    def part(self) -> None: ...
    def again(self) -> Any: ...

class Untouched:
    def __init__(self, parameters: tuple[Any, ...], layout: _Layout, /) -> None: ...
    def __call__(self, parameters: tuple[Any, ...], /) -> bool: ...

def hand_out(
    sources: tuple[Any, ...],
    live: list[Any],
    positions: tuple[int, ...],
    values: list[Any],
    numbers: tuple[int, ...],
    tensors: list[Any] | None,
    /,
) -> list[int]: ...
def gradient_counts(parameter: Any, uses: Callable[[Any], int], /) -> tuple[int, int]: ...
def are_untouched(
    parameters: tuple[Any, ...],
    sources: tuple[Any, ...],
    count: Callable[[int], int],
    uses: Callable[[Any], int],
    fresh: Callable[..., bool],
    counts: tuple[int, int],
    /,
) -> bool: ...

class Way:
    def __init__(
        self,
        *,
        modes: Modes,
        miss: Any,
        ok: Any,
        function: Any,
        defaults_of: Any,
        defaults: Any,
        entry: Any,
        number: int,
        limit: int,
        in_capture: Any,
        alike: Alike | None,
        check_first: Any,
        check: Any,
        facts: Facts | None,
        receiver: Any,
        kind: type,
        world: Callable[[], bool] | None,
        in_use: Any,
        trees: dict[str, Any],
        backend: str,
        counters: Any,
        marks: Any,
        replay: Any,
        ready: Any,
        constants: tuple[Any, ...],
        alignments: tuple[int, ...],
        spans: tuple[int, ...],
        order: tuple[int, ...],
        shared: tuple[int, ...],
        least: int,
        most: int,
        verifies: bool,
        attach: Any,
        registrations: Any,
        sampled: int,
    ) -> None: ...
    def __call__(self, *values: Any) -> Any: ...

class Ways:
    def __init__(self, miss: Any) -> None: ...
    def __call__(self, *values: Any) -> Any: ...
    def add(self, way: Way, /) -> None: ...
    def clear(self) -> None: ...

class Methods:
    def __init__(self, instances: dict[int, tuple[Any, Any, Ways]], miss: Any) -> None: ...
    def __call__(self, instance: Any, values: tuple[Any, ...], /) -> Any: ...

def use_driver(library: str, /) -> bool: ...

VERSION: int

class NodeCount:
    def __init__(self, stream: int) -> None: ...
    def __call__(self) -> int: ...

class Follow:
    index: int
    nodes: int
    begin: int
    end: int
    def __init__(
        self,
        *,
        miss: object,
        sequence: tuple[str, ...],
        scalars: tuple[tuple[str, ...], ...],
        known: dict[int, str],
        starts: dict[int, str],
        operators: dict[int, tuple[str, Callable[..., Any], bool]],
        kinds: frozenset[type],
        printed: frozenset[type],
        shapes_alone: Callable[[], bool],
        differentiates: Callable[[], bool],
        capturing: Callable[[], bool],
        count: Callable[[], int],
    ) -> None: ...
    def __call__(self, op: object, args: tuple[Any, ...], kwargs: dict[str, Any] | None, /) -> Any: ...

def members_of_module(
    module: Any, place: Any, *, internals: frozenset[str]
) -> tuple[list[Any], tuple[tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]], ...]]: ...
def are_as_they_were(tables: tuple[tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]], ...], /) -> bool: ...
