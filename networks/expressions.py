"""`$name` and `$(expression)`: small arithmetic over a file's variables, with its own parser and hard limits.

Grammar (loosest first): `+ -`, `* / // %`, unary `+ -`, `**` (binds to the right, tighter than unary minus on its
left), numbers, names, calls of `FUNCTIONS`, parentheses. The meaning is Python's: `/` gives a float, `//` and `%`
round down. Whole numbers stay below 2**63 in size, floats stay finite, so no expression can cost time or memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from networks.limits import EXPRESSION_CHARS, EXPRESSION_DEPTH, INTEGER

Number = int | float
VarValue = int | float | bool | str

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<op>\*\*|//|[-+*/%(),]))"
)


class ExpressionError(ValueError):
    """An expression is wrong; `at` is the offset of the fault in the expression's text, `unknown` a missing name."""

    def __init__(self, text: str, at: int = 0, *, unknown: str | None = None, hint: str = "") -> None:
        super().__init__(text)
        self.at = at
        self.unknown = unknown
        self.hint = hint


def is_expression(text: str) -> bool:
    """Whether a scalar is to be evaluated: it starts with one `$`. `$$` stands for a literal dollar sign."""
    return text.startswith("$") and not text.startswith("$$")


def evaluate(text: str, names: Mapping[str, VarValue]) -> VarValue:
    """The value of `$name` (any type) or `$(expression)` (a number). Raises `ExpressionError`."""
    if len(text) > EXPRESSION_CHARS:
        raise ExpressionError(f"the expression is longer than {EXPRESSION_CHARS} characters")
    body = text[1:]
    if body.startswith("(") and body.endswith(")"):
        return _Parser(text, 2, len(text) - 1, names).parse()
    if _NAME.fullmatch(body):
        return _lookup(body, 1, names)
    raise ExpressionError("'$' starts an expression: write $name or $(…)", hint="'$$' gives a dollar sign")


def _lookup(name: str, at: int, names: Mapping[str, VarValue]) -> VarValue:
    try:
        return names[name]
    except KeyError:
        raise ExpressionError(f"no variable is called '{name}'", at, unknown=name) from None


class _Parser:
    """Recursive descent that computes as it reads; depth is bounded by `EXPRESSION_DEPTH`."""

    def __init__(self, text: str, start: int, end: int, names: Mapping[str, VarValue]) -> None:
        self.names = names
        self.tokens: list[tuple[str, str, int]] = []
        self.index = 0
        self.depth = 0
        at = start
        while at < end:
            found = _TOKEN.match(text, at, end)
            if found is None:
                if not text[at:end].strip():
                    break
                bad = at + len(text[at:end]) - len(text[at:end].lstrip())
                raise ExpressionError(f"{text[bad]!r} has no meaning in an expression", bad)
            kind = str(found.lastgroup)
            self.tokens.append((kind, found.group(kind), found.start(kind)))
            at = found.end()
        self.tokens.append(("end", "", end))

    def parse(self) -> Number:
        value = self.sum()
        kind, text, at = self.tokens[self.index]
        if kind != "end":
            raise ExpressionError(f"'{text}' is not expected here", at)
        return value

    def take(self, *ops: str) -> tuple[str, int] | None:
        kind, text, at = self.tokens[self.index]
        if kind == "op" and text in ops:
            self.index += 1
            return text, at
        return None

    def need(self, op: str) -> None:
        if self.take(op) is None:
            raise ExpressionError(f"'{op}' is missing", self.tokens[self.index][2])

    def sum(self) -> Number:
        value = self.product()
        while (found := self.take("+", "-")) is not None:
            right = self.product()
            value = _apply(found[0], value, right, found[1])
        return value

    def product(self) -> Number:
        value = self.unary()
        while (found := self.take("*", "//", "/", "%")) is not None:
            right = self.unary()
            value = _apply(found[0], value, right, found[1])
        return value

    def unary(self) -> Number:
        self.enter()
        try:
            if (found := self.take("-", "+")) is not None:
                value = self.unary()
                return checked(lambda: -value if found[0] == "-" else value, found[1])
            return self.power()
        finally:
            self.depth -= 1

    def power(self) -> Number:
        base = self.atom()
        if (found := self.take("**")) is not None:
            exponent = self.unary()
            return _apply("**", base, exponent, found[1])
        return base

    def atom(self) -> Number:
        kind, text, at = self.tokens[self.index]
        self.index += 1
        if kind == "number":
            return checked(lambda: int(text) if text.isdigit() else float(text), at)
        if kind == "name":
            if self.take("(") is not None:
                return self.call(text, at)
            return self.variable(text, at)
        if text == "(":
            value = self.sum()
            self.need(")")
            return value
        self.index -= 1
        raise ExpressionError(f"'{text}' is not expected here" if text else "the expression ends too early", at)

    def variable(self, name: str, at: int) -> Number:
        value = _lookup(name, at, self.names)
        if isinstance(value, bool | str):
            raise ExpressionError(f"'{name}' is {value!r}, not a number", at)
        return checked(lambda: value, at)

    def call(self, name: str, at: int) -> Number:
        entry = FUNCTIONS.get(name)
        if entry is None:
            raise ExpressionError(f"no function is called '{name}'", at, hint=f"there are {', '.join(FUNCTIONS)}")
        arguments = [self.sum()]
        while self.take(",") is not None:
            arguments.append(self.sum())
        self.need(")")
        function, least, most = entry
        if not least <= len(arguments) <= most:
            raise ExpressionError(f"{name}() takes {least} to {most} numbers, got {len(arguments)}", at)
        return checked(lambda: function(*arguments), at)

    def enter(self) -> None:
        self.depth += 1
        if self.depth > EXPRESSION_DEPTH:
            raise ExpressionError(f"nested deeper than {EXPRESSION_DEPTH} levels", self.tokens[self.index][2])


def checked(compute: Callable[[], Number], at: int) -> Number:
    """The number that `compute` gives, if it is one and within the limits. Raises `ExpressionError` at `at`."""
    try:
        value = compute()
    except ZeroDivisionError:
        raise ExpressionError("division by zero", at) from None
    except OverflowError:
        raise ExpressionError("the number is too large", at) from None
    except ValueError as error:
        raise ExpressionError(str(error), at) from None
    if isinstance(value, complex):
        raise ExpressionError("a fractional power of a negative number", at)
    if isinstance(value, int):
        if abs(value) > INTEGER:
            raise ExpressionError("the number is too large (whole numbers stay below 2**63)", at)
    elif not math.isfinite(value):
        raise ExpressionError("the result is not a finite number", at)
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0 and abs(base) > 1 and exponent > 63:
        raise OverflowError
    value: Number = base**exponent
    return value


def _apply(op: str, left: Number, right: Number, at: int) -> Number:
    return checked(lambda: _OPERATORS[op](left, right), at)


_OPERATORS: dict[str, Callable[[Number, Number], Number]] = {
    "**": _power,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}

FUNCTIONS: dict[str, tuple[Callable[..., Number], int, int]] = {
    "min": (min, 2, 16),
    "max": (max, 2, 16),
    "int": (int, 1, 1),
    "round": (round, 1, 1),
    "abs": (abs, 1, 1),
    "sqrt": (math.sqrt, 1, 1),
}
"""Name -> function, least and most number of arguments."""
