"""Fifty desktops through a client of a real daemon, six at a time: all valid, nothing is left, nothing grows."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import psutil
from requires import requires
from scratch import scratch_state
from served import served
from snapshot import assert_unchanged, take

import drums

pytestmark = requires("root", "criu")
AT_ONCE = 6
ROUNDS = 9
REST_S = 30.0
ACTION = "import pyautogui; pyautogui.moveTo(100, 100)"
GROWTH_BYTES = 8 << 20  # of a daemon of some 100 MB that has served three rounds; six leaked screenshots are more


@attrs.frozen
class _Cycle:
    """One desktop's outcome."""

    stepped: int
    score: float | None
    valid: bool
    reasons: tuple[str, ...]
    error: str | None


def _cycle(client: drums.Client, task: str) -> _Cycle:
    with client.create(task=task) as env:
        env.wait_valid(timeout=120)
        stepped = env.step(ACTION)["returncode"]
        env.screenshot()
        reward = env.verify(strict=False)
    return _Cycle(stepped, reward.score, reward.valid, tuple(reward.invalid_reasons), reward.checker_error)


def _at_rest(process: psutil.Process, wanted: int) -> int:
    """How many descriptors it has, once its callers' connections are closed, which takes it a moment."""
    least = process.num_fds()
    deadline = time.monotonic() + (REST_S if wanted else 3)
    while time.monotonic() < deadline and not least <= wanted:
        time.sleep(0.1)
        least = min(least, process.num_fds())
    return least


def test_fifty_cycles_are_all_valid_and_leave_nothing(tmp_path: Path) -> None:
    cycles: list[_Cycle] = []
    descriptors: list[int] = []
    memory: list[int] = []
    with scratch_state(osworld=True) as config:
        task = "e0df059f" if config.osworld else "2e208cb7"
        before = take(config.state_dir)
        options = ["--state-dir", str(config.state_dir)]
        if config.osworld:
            options += ["--osworld", str(config.osworld)]
        with served(tmp_path / "log", *options) as daemon, ThreadPoolExecutor(AT_ONCE) as pool:
            process = psutil.Process(daemon.pid)
            for _ in range(ROUNDS):
                with drums.connect(daemon.url, token=daemon.token) as client:
                    cycles += pool.map(lambda _, client=client: _cycle(client, task), range(AT_ONCE))
                    assert client.health()["slots"] == 0
                assert os.listdir(config.state_dir / "slots") == []
                descriptors.append(_at_rest(process, descriptors[0] if descriptors else 0))
                memory.append(process.memory_info().rss)
        (config.state_dir / "token").unlink()  # a daemon's first start makes it, for all later ones
        assert_unchanged(before, config.state_dir)
    assert len(cycles) >= 50
    assert cycles == [_Cycle(0, 0.0, True, (), None)] * len(cycles)
    assert max(descriptors) <= descriptors[0], f"open descriptors after each round: {descriptors}"
    growth = statistics.median(memory[-3:]) - statistics.median(memory[1:4])
    assert growth < GROWTH_BYTES, f"resident bytes after each round: {memory}"


def test_what_a_scratch_state_holds_is_gone_with_it() -> None:
    with scratch_state() as config:
        state = config.state_dir
        assert (state / "images").is_dir()
        assert Path(os.readlink(state / "criu")).is_dir()
    assert not state.exists()
