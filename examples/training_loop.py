"""A training loop over several desktops that learns from valid rewards only.

    sudo drums serve &
    sudo python examples/training_loop.py --envs 2 --steps 1

The policy and its update are stand-ins. What to copy is `rollout`: an episode that drums calls invalid, or whose
checker failed, is masked out; its score is never read as 0.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import drums

Policy = Callable[[str, bytes], str]
"""From the instruction and the screen (PNG) to an action: pyautogui code, or WAIT, DONE or FAIL."""

RENAME = "import subprocess; subprocess.run('cd ~/Desktop && mv minutes_draft minutes_final', shell=True)"


@dataclass(frozen=True)
class Sample:
    """One episode as the learner sees it: `score` counts only where `valid` is true."""

    actions: Sequence[str]
    score: float
    valid: bool
    why_masked: str = ""


def guess(_instruction: str, _screen: bytes) -> str:
    """A stand-in for a policy: it solves drums' own example task every other time."""
    return random.choice([RENAME, "WAIT"])


def rollout(env: drums.Env, instruction: str, policy: Policy, length: int) -> Sample:
    """One episode."""
    actions: list[str] = []
    try:
        env.wait_valid()  # before the first action: one that ends a process would look like a bad restore
        while len(actions) < length:
            actions.append(policy(instruction, env.screenshot()))
            env.step(actions[-1])
            if actions[-1] in ("DONE", "FAIL"):
                break
        reward = env.verify()
    except (drums.InvalidEpisode, drums.CheckerError, drums.DesktopError) as e:
        # The desktop broke or the checker did, which says nothing about the policy: no score, not a score of 0.
        return Sample(actions, 0.0, False, f"{type(e).__name__}: {e}")
    assert reward.score is not None  # a strict `verify` has raised otherwise
    return Sample(actions, reward.score, reward.valid)


def advantages(samples: Sequence[Sample]) -> list[float]:
    """Scores against the mean of the valid ones; masked samples neither count nor move the mean."""
    scores = [s.score for s in samples if s.valid]
    mean = sum(scores) / len(scores) if scores else 0.0
    return [s.score - mean if s.valid else 0.0 for s in samples]


def renewed(client: drums.Client, env: drums.Env, task: str) -> drums.Env:
    """A desktop with a new episode: this one, or another where it is beyond a reset."""
    try:
        if env.refresh()["state"] == "quarantined":
            env.release()
        env.reset()
        return env
    except drums.DesktopError:
        with suppress(drums.SlotNotFound):
            env.close()
        return client.create(task=task, ttl=600)


def close_all(envs: Sequence[drums.Env]) -> None:
    """Close desktops."""
    for env in envs:
        env.close()


def train(client: drums.Client, task: str, policy: Policy, *, envs: int, steps: int, length: int) -> list[Sample]:
    """Train, and return every sample."""
    instruction = client.task(task)["instruction"]
    seen: list[Sample] = []
    with ExitStack() as stack, ThreadPoolExecutor(envs) as pool:
        # The lease ends what a trainer that dies leaves behind.
        running = [client.create(task=task, ttl=600) for _ in range(envs)]
        stack.callback(close_all, running)
        for step in range(steps):
            if step:
                running[:] = pool.map(lambda env: renewed(client, env, task), running)
            for env in running:
                env.extend(600)
            samples = list(pool.map(lambda env: rollout(env, instruction, policy, length), running))
            for sample, advantage in zip(samples, advantages(samples), strict=True):
                # The learner's part: loss = -valid * advantage * log_probability(actions)
                shown = f"score {sample.score}" if sample.valid else f"masked ({sample.why_masked})"
                print(f"step {step}: {shown}, advantage {advantage:+.2f}")
            seen += samples
    return seen


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="2e208cb7", help="a task's id; by default one of drums' own")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="training steps, each one episode per desktop")
    parser.add_argument("--length", type=int, default=3, help="actions per episode")
    options = parser.parse_args()
    with drums.connect() as client:
        seen = train(client, options.task, guess, envs=options.envs, steps=options.steps, length=options.length)
    print(f"{sum(s.valid for s in seen)} of {len(seen)} episodes are valid")


if __name__ == "__main__":
    main()
