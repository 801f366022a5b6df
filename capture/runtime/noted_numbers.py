"""Numbers that note what Python code does with them: what is computed from them is known as a formula, all else that
reads them is told.

A body gets ``Noted`` numbers in the place of its own in one watched run. Arithmetic with plain numbers gives noted
numbers again (``-lr``, ``1 - lr * decay``); operators take their values without any of this. Comparing one, printing it
or looking something up by it makes ``is_read`` true: the body may take another way for another number. What reads a
number in C and calls no method of it stays unnoticed here, above all indices and lengths of ``range``, which take the
value of an ``int``: a second run with another number has to tell (``numbers.noted_run``). So does a float on the left
of a whole number: for that there are runs in which these are of a class that it asks (``NotedWhole``).

Where a run ``asks``, a comparison is no reason to give up: it is kept as a question with its answer (``decisions``).
"""

from __future__ import annotations

import dis
import functools
import hashlib
import itertools
import math
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import field

from capture.core.data import define, frozen
from capture.engines.base import Number

_PLAIN = (float, int)
_sum = sum  # Python's own, whatever a watched body finds in its place
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow,
}  # fmt: skip
_UNARY: dict[str, Callable[[Any], Any]] = {"neg": operator.neg, "pos": operator.pos, "abs": operator.abs}
MATH: dict[str, Callable[..., float]] = {
    f"math.{name}": getattr(math, name)
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "cos", "cosh", "degrees", "erf", "erfc",
        "exp", "expm1", "fabs", "fmod", "gamma", "hypot", "lgamma", "log", "log10", "log1p", "log2", "pow", "radians",
        "sin", "sinh", "sqrt", "tan", "tanh",
    )
}  # fmt: skip
"""Functions of ``math`` that compute one float from numbers and do nothing else (``noted_math``)."""
_BUILT_IN: dict[str, Callable[..., Any]] = {"sum": lambda start, *items: _sum(items, start), "float": float}
"""What built-in functions compute. ``sum`` adds many numbers from Python 3.12 on other than one after the other."""
_TENTHS = [0.1] * 10
_IS_SUM_PLAIN = sum(_TENTHS) == functools.reduce(operator.add, _TENTHS)
"""``sum`` of floats adds one after the other. Else it takes errors into account, but for floats of other classes."""
_TEXTS: dict[str, Callable[..., Any]] = {
    "round": round, "format": format, "str": str, "repr": repr, "concat": operator.add,
}  # fmt: skip
"""Beside arithmetic, what gives another number or a text and does nothing else."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {**_BINARY, **_UNARY, **MATH, **_TEXTS, **_BUILT_IN}
ASKING: dict[str, Callable[..., Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "bool": bool, "value": operator.pos, "math.isfinite": math.isfinite, "math.isinf": math.isinf,
    "math.isnan": math.isnan,
}  # fmt: skip
_ERRORS = (ArithmeticError, ValueError)
_NEVER_RAISE = frozenset(
    {"add", "sub", "mul", "sum", "float", "neg", "pos", "abs", "format", "str", "repr", "concat"}
    | {f"math.{name}" for name in ("atan", "atan2", "copysign", "degrees", "erf", "erfc", "fabs", "radians", "tanh")}
)
"""Operations that compute something of any numbers, if they do of some. Only those of zeros divide by them."""
_DIVIDE = frozenset({"truediv", "floordiv", "mod"})
_EQUAL = frozenset({("eq", True), ("ne", False), ("bool", False)})
_MOST = 256
"""Formulas of one run. A body that computes more numbers than that does not pass them on as they are."""
_MOST_QUESTIONS = 32
_LONG = 256
"""Letters of a formula's text. What is longer is told by a digest."""
_FAR = 1013  # as an index it raises
_FEW = 2  # remainders: what is divided by this is told by the remainder itself
_LARGEST = 1 << 53  # from there on not every whole number is a float
_KEPT = frozenset({0.0, 1.0, -1.0, 0.5, -0.5, 2.0})


