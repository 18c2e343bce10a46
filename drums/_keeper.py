"""Runs a command until it ends or standard input does: `python -m drums._keeper FOLDER COMMAND [ARGUMENT...]`.

Its starter holds the other end of standard input, and the kernel closes that however the starter ends. Then FOLDER is
removed too; before, it may hold what the starter wants to know of a command that ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

STOP_S = 50.0


def main(folder: str, argv: list[str]) -> int:
    """Run it; its exit status."""
    alone = threading.Event()
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)

    def follow_starter() -> None:
        while os.read(0, 4096):
            pass
        alone.set()
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()

    threading.Thread(target=follow_starter, daemon=True).start()
    status = child.wait()
    if alone.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
