"""The daemon's log: JSON lines to `<home>/<name>.log`, plain lines to stderr."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import MutableMapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import structlog

from wire.errors import UsageError

FILE_BYTES = 10 << 20
FILES = 3
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _File(RotatingFileHandler):
    """A log that can't be written, such as on a full disk: said once, and the daemon goes on."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        """See logging."""
        if not self._told:
            self._told = True
            print(f"dcnr-pnode: the log {self.baseFilename} can't be written: {sys.exc_info()[1]}", file=sys.stderr)


class _Tee:
    """Writes each event twice: as JSON to the file, as one plain line to stderr."""

    def __init__(self, file: logging.Handler) -> None:
        self._file = file
        self._json = structlog.processors.JSONRenderer()
        self._on_terminal = sys.stderr.isatty()
        self._plain = structlog.dev.ConsoleRenderer(colors=self._on_terminal)

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        line = str(self._json(logger, method, dict(event)))
        self._file.emit(logging.LogRecord("dcnr", logging.INFO, "", 0, line, None, None))
        if self._on_terminal:
            event = {**event, "timestamp": time.strftime("%H:%M:%S")}
        return str(self._plain(logger, method, dict(event)))


def open_log(home: Path, name: str, level: str) -> structlog.typing.FilteringBoundLogger:
    """A logger bound to the PNode's name. Raises UsageError."""
    try:
        file = _File(home / f"{name}.log", maxBytes=FILE_BYTES, backupCount=FILES, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"no log in {home}: {error.strerror or error}", hint="give another --home") from error
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _Tee(file),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
    )
    bound: structlog.typing.FilteringBoundLogger = logger.bind(pnode=name)
    return bound