@frozen(eq=False)
class Formula:
    """How a number follows from those of the call; one object for equal ones. ``operands``: further formulas, numbers,
    or for no operation the position of the number."""

    operation: str
    operands: tuple[Any, ...]
    _text: str = field(init=False, repr=False)

    @_text.default
    def _written(self) -> str:
        """Formulas share parts: a text that has all of them in full would double with each ``n = n * a + n * b``."""
        text = f"{self.operation}({', '.join(map(_text_of, self.operands))})"
        return text if len(text) <= _LONG else f"{self.operation}(#{hashlib.sha1(text.encode()).hexdigest()})"

    def value(self, numbers: Any, known: dict[Formula, Any] | None = None) -> Any:
        """The number that Python computes. Raises what the operation raises. ``numbers``: by position, or by what
        stands for it there. ``known``: values of formulas for these numbers, to which this one adds. Formulas share
        their parts, so without it a long chain of them would be computed from its begin for each."""
        known = {} if known is None else known
        todo = [] if self in known else [self]
        while todo:  # a chain of some hundred formulas would be too deep for functions that call themselves
            formula, operands = todo[-1], list[Any]()
            for one in formula.operands:
                if type(one) is not Formula:
                    operands.append(one)
                elif one in known:
                    operands.append(known[one])
                else:
                    todo.append(one)
                    break
            else:
                operation = formula.operation
                known[todo.pop()] = function_of(operation)(*operands) if operation else numbers[operands[0]]
        return known[self]

    def text(self) -> str:
        """Equal for equal formulas of any run."""
        return self._text

    def may_raise(self) -> bool:
        """Whether the operation itself raises for other numbers."""
        if not self.operation or self.operation in _NEVER_RAISE:
            return False
        return self.operation not in _DIVIDE or type(self.operands[1]) is Formula

    def parts(self) -> dict[Formula, None]:
        """It and all that it is made of, each once."""
        found, todo = dict.fromkeys([self]), [self]
        while todo:
            inside = [one for one in todo.pop().operands if type(one) is Formula and one not in found]
            found.update(dict.fromkeys(inside))
            todo += inside
        return found

    def origins(self) -> frozenset[Any]:
        """Positions of the numbers that it is made of, or what stands for them."""
        return frozenset([part.operands[0] for part in self.parts() if not part.operation])


@frozen
class Question:
    """What Python code asks of numbers, such as ``step % 4 == 0``. ``operands``: formulas or numbers; ``text`` is equal
    for equal questions. That an operation ``raises`` an error for some numbers is a question, too, as the body may
    catch it: the name of the error is the answer."""

    operation: str
    operands: tuple[Any, ...] = field(eq=False)
    text: str

    def origins(self) -> frozenset[Any]:
        """As those of a formula."""
        return frozenset().union(*(operand.origins() for operand in self.operands if type(operand) is Formula))

    def answer(self, numbers: Any, known: dict[Formula, Any] | None = None) -> Any:
        """The answer for these numbers of a call. Raises what the operation raises. ``known``: see ``Formula``."""
        known = {} if known is None else known
        if self.operation == "raises":
            return _error_of(self.operands[0], numbers, known)
        return ASKING[self.operation](*[_value_of(operand, numbers, known) for operand in self.operands])

    def fixed(self, answer: Any) -> Formula | None:
        """The formula whose value this answer tells."""
        operands = self.operands
        if self.operation == "raises":  # only zeros raise it where something is divided
            operands = operands[0].operands[1:] if answer == "ZeroDivisionError" else ()
            operands = operands if self.operands[0].operation in _DIVIDE else ()
        elif (self.operation, answer) not in _EQUAL and self.operation != "value":
            return None
        formulas = [operand for operand in operands if type(operand) is Formula]
        return formulas[0] if len(formulas) == 1 else None


def _error_of(formula: Formula, numbers: Any, known: dict[Formula, Any]) -> str:
    """The name of the error that is raised; empty if none is."""
    try:
        formula.value(numbers, known)
    except _ERRORS as error:
        return type(error).__name__
    return ""


def _text_of(operand: Any) -> str:
    return operand.text() if type(operand) is Formula else f"{type(operand).__name__} {operand!r}"


def _value_of(operand: Any, numbers: Any, known: dict[Formula, Any]) -> Any:
    return operand.value(numbers, known) if type(operand) is Formula else operand


def may_vary(value: Number) -> bool:
    """Whether all kernels do the same with this number as with others."""
    if type(value) is int:
        return abs(value) < _LARGEST and value not in _KEPT
    return math.isfinite(value) and value not in _KEPT


