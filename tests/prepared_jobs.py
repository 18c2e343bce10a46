"""A job for `test_worker.py` whose module prepares; standard library only."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Before the host asks."""
    match request.get("fault"):
        case "raise":
            raise KeyError("planted")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "hang":
            while True:
                time.sleep(1)
    print("prepared", flush=True)
    return {"request": request, "prepared": time.time()}


def run(prepared: dict[str, Any]) -> dict[str, Any]:
    """When it asks."""
    began = time.time()
    with socket.create_connection(("127.0.0.1", 5000), timeout=10) as s:
        s.sendall(b"hello")
        return {**prepared, "began": began, "answer": s.recv(100).decode()}
