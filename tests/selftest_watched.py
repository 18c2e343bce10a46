"""A self-test that says when a desktop is up, and writes down every desktop that there was; ended by its parent."""

from __future__ import annotations

import sys
from typing import Any

import trio
from desktops import Witness

from drums_core import load_config
from drums_core.selftest.run import selftest


class Telling(Witness):
    """A witness that keeps its parent informed."""

    async def __call__(self, at: Any) -> None:
        await super().__call__(at)
        with open(sys.argv[1], "a") as seen:  # noqa: ASYNC230 - one short line at once: no two calls mix
            seen.write(f"{at.slot}\n")
        if at.point == "ready":
            print("a desktop is up", flush=True)


if __name__ == "__main__":
    trio.run(lambda: selftest(load_config(), gates=["mount_table"], clean=0, also=Telling()))
