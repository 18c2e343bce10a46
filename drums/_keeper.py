"""Runs a command until it ends or standard input does: `python -m drums._keeper COMMAND [ARGUMENT...]`.

Its starter holds the other end of standard input, and the kernel closes that however the starter ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

STOP_S = 50.0


def main(argv: list[str]) -> int:
    """Run it; its exit status."""
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)

    def follow_starter() -> None:
        while os.read(0, 4096):
            pass
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()

    threading.Thread(target=follow_starter, daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
