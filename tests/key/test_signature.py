"""Arguments of a call are bound as Python binds them, for every kind of parameter; functions are called with the values
that this gives."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from capture.key.signature import make_binder
from capture.native import native

DEFAULT: list[int] = []
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "none": lambda: (),
    "one": lambda x: (x,),
    "defaults": lambda x, y=DEFAULT, z=3: (x, y, z),
    "only by position": lambda x, y=2, /: (x, y),
    "only by position and others": lambda x, /, y=2: (x, y),
    "only by name": lambda x, *, y, z=3: (x, y, z),
    "star": lambda x, *rest: (x, rest),
    "star and names": lambda x, y=2, *rest, z=3: (x, y, rest, z),
    "stars": lambda x, **named: (x, named),
    "everything": lambda a, b=2, /, x=3, *rest, y, z=DEFAULT, **named: (a, b, x, rest, y, z, named),
    "variadic": lambda *args, **kwargs: (args, kwargs),
}
NAMES = st.sampled_from(["a", "x", "y", "z", "named", "rest", "args", "other"])


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(deadline=None)
@given(args=st.lists(st.integers(), max_size=4), kwargs=st.dictionaries(NAMES, st.integers(), max_size=4))
def test_arguments_are_bound_as_python_binds_them(name: str, args: list[int], kwargs: dict[str, int]) -> None:
    function = FUNCTIONS[name]
    binder = make_binder(inspect.signature(function))
    try:
        expected = function(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            binder.values(*args, **kwargs)
        return
    values = binder.values(*args, **kwargs)
    assert values == expected
    assert all(
        list(bound_value) == list(expected_value)
        for bound_value, expected_value in zip(values, expected, strict=True)
        if isinstance(bound_value, dict)
    )
    assert binder.call(function, values) == expected


def test_default_values_are_shared_and_never_compared() -> None:
    class Odd:
        @override
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    odd = Odd()
    binder = make_binder(inspect.signature(FUNCTIONS["defaults"]))
    values = binder.values(odd)
    assert values[0] is odd
    assert values[1] is DEFAULT
    values = binder.values(z=odd, x=odd)
    assert values[2] is odd


# ------------------------------------------------------------------------------------- any signature, called in any way

Parameter = inspect.Parameter


class Value:
    """An argument or a default; prints as the expression that gives it to a lambda."""

    def __init__(self, name: str) -> None:
        self.name = name

    @override
    def __repr__(self) -> str:
        return f"given[{self.name!r}]"


@st.composite
def signatures(draw: st.DrawFn) -> inspect.Signature:
    names = iter(draw(st.permutations(["aa", "bb", "cc", "dd", "ee", "ff", "gg"])))
    parameters, defaulted = list[Parameter](), False
    for kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
        for _ in range(draw(st.integers(0, 2))):
            defaulted = defaulted or draw(st.booleans())
            name = next(names)
            parameters.append(Parameter(name, kind, default=Value(name) if defaulted else Parameter.empty))
    if draw(st.booleans()):
        parameters.append(Parameter(next(names), Parameter.VAR_POSITIONAL))
    for _ in range(draw(st.integers(0, 2))):
        name = next(names)
        default = Value(name) if draw(st.booleans()) else Parameter.empty
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))
    if draw(st.booleans()):
        parameters.append(Parameter(draw(st.sampled_from(["kwargs", *names])), Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


@st.composite
def calls(draw: st.DrawFn, signature: inspect.Signature) -> tuple[tuple[Value, ...], dict[str, Value]]:
    """Arguments that the signature takes in most cases: most parameters that get none by position get one by name."""
    count = draw(st.integers(0, 6 if draw(st.booleans()) else len(signature.parameters)))
    left = [name for name in list(signature.parameters)[count:] if draw(st.integers(0, 5))]
    odd = draw(
        st.lists(st.sampled_from([*signature.parameters, "hh", "ii"]), max_size=draw(st.sampled_from([0, 0, 3])))
    )
    named = draw(st.permutations([*dict.fromkeys([*left, *odd])]))
    return tuple(Value(str(i)) for i in range(count)), {name: Value(name) for name in named}


def as_function(signature: inspect.Signature) -> Callable[..., Any]:
    """A function of this signature that returns the tuple of its parameters, as Python itself binds them."""
    given = {name: parameter.default for name, parameter in signature.parameters.items()}
    text = f"lambda {str(signature)[1:-1]}: ({''.join(f'{name}, ' for name in given)})"
    made: Callable[..., Any] = eval(text, {"given": given})  # noqa: S307 - names and defaults made above
    return made


def outcome(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result with all objects told apart by identity, and dictionaries in their order; or ``TypeError``."""
    try:
        values = function(*args, **kwargs)
    except TypeError:
        return TypeError
    return [(type(value), list(value.items()) if type(value) is dict else value) for value in values]


