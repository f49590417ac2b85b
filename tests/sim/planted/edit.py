"""Changing a function's code for a while: some words of its own source are replaced, the rest stays as it is.

The function object stays the same one, so whoever has a hold of it runs the changed code.
"""

from __future__ import annotations
import __future__ as future

import contextlib
import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


class MovedError(AssertionError):
    """What was to be changed is not there any more: the planted bug has to be written anew."""


@dataclass(frozen=True, slots=True)
class Edit:
    """In `function`, `old` (there exactly once) becomes `new`, whose further lines are indented as its first."""

    function: Any
    old: str
    new: str


def plain(function: Any) -> FunctionType:
    """The function below a property, class method or wrapper."""
    if isinstance(function, property):
        function = function.fget
    if isinstance(function, functools.cached_property):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        raise MovedError(f"{function!r} is not a function")
    return function


@contextlib.contextmanager
def planted(edits: Sequence[Edit]) -> Iterator[None]:
    """Make the edits; afterwards all is as it was. Raises MovedError."""
    sources: dict[FunctionType, str] = {}
    for edit in edits:
        function = plain(edit.function)
        source = sources.get(function) or textwrap.dedent(inspect.getsource(function))
        found = source.count(edit.old)
        if found != 1:
            raise MovedError(f"{function.__qualname__}: {edit.old!r} is there {found} times, expected once")
        line = source[: source.index(edit.old)].rpartition("\n")[2]
        indent = " " * (len(line) - len(line.lstrip()))
        sources[function] = source.replace(edit.old, edit.new.replace("\n", f"\n{indent}"))
    kept = {function: function.__code__ for function in sources}
    try:
        for function, source in sources.items():
            function.__code__ = _code(function, source)
        yield
    finally:
        for function, code in kept.items():
            function.__code__ = code


def _code(function: FunctionType, source: str) -> CodeType:
    """The code of the changed source, with the same free variables."""
    old = function.__code__
    names = old.co_freevars
    wrapped = source
    if names:  # `super()` and closures: give it an enclosing scope that has them
        lines = [f"def scope({', '.join(name for name in names if name != '__class__')}):"]
        lines += ["    class __Here:" if "__class__" in names else "    if True:"]
        wrapped = "\n".join([*lines, textwrap.indent(source, " " * 8)])
    module = compile(wrapped, old.co_filename, "exec", flags=future.annotations.compiler_flag, dont_inherit=True)
    found = _find(module, function.__name__)
    if found is None or found.co_freevars != names:
        raise MovedError(f"{function.__qualname__} can't be compiled alone")
    return found.replace(co_qualname=old.co_qualname)


def _find(code: CodeType, name: str) -> CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name == name:
                return constant
            inner = _find(constant, name)
            if inner is not None:
                return inner
    return None
