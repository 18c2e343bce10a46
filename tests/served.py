"""A real daemon in a process of its own, on a free port, for tests of the client; needs root, CRIU and an image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs


@attrs.frozen
class Served:
    """Where it is, the token it wants, and its process."""

    url: str
    token: str
    pid: int

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a program that is to find it."""
        return {**os.environ, "DRUMS_URL": self.url, "DRUMS_TOKEN": self.token}


@contextmanager
def served(log: Path, *options: str) -> Iterator[Served]:
    """A daemon until the end of the block; its log goes to a file, whose end tells why it did not start."""
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "drums", "serve", "--port", "0", "--json", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, f"the daemon did not start: {log.read_text()[-2000:]}"
            ready = json.loads(line)
            yield Served(ready["url"], Path(ready["token_file"]).read_text().strip(), process.pid)
        finally:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, log.read_text()[-2000:]