def as_inspect_binds(signature: inspect.Signature) -> Callable[..., Any]:
    def values(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    return values


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", range(3))
@settings(deadline=None, max_examples=140, derandomize=False)  # parts draw alike where `CI` is set, else
@given(data=st.data())
def test_any_call_of_any_signature_is_bound_as_python_and_inspect_bind_it(part: int, data: st.DataObject) -> None:
    signature = data.draw(signatures())
    args, kwargs = data.draw(calls(signature))
    binder, function = make_binder(signature), as_function(signature)
    bound = outcome(binder.values, args, kwargs)
    assert bound == outcome(function, args, kwargs)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    if not any(kinds.get(name) is Parameter.POSITIONAL_ONLY for name in kwargs):
        # where inspect is right in all versions: it gives such a name away from 3.13 on, where it has a default, and
        # up to 3.12 where there are other keywords (https://github.com/python/cpython/issues/87106)
        assert bound == outcome(as_inspect_binds(signature), args, kwargs)
    if bound is not TypeError:
        values = binder.values(*args, **kwargs)
        assert outcome(lambda: binder.call(function, values), (), {}) == bound


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", range(2))
@settings(deadline=None, max_examples=100, derandomize=False)
@given(data=st.data())
def test_binding_keeps_no_reference_and_loses_none(part: int, data: st.DataObject) -> None:
    signature = data.draw(signatures())
    args, kwargs = data.draw(calls(signature))
    binder, function = make_binder(signature), as_function(signature)
    objects = [
        *args,
        *kwargs,
        *kwargs.values(),
        *[parameter.default for parameter in signature.parameters.values()],
        binder.values,
    ]

    def counts() -> list[int]:
        return [sys.getrefcount(counted) for counted in objects]

    # The collector would let go of earlier examples' signatures meanwhile, and so of names and `Parameter.empty`.
    gc.disable()
    try:
        before = counts()
        for _ in range(3):
            try:
                values = binder.values(*args, **kwargs)
                binder.call(function, values)
                del values
            except TypeError:
                pass
        assert counts() == before
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------------------------- what is odd


def test_keywords_are_compared_as_text_and_may_refuse() -> None:
    class Refuses(str):
        __slots__ = ()

        @override
        def __eq__(self, other: object) -> bool:
            raise ValueError("no answer")

        __hash__ = str.__hash__

    class Agrees(str):
        __slots__ = ()

    binder = make_binder(inspect.signature(FUNCTIONS["defaults"]))
    assert binder.values(**{Agrees("y"): 2, Agrees("x"): 1}) == (1, 2, 3)
    with pytest.raises(ValueError, match="no answer"):
        binder.values(1, **{Refuses("y"): 2})
    with pytest.raises(TypeError):
        binder.values(1, **{2: 3})  # type: ignore[arg-type]


def test_names_of_a_signature_need_not_be_interned_or_fit_in_code() -> None:
    equal_name, name = (str(b"somename", "ascii") for _ in range(2))
    assert equal_name is not name
    binder = make_binder(inspect.Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD)]))
    assert binder.values(somename=1) == (1,)
    assert binder.values(**{equal_name: 1}) == (1,)
    assert native.Binder(("a b", "class"), (1, 3), (1, 1), 1)(**{"class": 3, "a b": 2}) == (2, 3)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("names", "kinds", "defaults", "error"),
    [
        (("a",), (), (None,), ValueError),
        (("a",), (0,), (), ValueError),
        (("a", "b"), (1, 0), (None, None), ValueError),
        (("a", "b"), (2, 2), (None, None), ValueError),
        (("a",), (5,), (None,), ValueError),
        (("a",), (-1,), (None,), ValueError),
        (("a",), ("x",), (None,), TypeError),
        ((1,), (0,), (None,), TypeError),
    ],
)
def test_what_is_no_signature_is_refused(names: Any, kinds: Any, defaults: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        native.Binder(names, kinds, defaults, None)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_calling_asks_for_a_value_each(name: str) -> None:
    binder = make_binder(inspect.signature(FUNCTIONS[name]))
    with pytest.raises(TypeError, match="a value for each parameter"):
        binder.call(FUNCTIONS[name], (1,) * (len(binder.names) + 1))


def test_an_error_of_the_function_comes_out_of_the_call() -> None:
    def fails(*args: int, **kwargs: int) -> None:
        raise ZeroDivisionError

    for name in ("one", "everything"):
        binder = make_binder(inspect.signature(FUNCTIONS[name]))
        with pytest.raises(ZeroDivisionError):
            binder.call(fails, binder.values(1) if name == "one" else binder.values(1, y=2))


def test_a_default_that_leads_back_to_the_binder_is_collected() -> None:
    default = {"binder": None, "value": (value := Value("gone"))}
    signature = inspect.Signature([Parameter("x", Parameter.KEYWORD_ONLY, default=default)])
    default["binder"], gone = make_binder(signature).values, weakref.ref(value)  # type: ignore[assignment]
    del default, signature, value
    gc.collect()
    assert gone() is None