def may_be_given(value: Any, *, is_power: bool) -> bool:
    """Whether operators that got another number in a recording do the same with this one."""
    return type(value) in _PLAIN and may_vary(value) and not (is_power and float(value).is_integer())


def function_of(operation: str) -> Callable[..., Any]:
    """What computes it."""
    return _FUNCTIONS[operation]


def _do(operation: str, operands: Sequence[Any]) -> Any:
    return function_of(operation)(*operands)


def _key(operand: Any) -> Any:
    """Numbers that are equal and do otherwise (``1``, ``1.0``, ``0.0``, ``-0.0``) are other operands."""
    return operand if type(operand) is Formula else (type(operand), repr(operand))


@define(eq=False)
class Noting:
    """Notes what one run does with its numbers."""

    is_read: bool = False
    is_over: bool = False
    """The body is over: who looks at the numbers now is this library."""
    formulas: dict[Any, Formula] = field(factory=dict)
    asks: bool = False
    """Comparisons are kept as questions; else they count as reads."""
    has_raised: bool = False
    """An error was raised that is no answer, for this number: the body may have caught it."""
    keeps: bool = False
    """What is computed may be kept and returned, texts too (``formulas``)."""
    questions: dict[Question, Any] = field(factory=dict)
    """Questions with their answers, in the order in which they were asked."""
    has_wholes: bool = False
    """Whole numbers are ``NotedWhole``."""
    indices: list[Formula] = field(factory=list)
    """Those that were taken for an index or a length."""
    is_rounded: bool = False
    """Whole numbers were computed that are the same for several numbers of a call, as a remainder is."""

    def noted(self, value: Number | str, formula: Formula) -> Any:
        """The number, to be given to the body."""
        key = formula.operation, tuple(map(_key, formula.operands))
        formula = self.formulas.setdefault(key, formula)
        if len(self.formulas) > _MOST:
            self.is_read = True
        if self.asks and formula.may_raise():
            self.asked("raises", (formula,), "")
        is_whole = self.has_wholes and type(value) is int and abs(value) < _LARGEST
        self.is_read = self.is_read or (self.has_wholes and type(value) is int and not is_whole)
        kinds: dict[type, Any] = {float: NotedFloat, int: NotedWhole if is_whole else NotedInt, str: NotedText}
        kind = kinds[type(value)]
        number: Any = kind.__bases__[0].__new__(kind, value)
        number.noting, number.formula = self, formula
        return number

    def begin(self, numbers: Sequence[Number]) -> list[Any]:
        """The numbers of the call, each as one that notes its uses."""
        return [self.noted(value, Formula("", (at,))) for at, value in enumerate(numbers)]

    def computed(self, operation: str, operands: Sequence[Any]) -> Any:
        """The result of arithmetic on noted and plain numbers."""
        plain = [plain_of(operand) for operand in operands]
        formula = Formula(operation, tuple(getattr(operand, "formula", operand) for operand in operands))
        try:
            result = _do(operation, plain)
        except Exception as error:
            if self.asks and isinstance(error, _ERRORS):
                self.asked("raises", (formula,), type(error).__name__)
            else:
                self.is_read = self.has_raised = True
            raise
        if operation in _TEXTS and self.keeps and type(result) in (str, float):
            return self.noted(result, formula)
        if self.asks and type(result) in _PLAIN and abs(result) < _LARGEST:
            if operation == "mod" and type(result) is int and type(plain[1]) is int and 0 < plain[1] <= _FEW:
                return self.asked("value", (formula,), result)
            self.is_rounded = self.is_rounded or (type(result) is int and not _is_told_apart(operation, operands))
            return self.noted(result, formula)
        if type(result) not in _PLAIN or (type(result) is int and not _is_told_apart(operation, operands)):
            self.is_read = True
            return result
        return self.noted(result, formula)

    def asked(self, operation: str, operands: Sequence[Any], answer: Any) -> Any:
        """Keep a question. Gives its answer."""
        given = tuple(getattr(operand, "formula", operand) for operand in operands)
        question = Question(operation, given, f"{operation}({', '.join(map(_text_of, given))})")
        self.questions.setdefault(question, answer)
        self.is_read = self.is_read or self.count_questions() > _MOST_QUESTIONS
        return answer

    def texts(self) -> set[str]:
        """All that was computed and asked."""
        return {one.text() for one in self.formulas.values()} | {one.text for one in self.questions}

    def not_told(self) -> dict[str, Formula]:
        """Formulas, by text, whose value no answer fixes. C code might use them unnoticed, as an index."""
        told = [question.fixed(answer) for question, answer in self.questions.items()]
        fixed = {formula.text() for formula in told if formula is not None}
        return {text: formula for formula in self.formulas.values() if (text := formula.text()) not in fixed}

    def count_questions(self) -> int:
        """How often the body itself asks."""
        return sum(question.operation != "raises" for question in self.questions)


