"""A daemon for one client's life: started when there is no other, ended with the client, however that ends."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from drums._endpoint import DEFAULT_URL, Endpoint, find_endpoint
from drums._flows import Flow, Pause
from drums.errors import DaemonUnreachable

START_S = 120.0  # a first start may have to clean up after a host that crashed
STOP_S = 60.0  # desktops are torn down
_EXTRAS = ("trio", "pluggy", "psutil", "pyroute2", "structlog")


def is_wanted(url: str | None) -> bool:
    """Whether a daemon is to be started: nobody says where one is, and none is at the default address.

    Raises:
        DaemonUnreachable: so it is, and none can be started here.
    """
    if url is not None or os.environ.get("DRUMS_URL"):
        return False
    default = urlsplit(DEFAULT_URL)
    try:
        socket.create_connection((default.hostname or "", default.port or 0), timeout=2).close()
    except OSError as e:
        if lack := _lack():
            raise DaemonUnreachable(
                f"no drums daemon answers at {DEFAULT_URL!r} ({e}), and none can be started here: {lack}",
                hint="start one with `sudo drums serve`, or set DRUMS_URL to where one is",
                url=DEFAULT_URL,
                may_have_arrived=False,
                again=False,
            ) from e
        return True
    return False


def _lack() -> str:
    if sys.platform != "linux":
        return f"desktops need Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"it needs root, and this is uid {os.geteuid()}"
    if missing := [name for name in _EXTRAS if importlib.util.find_spec(name) is None]:
        return f"drums[host] is not installed ({', '.join(missing)})"
    return ""


class SpawnedDaemon:
    """A daemon on a unix socket of its own, in a keeper's hands (`drums._keeper`)."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="drums-"))
        self._log, self._ready = self._folder / "log", self._folder / "ready"
        self._url = f"unix:{self._folder / 'socket'}"
        serve = [sys.executable, "-m", "drums", "serve", "--json", "--unix", self._url.removeprefix("unix:")]
        with self._log.open("wb") as log, self._ready.open("wb") as ready:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "drums._keeper", str(self._folder), *serve],
                stdin=subprocess.PIPE,
                stdout=ready,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the client, which then closes its desktops
            )
        print(f"drums: no daemon answers at {DEFAULT_URL}; started one for this program's life", file=sys.stderr)

    def ready(self) -> Flow[Endpoint]:
        """Wait until it answers, and return where.

        Raises:
            DaemonUnreachable: it does not; the message has the end of its log.
        """
        deadline = time.monotonic() + START_S
        while not (line := self._ready.read_text()).endswith("\n"):
            ended = self._keeper.poll() is not None
            if ended or time.monotonic() > deadline:
                lines = self._log.read_text(errors="replace").strip().splitlines()[-5:]
                raise DaemonUnreachable(
                    "a daemon was started for this program, and it "
                    + ("ended" if ended else f"is not ready within {START_S:g} s")
                    + f": {' / '.join(lines)[-500:] or 'it said nothing'}",
                    hint="see `drums doctor`, and what `drums serve` says",
                    url=self._url,
                    may_have_arrived=False,
                    again=False,
                )
            yield Pause(0.02)
        # A token of the environment is another daemon's.
        return find_endpoint(self._url, Path(json.loads(line)["token_file"]).read_text("ascii"))

    def stopped(self) -> Flow[None]:
        """End it with all its desktops, and wait for that; twice is once."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        deadline = time.monotonic() + STOP_S
        while self._keeper.poll() is None:
            if time.monotonic() > deadline:
                self._keeper.kill()
                self._keeper.wait()
                break
            yield Pause(0.02)
        shutil.rmtree(self._folder, ignore_errors=True)
