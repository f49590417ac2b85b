"""How a command runs and ends: signals, deadlines and the way from an exception to an exit code.

Exit codes: 0 done (also when the reader of our output went away), 1 the run or the check failed, 2 wrong arguments,
65 a bad file, 69 something is unreachable, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cli import interrupts
from cli.interrupts import INTERRUPTED, SIGNALS, TERMINATED, Terminated, code_of
from wire.errors import DCNRError

GRACE_S = 1.5

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T], *, grace_s: float | None = GRACE_S) -> T:
    """Run a coroutine. Ctrl-C or SIGTERM cancels it and leaves it `grace_s` to clean up; a second one ends at once.

    `grace_s` None: for callers that must end processes afterwards; the coroutine bounds its clean-up itself, and a
    second signal cancels that.

    Raises: KeyboardInterrupt or `Terminated` after a signal, else what the coroutine raises.
    """
    import asyncio

    seen: list[int] = []
    limits: list[threading.Timer] = []

    async def main() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if seen and grace_s is not None:
                os._exit(code_of(number))
            seen.append(number)
            if grace_s is not None:
                limits.append(_end_after(grace_s, code_of(number)))
            task.cancel()

        for number in SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            return await coroutine
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            interrupts.raise_on_signals()

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if seen:
            raise (Terminated if seen[0] == signal.SIGTERM else KeyboardInterrupt) from None
        raise
    finally:
        for limit in limits:
            limit.cancel()


@contextmanager
def undisturbed() -> Iterator[None]:
    """While the body ends what was started, Ctrl-C and SIGTERM do nothing; the body is bounded in time by itself."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    interrupts.dealt_with()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_after(seconds: float, code: int) -> threading.Timer:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return timer


def report(problem: BaseException) -> int | None:
    """Say what went wrong and give the exit code; None for what isn't ours to explain (typer's own exceptions)."""
    from cli.terminal import Terminal, close_quietly

    interrupts.dealt_with()
    if not isinstance(problem, KeyboardInterrupt) and (code := interrupts.came()):
        return code  # what came of the exception that a signal raised somewhere inside
    match problem:
        case Terminated():
            return TERMINATED
        case KeyboardInterrupt():
            return INTERRUPTED
        case BrokenPipeError():
            close_quietly()
            return 0
        case BaseExceptionGroup():
            return report(_first(problem))
        case DCNRError():
            Terminal().error(problem.message, problem.hint)
            return problem.exit_code
        case OSError():
            where = f": {problem.filename}" if problem.filename else ""
            Terminal().error(f"{problem.strerror or problem}{where}")
            return 1
        case SystemExit() | GeneratorExit():
            return None
        case _ if hasattr(problem, "format_message") and type(problem).__name__ != "NoArgsIsHelpError":
            return _report_usage(problem)
        case _ if hasattr(problem, "exit_code") or type(problem).__name__ == "Abort":
            return None
    if os.environ.get("DCNR_DEBUG"):
        return None
    Terminal().error(
        f"a bug in DCNR: {type(problem).__name__}: {problem}{_place(problem)}",
        "DCNR_DEBUG=1 shows the whole traceback",
    )
    return 1


def _report_usage(problem: Any) -> int:
    """What the command line's parser found wrong, in our form."""
    from cli.terminal import Terminal

    context = getattr(problem, "ctx", None)
    text = problem.format_message().replace("Value error, ", "").rstrip(".")
    text = text.replace("Got unexpected", "unexpected")
    command = context.command_path if context is not None else "dcnr"
    Terminal().error(text[:1].lower() + text[1:], f"{command} --help")
    return int(getattr(problem, "exit_code", 2))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


def _place(problem: BaseException) -> str:
    trace = problem.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"


def flush() -> None:
    """Write out what is buffered now, so that a closed pipe shows here and not at the interpreter's end."""
    sys.stdout.flush()
    sys.stderr.flush()