def others_than(own: Sequence[Number], formulas: Iterable[Formula]) -> Iterator[list[Number]]:
    """Other numbers: first far ones, as they are no indices, then those nearby. What is divided by a number may have to
    keep the remainder."""
    divisors = [formula.operands[1] for formula in formulas if formula.operation in ("mod", "floordiv")]
    period = math.lcm(*[number for number in divisors if type(number) is int and 0 < number < _FAR**2]) or 1
    steps = itertools.product((-_FAR, _FAR, 0, -1, 1, 2, 3), range(-8, 9))
    shifts = [shift for far, near in steps if (shift := far * period + near)]
    for shift in shifts:
        yield [
            number + shift * (at + 1) if type(number) is int else number + shift / 7 for at, number in enumerate(own)
        ]
        yield [number + shift if type(number) is int else number * (1 + shift / 64) for number in own]
    for shift in shifts:  # last, as there are many where there are many numbers
        yield from ([number + shift * (at == only) for at, number in enumerate(own)] for only in range(len(own)))


def _is_told_apart(operation: str, operands: Sequence[Any]) -> bool:
    """Whether other numbers give another result. C code may take that for an index, which shows where it is another
    one: with ``k % 2`` it may be the same in all runs that are looked at."""
    return (
        operation in ("add", "sub", "mul", "neg", "pos") and sum(type(operand) in _KINDS for operand in operands) == 1
    )


def _plain(value: Any) -> Any:
    if type(value) is NotedWhole:
        return int(float.__pos__(value))
    kind = _KINDS.get(type(value))
    return value if kind is None else kind.__new__(kind, kind.__pos__(value))


class NotedFloat(float):
    """A float that is noted. Code that asks for the class, and makes a number of it, gets a plain one."""

    def __new__(cls, *given: Any) -> Any:
        return float(*given)

    noting: Noting
    formula: Formula


class NotedInt(int):
    """An int that is noted."""

    def __new__(cls, *given: Any) -> Any:
        return int(*given)

    noting: Noting
    formula: Formula


class NotedWhole(float):
    """An int that is noted, also by floats on its left: a float leaves ``0.5 * n`` and ``0.5 < n`` to the class of the
    number on its right only where that is a subclass of its own. All methods are those of an int."""

    __class__ = property(lambda _: int)  # what ``isinstance`` looks at, besides

    def __new__(cls, *given: Any) -> Any:
        return int(*given)

    noting: Noting
    formula: Formula


class NotedText(str):
    """The text of a number that is noted."""

    __slots__ = ("formula", "noting")

    def __new__(cls, *given: Any) -> Any:
        return str(*given)

    noting: Noting
    formula: Formula


Noted = (NotedFloat, NotedInt, NotedWhole, NotedText)
_KINDS: dict[type, Any] = {NotedFloat: float, NotedInt: int, NotedWhole: int}


def plain_of(value: Any) -> Any:
    """The number or text itself."""
    return str.__getitem__(value, slice(None)) if type(value) is NotedText else _plain(value)


def _reading(kind: type, name: str) -> Callable[..., Any]:
    plain = getattr(kind, name)

    def method(self: Any, *args: Any) -> Any:
        try:
            result = plain(_plain(self) if type(self) is NotedWhole else self, *args)
        except Exception:
            self.noting.is_read = self.noting.has_raised = True
            raise
        if self.noting.is_over:
            return result
        asked, are_numbers = name.strip("_"), all(type(value) in (*_PLAIN, *_KINDS) for value in args)
        if result is NotImplemented and are_numbers and asked in ASKING:  # an int leaves it to a float to compare them
            result = ASKING[asked](_plain(self), *map(_plain, args))
        if result is NotImplemented and isinstance(args[0], torch.Tensor):  # which operators get to see
            return result
        if self.noting.asks and asked in ASKING and are_numbers:
            return self.noting.asked(asked, (self, *args), result)
        self.noting.is_read = True
        return result

    return method


