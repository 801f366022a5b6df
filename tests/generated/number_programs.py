"""Random programs of numbers: what the host reads, numbers in Python state, questions about them, what is kept."""

from __future__ import annotations

import random

EXPRESSIONS = (
    "({a} + {b})", "({a} - {b})", "({a} * {b})", "max({a}, {b})", "min({a}, {b})", "abs({a})", "round({a}, 2)",
    "int({a} * 3)", "({a} if {a} > {b} else {b})", "float({a})", "({a} / 2)", "-{a}", "math.floor({a} * 2)",
    "({a} % 2)", "({a} // 0.5)", "sum([{a}, {b}])", "sorted([{a}, {b}])[0]", "[{a}, {b}][int({a} > {b})]",
    "bool({a} > 0) * 2", "divmod({a}, 0.7)[1]",
)  # fmt: skip
CONDITIONS = (
    "{a} > {b}", "{a} <= {b}", "{a} == {b}", "0 < {a} < {b}", "{a} and {b}", "not {a} > {b}",
    "({a} > 0.2 or {b} < 0.1)", "any(v > 0.5 for v in ({a}, {b}))", "math.isfinite({a})", "{a} in ({b}, 1)",
)  # fmt: skip
READS = (
    "x.sum().item()", "x[0].item()", "x.max().item()", "float(x.mean())", "int(x[1] * 4)", "(x > 0).sum().item()",
    "bool(x[2] > 0)",
)  # fmt: skip
OPERATORS = ("x * 2", "x + 1", "torch.tanh(x)", "x.abs()", "-x")
CONSTANTS = (0, 1, 2, 0.5, -1.0, 3, 0.25)


class Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self) -> str:
        """The source of ``body(x)``, whose state is in ``S``."""
        of_state = ["v0", "v1", "S.a", "S.b", "S.n"] if self.random.random() < 0.6 else []
        names = ["r0", "r1", "r2", *of_state]
        lines = ["def body(x):", "    r0 = x[0].item()", "    r1 = x.sum().item()", "    r2 = x[1].item()"]
        lines += ["    v0 = v1 = v2 = v3 = 1.0", *self.block(names, 4), *self.block(names, 4)]
        returned = f"x, {self.number(names)}" if self.random.random() < 0.5 else "x"
        return "\n".join([*lines, f"    return {returned}", ""])

    def number(self, names: list[str], depth: int = 0) -> str:
        """An expression that is a number."""
        kind = self.random.random()
        if depth > 2 or kind < 0.35:
            return self.random.choice(names)
        if kind < 0.45:
            return repr(self.random.choice(CONSTANTS))
        a, b = self.number(names, depth + 1), self.number(names, depth + 1)
        return self.random.choice(EXPRESSIONS).format(a=a, b=b)

    def block(self, names: list[str], indent: int, depth: int = 0) -> list[str]:
        """Some statements."""
        names, lines = [*names], list[str]()
        for _ in range(self.random.randint(1, 3)):
            lines += self.statement(names, indent, depth)
        if self.random.random() < 0.15:
            lines.append(f"{' ' * indent}return x, {self.number(names)}")
        return lines

    def statement(self, names: list[str], indent: int, depth: int) -> list[str]:
        """One statement. A variable that it sets is among the names from then on."""
        kind, space = self.random.random(), " " * indent
        if kind < 0.3:
            name = f"v{self.random.randint(0, 3)}"
            line = f"{space}{name} = {self.number(names)}"
            names.append(name)
            return [line]
        if kind < 0.45:
            return [f"{space}S.{self.random.choice('abn')} = {self.number([*names, 'S.a', 'S.b'])}"]
        if kind < 0.5:
            return [f"{space}S.n += 1"]
        if kind < 0.57:
            return [f"{space}S.log.append({self.number(names)})"]
        if kind < 0.63:
            return [f"{space}S.d['k'] = {self.number(names)}"]
        if kind < 0.75:
            return [f"{space}x = {self.random.choice(OPERATORS)}"]
        if kind < 0.8:
            return [f"{space}x = x * {self.number(names)}"]
        if kind < 0.87 or depth == 2:
            return [f"{space}r{self.random.randint(0, 2)} = {self.random.choice(READS)}"]
        a, b = self.number(names, 1), self.number(names, 1)
        lines = [f"{space}if {self.random.choice(CONDITIONS).format(a=a, b=b)}:"]
        lines += self.block(names, indent + 4, depth + 1)
        if self.random.random() < 0.6:
            lines += [f"{space}else:", *self.block(names, indent + 4, depth + 1)]
        return lines
