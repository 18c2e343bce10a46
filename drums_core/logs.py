"""Where the host's log lines go: standard error, one line each, with plain tracebacks.

Structlog's own default shows the local variables of every frame. Secrets are among them, and drawing those of a host
took over a minute, in which its event loop served nobody.
"""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(level: int = logging.WARNING) -> None:
    """Send structlog's lines of this level and above to standard error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # Asked at each line: whoever captures standard error for a while does not keep it.
        logger_factory=lambda *_: structlog.PrintLogger(file=sys.stderr),
    )


def ensure_logging() -> None:
    """`configure_logging`, where the program that drums is used in has not configured structlog itself.

    The HTTP client's lines of each request are left out either way: URLs in them may hold a user's password.
    """
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    if not structlog.is_configured():
        configure_logging(logging.INFO)
