"""Every command that a page names is there, with the options that it is given; every file that a page links to too."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BEGINS = re.compile(r"^(?:\w+=\S+ )*(dcnr(?:-pnode|-orchestrator|-storage)?|python3? -m|python3?|make)(?= |$)")


def spans(text: str) -> Iterator[str]:
    """What a page shows as code: the lines of its fenced blocks, and what stands between backticks."""
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            yield line.strip()
        else:
            yield from re.findall(r"`([^`]+)`", line)


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) for all that pages name."""
    for page in PAGES:
        for span in spans(page.read_text(encoding="utf-8")):
            for part in re.split(r"&&|\|\||;", span):
                part = re.sub(r"\s+#.*$", "", part).strip().strip("|").strip()
                if BEGINS.match(part):
                    yield page.relative_to(ROOT).as_posix(), part


NAMED = sorted(set(commands()))


def words_of(command: str) -> list[str]:
    """The words of a command as a shell would see them, without the variables before it."""
    words = shlex.split(re.sub(r"[<>]", " ", command), posix=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return words


def given(words: list[str]) -> list[str]:
    """The options among them, each of its alternatives."""
    return [word.partition("=")[0] for word in words if re.fullmatch(r"--?[a-zA-Z][\w-]*(=.*)?", word)]


@cache
def tree() -> Any:
    import typer

    from cli.tree import app

    return typer.main.get_command(app)


def of_dcnr(words: list[str]) -> set[str]:
    """The options of a sub-command. Fails if it isn't there."""
    node = tree()
    options = {option for each in node.params for option in each.opts}
    for word in words[1:]:
        children = getattr(node, "commands", None)
        if children is None or word.startswith("-"):
            break
        assert word in children, f"there is no {' '.join(words)}"
        node = children[word]
        options |= {option for each in node.params for option in (*each.opts, *each.secondary_opts)}
    return options | {"--help", "-h"}


class _Found(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.options = set(parser._option_string_actions)


@cache
def of_module(name: str) -> set[str]:
    """The options of `python -m name`: those of the parser that it makes."""
    package = (ROOT / name.replace(".", "/")).is_dir()
    module = importlib.import_module(name + (".__main__" if package else ""))
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert "__main__" in source or package, f"{name} does nothing by itself"
    if "ArgumentParser" not in source:
        return set()

    def parse(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Found(parser)

    patch = pytest.MonkeyPatch()
    patch.setattr(argparse.ArgumentParser, "parse_args", parse)
    try:
        module.main()
    except _Found as found:
        return found.options
    finally:
        patch.undo()
    raise AssertionError(f"{name} reads no options")


def options_of(words: list[str]) -> set[str]:
    """The options that a command knows. Fails if there is no such command."""
    match words[0]:
        case "dcnr":
            return of_dcnr(words)
        case "dcnr-pnode":
            from pnode.main import make_parser

            return set(make_parser()._option_string_actions)
        case "dcnr-orchestrator":
            from orchestrator.main import make_parser as make

            return set(make()._option_string_actions)
        case "dcnr-storage":
            from storage.remote.main import make_parser as make_storage

            return set(make_storage()._option_string_actions)
        case "make":
            rules = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
            assert not words[1:] or words[1] in rules, f"the Makefile has no {words[1]}"
            return set()
        case _ if words[1:2] == ["-m"]:
            return of_module(words[2])
        case _:
            assert (ROOT / words[1]).is_file(), f"there is no {words[1]}"
            return of_module(words[1].removesuffix(".py").replace("/", "."))


def problem_with(command: str) -> str:
    """What is wrong with a command; "" if nothing is."""
    words = words_of(command)
    if words[0] == "make" and len(words) > 1 and "=" in words[1]:
        words = words[:1]
    try:
        known = options_of(words)
    except (AssertionError, ModuleNotFoundError) as missing:
        return f"{command!r}: {missing}"
    unknown = [option for option in given(words[3 if words[1:2] == ["-m"] else 1 :]) if option not in known]
    return f"{command!r} has {', '.join(unknown)}; there are {', '.join(sorted(known))}" if unknown else ""


@pytest.mark.parametrize("page", sorted({page for page, _ in NAMED}))
def test_the_commands_that_a_page_names_are_there(page: str) -> None:
    problems = [problem_with(command) for named, command in NAMED if named == page]
    assert not any(problems), "\n".join(filter(None, problems))


def test_the_pages_name_commands() -> None:
    """The search finds what it is for."""
    named = [command for _, command in NAMED]
    for sample in ("dcnr chaos gpt-char --minutes 3", "python -m tests.sim --planted", "make demo"):
        assert sample in named, sample


@pytest.mark.parametrize("command", ["dcnr trian", "dcnr train x --stpes 3", "python -m tests.sim --sed 1",
                                     "dcnr-pnode --nam p1", "make dmeo", "python -m benchmarks.nothing"])  # fmt: skip
def test_what_is_not_there_is_seen(command: str) -> None:
    assert problem_with(command)


def test_files_that_pages_link_to_are_there() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
        for target in re.findall(r"`((?:docs|tests|cli|wire|storage|orchestrator|pnode|networks)/[\w./-]+)`", text):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


def test_the_tests_behind_each_promise_are_there() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:unit|sim|integration|e2e|golden|chaos)/[\w/]+\.py)`", text)
    assert len(named) > 20
    for path in named:
        assert (ROOT / "tests" / path).is_file(), path
    assert all(f"\n| {number} | **" in text for number in range(1, 10)), "each of the nine promises has a line"