def _computing(operation: str, *, reflected: bool) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        if self.noting.is_over:
            return _do(operation, [_plain(one) for one in ((*args, self) if reflected else (self, *args))])
        if len(args) != (operation not in _UNARY):  # ``pow`` with a modulus
            self.noting.is_read = True
            return NotImplemented
        if any(type(value) not in _PLAIN and type(value) not in _KINDS for value in args):
            # operators get to see what a tensor does with it; all others read it, in C as ``Decimal`` or in Python
            self.noting.is_read = self.noting.is_read or not isinstance(args[0], torch.Tensor)
            if isinstance(args[0], (int, float, complex)):
                return _do(operation, [args[0], _plain(self)] if reflected else [_plain(self), args[0]])
            return NotImplemented
        if (
            operation == "add"
            and not _IS_SUM_PLAIN
            and has_float((self, *args))
            and not _is_instruction(sys._getframe(1))
        ):
            self.noting.is_read = True  # ``sum`` calls this, and computes something else of plain floats
        return self.noting.computed(operation, (*args, self) if reflected else (self, *args))

    return method


def _is_instruction(frame: types.FrameType) -> bool:
    """Whether the frame computes by an operator, and calls no function in C that does."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "BINARY_OP"


def are_numbers(values: Sequence[Any]) -> bool:
    """Whether all are numbers, plain or noted."""
    return all(type(value) in _PLAIN or type(value) in _KINDS for value in values)


def has_float(values: Sequence[Any]) -> bool:
    """Whether one of these numbers is a float."""
    return any(_KINDS.get(type(value), type(value)) is float for value in values)


def _telling(kind: type, operation: str) -> Callable[..., Any]:
    reading = _reading(kind, f"__{operation}__")

    def method(self: Any, *args: Any) -> Any:
        is_kept = self.noting.keeps and not self.noting.is_over and all(type(value) in (int, str) for value in args)
        return self.noting.computed(operation, (self, *args)) if is_kept else reading(self, *args)

    return method


def _as_index(number: Any) -> Any:
    if not number.noting.is_over:
        number.noting.indices.append(number.formula)
    return _plain(number)


def _joined(left: Any, right: Any) -> Any:
    """``+`` of texts."""
    noting = left.noting if type(left) is NotedText else right.noting
    if noting.is_over or not noting.keeps or any(type(one) not in (str, NotedText) for one in (left, right)):
        return NotImplemented
    return noting.computed("concat", (left, right))


_LEFT = frozenset({"__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__",
                   "__setattr__", "__delattr__", "__dir__", "__doc__", "__getstate__", "__getnewargs__",
                   "__getformat__", "__setformat__"})  # fmt: skip
for _noted_kind, _kind in (*_KINDS.items(), (NotedText, str)):
    for _name in dir(_kind):
        if _name not in _LEFT and callable(getattr(_kind, _name)):
            setattr(_noted_kind, _name, _reading(_kind, _name))
    for _operation in ("format", "str", "repr", *(("round",) if _kind is not str else ())):
        setattr(_noted_kind, f"__{_operation}__", _telling(_kind, _operation))
    for _operation in (*_UNARY, *_BINARY) if _kind is not str else ():
        setattr(_noted_kind, f"__{_operation}__", _computing(_operation, reflected=False))
        if _operation in _BINARY:
            setattr(_noted_kind, f"__r{_operation}__", _computing(_operation, reflected=True))

for _name in {*dir(float)} - {*dir(int)} - _LEFT:
    setattr(NotedWhole, _name, _reading(float, _name))
NotedWhole.__index__ = _as_index  # type: ignore[attr-defined]
NotedText.__add__ = lambda self, other: _joined(self, other)  # type: ignore[method-assign]
NotedText.__radd__ = lambda self, other: _joined(other, self)  # type: ignore[attr-defined]


def holds_noted(value: Any, depth: int = 4) -> bool:
    """Whether it is, or may hold, a noted number: a replay would leave the one that was recorded."""
    if isinstance(value, Noted):
        return True
    if isinstance(value, dict):
        return depth == 0 or any(holds_noted(member, depth - 1) for pair in value.items() for member in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return depth == 0 or any(holds_noted(member, depth - 1) for member in value)
    return False
