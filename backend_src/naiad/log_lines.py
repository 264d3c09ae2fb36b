"""One line of the log, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Literal

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
Level = Literal["debug", "info", "warning", "error"]

_REQUEST_ID = re.compile(r"\[request id: ([^\]]*)\]")
# A line of tritonserver's log: level, month and day, time, process or thread, place, message.
_SERVER_LINE = re.compile(r"([IWEFV])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ [\w./+-]+:\d+\] \"?(.*?)\"?$")
_LEVELS: dict[str, Level] = {"V": "debug", "I": "info", "W": "warning", "E": "error", "F": "error"}
# A line of one of Naiad's own processes.
_OUR_LINE = re.compile(r"(naiad[\w ]*): (DEBUG|INFO|WARNING|ERROR|CRITICAL): (.*)")


def log_line(log_format: LogFormat, source: str, level: Level, message: str, *, now_s: float) -> str:
    """Return the line.

    Args:
        log_format: text or json.
        source: the program that speaks.
        level: how serious it is.
        message: what it says; a request id in it, as tritonserver writes it, becomes a field of its own.
        now_s: seconds since the epoch.
    """
    written = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s)) + f".{int(now_s % 1 * 1000):03d}Z"
    if log_format == "text":
        return f"{written} {level.upper()} {source}: {message}"
    fields = {"time": written, "level": level, "source": source, "message": message}
    if match := _REQUEST_ID.search(message):
        fields["request_id"] = match[1]
    return json.dumps(fields, ensure_ascii=False)


def json_line_of(line: str, *, now_s: float) -> str:
    """Return a line that the server or one of its processes has written as text as a line of JSON."""
    if match := _SERVER_LINE.match(line):
        return log_line("json", "tritonserver", _LEVELS[match[1]], match[2], now_s=now_s)
    if match := _OUR_LINE.match(line):
        level: Level = {"DEBUG": "debug", "INFO": "info", "WARNING": "warning"}.get(match[2], "error")  # type: ignore[assignment]
        return log_line("json", match[1], level, match[3], now_s=now_s)
    return log_line("json", "tritonserver", "info", line, now_s=now_s)


class LineFormatter(logging.Formatter):
    """Writes the records of `logging` in the same form."""

    def __init__(self, log_format: LogFormat, source: str) -> None:
        """Set up for one program."""
        super().__init__("%(message)s")
        self._log_format = log_format
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """Return the record, with its traceback, as a line; in text the traceback has lines of its own."""
        if record.levelno >= logging.ERROR:
            level: Level = "error"
        elif record.levelno >= logging.WARNING:
            level = "warning"
        else:
            level = "info" if record.levelno >= logging.INFO else "debug"
        message = super().format(record)
        return log_line(self._log_format, self._source, level, message, now_s=record.created)
