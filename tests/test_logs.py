"""Log lines of a host that nobody configured: plain, quick, without local variables."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import trio
from requires import requires

from drums_core import open_host
from drums_core.logs import configure_logging, ensure_logging


@pytest.fixture
def unconfigured() -> Iterator[None]:
    """Structlog as a program finds it; put back afterwards."""
    before: dict[str, Any] | None = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    if before is not None:
        structlog.configure(**before)


def fail() -> None:
    """Log an error whose frame holds a secret."""
    token = "".join(["the-", "secret"])
    try:
        raise RuntimeError(f"planted, {len(token)}")
    except RuntimeError:
        structlog.get_logger("drums.test").exception("it failed")


def test_tracebacks_show_no_local_variables(unconfigured: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Structlog's default does, so that the test can fail."""
    with contextlib.redirect_stdout(sys.stderr):
        fail()
    assert "the-secret" in capsys.readouterr().err
    ensure_logging()
    fail()
    told = capsys.readouterr().err
    assert "RuntimeError: planted, 10" in told and "it failed" in told and "the-secret" not in told


def test_the_configuration_of_the_program_stays(unconfigured: None) -> None:
    """Only one that is not there is made."""
    own = [structlog.testing.LogCapture()]
    structlog.configure(processors=own)
    ensure_logging()
    assert structlog.get_config()["processors"] is own
    configure_logging()
    assert structlog.get_config()["processors"] is not own


@requires("root", "criu")
def test_a_host_makes_one(unconfigured: None) -> None:
    """As it opens."""

    async def main() -> None:
        async with open_host():
            pass

    trio.run(main)
    assert structlog.is_configured()
    fails = "import test_logs, drums_core.logs; drums_core.logs.ensure_logging(); test_logs.fail()"
    done = subprocess.run([sys.executable, "-c", fails], cwd="tests", capture_output=True, text=True, check=True)
    assert not done.stdout and "planted" in done.stderr
