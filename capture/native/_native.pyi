from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

stand_ins: dict[int, tuple[object, ...]]

def tell(kind: type, /) -> None: ...
def use_abi(
    *,
    functions: tuple[int | None, ...],
    impl_at: int,
    base: type,
    plain: tuple[type, ...],
    complex_types: tuple[int, ...],
    real_types: tuple[int, ...],
) -> None: ...
def forget_abi() -> None: ...
def note_collection(phase: str, info: dict[str, int], /) -> None: ...
def find_word(holder: object, word: int, /) -> int: ...
def tensor_metadata(tensor: Any, /) -> tuple[int, tuple[int, ...], tuple[int, ...], int, int, int] | None: ...

class OperatorHook:
    def __init__(self, leave_out: Callable[[Any, bool], object], key: object, see: Callable[..., Any]) -> None: ...
    def __call__(self, operator: Any, /, *args: Any, **kwargs: Any) -> Any: ...

class Binder:
    def __init__(
        self, names: tuple[str, ...], kinds: tuple[int, ...], defaults: tuple[Any, ...], empty: object
    ) -> None: ...
    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...
    def call(self, function: Callable[..., Any], values: tuple[Any, ...], /) -> Any: ...

class Modes:
    def __init__(
        self, terms: tuple[tuple[Any, ...], ...], slow: tuple[Modes, object, str, object] | None = ..., /
    ) -> None: ...
    def __call__(self) -> bool: ...

class Copies:
    def __init__(self, graph: int, copies: tuple[tuple[int, int, int, int], ...]) -> None: ...
    def __call__(self, leaves: Sequence[Any], /) -> None: ...
    def use(self, executable: int, /) -> None: ...
    def nodes(self) -> list[int]: ...

# (kind, value), such as ("register", 3): ``tape.c`` names the kinds.
_Template = tuple[str, Any]
# A function (a text: a method of the first argument), arguments, names of the last ones, results, whether it is one.
_Step = tuple[Any, tuple[_Template, ...], tuple[str, ...], tuple[_Template, ...], bool]

class Tape:
    def __init__(
        self,
        registers: list[Any],
        steps: tuple[_Step, ...],
        grad: Callable[[bool], object] | None = ...,
        owned: tuple[Any, ...] = ...,
        given: tuple[Any, ...] = ...,
        acts: int = ...,
        back: int = ...,
        undo: int = ...,
    ) -> None: ...
    parted: int
    stopped: int
    left: tuple[tuple[Any, ...], tuple[Any, ...]] | None
    def __call__(self, leaves: Sequence[Any], /) -> None: ...
    def put_back(self) -> None: ...

class Parted(Exception): ...

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

class StaticTensors:
    def __init__(
        self, tensors: tuple[Any, ...], metadata: Callable[[], bool] | None, asks_gradient: bool = True
    ) -> None: ...
    def __call__(self) -> bool: ...

class Guards:
    tensors: Any
    def __init__(self, guards: tuple[Any, ...], tensors: Any = ..., /) -> None: ...
    def __call__(self, leaves: Sequence[Any], /) -> int: ...
    def expect(self, at: int, expected: Any, /) -> None: ...
    def beside(self, apart: tuple[Any, ...], tensors: Any, /) -> Guards: ...

class NodeView:
    used: int
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
        collect: Callable[[], None] | None,
        preserving: bool,
    ) -> None: ...

class NodePart:
    def __init__(self, name: str, none: NodeParts) -> None: ...

class NodeParts:
    view: Any
    check: Any
    recording: Any
    function: Any
    outputs: Any
    guard: Any
    statics: Any
    program: Any
    generators: Any
    bound: Any
    proofs: Any
    listed_in: Any

class PartsRef:
    def __call__(self) -> NodeParts | None: ...

def reference_to(parts: NodeParts, /) -> PartsRef: ...

