"""Arithmetic of network files, checked against Python's own on expressions that the test builds and never parses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks.expressions import ExpressionError, evaluate, is_expression

NAMES = {"d": 128, "heads": 4, "rate": 0.5, "text": "abc", "flag": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$d", 128), ("$rate", 0.5), ("$text", "abc"), ("$flag", True), ("$(4*d)", 512), ("$(d/heads)", 32.0),
        ("$(d//heads)", 32), ("$(d % 3)", 2), ("$(-d + 1)", -127), ("$(2**10)", 1024), ("$(2**-1)", 0.5),
        ("$(-2**2)", -4), ("$((-2)**2)", 4), ("$(2**3**2)", 512), ("$(1 - 2 - 3)", -4), ("$(7 // -2)", -4),
        ("$(max(d, 200))", 200), ("$(min(1, 2, 0.5))", 0.5), ("$(int(2.9))", 2), ("$(round(2.6))", 3),
        ("$(abs(-3))", 3), ("$(0.02/sqrt(2*heads))", 0.02 / math.sqrt(8)), ("$(1e-4)", 1e-4), ("$(.5)", 0.5),
        ("$(--1)", 1), ("$( 1 )", 1), ("$(2*(3+4))", 14), ("$(1_0)", None), ("$(010)", 10),
    ],
)  # fmt: skip
def test_values(text: str, value: object) -> None:
    if value is None:
        with pytest.raises(ExpressionError):
            evaluate(text, NAMES)
        return
    found = evaluate(text, NAMES)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message", "at"),
    [
        ("$(1/0)", "division by zero", 3), ("$(1%0)", "division by zero", 3), ("$(0**-1)", "division by zero", 3),
        ("$(9**9**9)", "too large", 3), ("$(2**64)", "too large", 3), ("$(10.0**400)", "too large", 6),
        ("$(1e999)", "not a finite", 2), ("$(99999999999999999999)", "too large", 2), ("$(2**62*4)", "too large", 7),
        ("$((-8)**0.5)", "fractional power", 6), ("$(sqrt(-1))", "math domain error", 2), ("$(nope)", "no variable", 2),
        ("$nope", "no variable", 1), ("$(text+1)", "not a number", 2), ("$(flag+1)", "not a number", 2),
        ("$(1+)", "ends too early", 4), ("$()", "ends too early", 2), ("$(1 2)", "not expected", 4),
        ("$(1;2)", "has no meaning", 3), ("$(d.real)", "has no meaning", 3), ("$('a')", "has no meaning", 2),
        ("$(__import__(1))", "no function", 2), ("$(eval(1))", "no function", 2), ("$(max(1))", "takes 2 to 16", 2),
        ("$((1)", "')' is missing", 4), ("$(1))", "not expected", 3), ("$", "'$' starts", 0), ("$(", "'$' starts", 0),
        ("$a b", "'$' starts", 0), ("$(max)", "no variable", 2), ("$(int(1e30))", "too large", 2),
    ],
)  # fmt: skip
def test_faults_say_where(text: str, message: str, at: int) -> None:
    with pytest.raises(ExpressionError) as caught:
        evaluate(text, NAMES)
    assert message in str(caught.value)
    assert caught.value.at == at


def test_length_and_depth_are_bounded() -> None:
    for text in ("$(" + "(" * 100 + "1" + ")" * 100 + ")", "$(" + "-" * 300 + "1)", "$(" + "1+" * 400 + "1)"):
        with pytest.raises(ExpressionError, match=r"nested deeper|longer than"):
            evaluate(text, {})


def test_two_dollars_are_one() -> None:
    assert not is_expression("$$d")
    assert not is_expression("d")
    assert is_expression("$d")


numbers = st.integers(-(2**20), 2**20) | st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 6))


@st.composite
def built(draw: st.DrawFn, depth: int = 4) -> tuple[str, object]:
    """An expression's text, and its value computed by Python's operators as it is put together."""
    if depth == 0 or draw(st.booleans()):
        value = draw(numbers)
        return (f"({value!r})" if value < 0 else repr(value)), value
    left_text, left = draw(built(depth - 1))
    right_text, right = draw(built(depth - 1))
    op = draw(st.sampled_from(["+", "-", "*", "/", "//", "%"]))
    table = {
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "/": lambda: left / right,
        "//": lambda: left // right,
        "%": lambda: left % right,
    }
    if left is None or right is None:
        return f"({left_text} {op} {right_text})", None
    try:
        value = table[op]()
    except (ZeroDivisionError, OverflowError):
        value = None
    if isinstance(value, int) and abs(value) >= 2**63:
        value = None
    return f"({left_text} {op} {right_text})", value


@settings(deadline=None)
@given(built())
def test_agrees_with_python(case: tuple[str, object]) -> None:
    text, value = case
    if len(text) > 490:
        return
    if value is None:
        with pytest.raises(ExpressionError):
            evaluate(f"$({text})", {})
        return
    found = evaluate(f"$({text})", {})
    assert found == value
    assert type(found) is type(value)


@settings(deadline=None)
@given(st.text(alphabet="0123456789+-*/%().,edmaxint $_\t", max_size=60))
def test_any_text_gives_a_number_or_an_expression_error(text: str) -> None:
    at = 0
    value: object = 0
    try:
        value = evaluate(f"$({text})", {"d": 3, "e": 0})
    except ExpressionError as error:
        at = error.at
    assert 0 <= at <= len(text) + 3
    assert isinstance(value, int | float)
    assert math.isfinite(value)