class OutputFiller:
    def __init__(self, parts: tuple[Any, ...], close: Callable[[list[Any]], Any] | None = ...) -> None: ...
    def __call__(self, values: Sequence[Any], /) -> Any: ...

class AddressRanges:
    def __init__(self, bounds: list[int]) -> None: ...
    def holds(self, address: int, /) -> bool: ...

class StorageWatch:
    def __init__(
        self,
        count: Callable[[int], int],
        storage: Any,
        address: int,
        first: Any = ...,
        uses: Callable[[Any], int] | None = ...,
        shown: bool = ...,
    ) -> None: ...
    def __call__(self) -> Any: ...
    def settle(self, lowest: list[int] = ..., /) -> int: ...
    def part(self) -> None: ...
    def again(self) -> Any: ...
    def keep_apart(self) -> None: ...

class Untouched:
    def __init__(
        self,
        parameters: tuple[Any, ...],
        watches: tuple[Any, ...],
        uses: Callable[[Any], int],
        counts: tuple[int, int],
        /,
    ) -> None: ...
    def __call__(self, parameters: tuple[Any, ...], /) -> bool: ...

def tell_uses(tensors: Sequence[Any], /) -> None: ...
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

class FastPath:
    left: int
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
        check: Any,
        guards: Guards | None,
        receiver: Any,
        kind: type,
        in_use: Any,
        trees: dict[str, Any],
        tree: str,
        counters: Any,
        marks: Any,
        replay: Any,
        ready: Any,
        constants: tuple[Any, ...],
        nodes: tuple[Any, ...] | None,
        alignments: tuple[int, ...],
        leading: tuple[int, ...],
        spans: tuple[int, ...],
        order: tuple[int, ...],
        shared: tuple[int, ...],
        least: int,
        most: int,
        verifies: bool,
        attach: Any,
        others: Any,
        static: tuple[bool, ...],
    ) -> None: ...
    def __call__(self, *values: Any) -> Any: ...
    def bound(self, values: tuple[Any, ...], /) -> Any: ...
    def own_times(self) -> list[int]: ...
    def times(self) -> list[tuple[int, int]]: ...

class FastPaths:
    def __init__(self, miss: Any) -> None: ...
    def __call__(self, *values: Any) -> Any: ...
    def bound(self, values: tuple[Any, ...], /) -> Any: ...
    def add(self, path: FastPath, /) -> None: ...
    def clear(self) -> None: ...

class InstancePaths:
    def __init__(self, instances: dict[int, tuple[Any, Any, FastPaths]], miss: Any) -> None: ...
    def __call__(self, instance: Any, values: tuple[Any, ...], /) -> Any: ...

def may_run(node: Any, /) -> bool: ...
def runs() -> int: ...
def is_on_the_way() -> bool: ...
def use_profiler(names: dict[str, Any], flag: str, make: Callable[[str], Any], /) -> None: ...
def is_path_used(path: list[Any], /) -> bool: ...
def begins_simply(tree: Any, marks: Any, function: Any, limit: int, /) -> bool: ...
def end_step(tree: Any, /) -> None: ...
def stand_on(tree: Any, node: Any, marks: Any, function: Any, /) -> None: ...
def use_driver(library: str, /) -> bool: ...
def fill_stack(byte: int, /) -> None: ...
def put_attributes(holder: Any, others: dict[str, Any], absent: object, /) -> None: ...
def current_frames() -> dict[int, FrameType]: ...
def blocks_between(first: bytes, second: bytes, limit: int, /) -> int: ...
def after_blocks(state: bytes, blocks: int, /) -> bytes: ...
def guarded(
    run: Callable[..., Any], arguments: tuple[Any, ...], mend: Callable[[list[BaseException]], Any], /
) -> Any: ...

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
    module: Any, source: Any, *, internals: frozenset[str]
) -> tuple[list[Any], tuple[tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]], ...]]: ...
def are_as_they_were(tables: tuple[tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]], ...], /) -> bool: ...
