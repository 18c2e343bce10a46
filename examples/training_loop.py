"""A training loop over several desktops that learns from valid rewards only.

    sudo drums serve &
    sudo python examples/training_loop.py --envs 2 --steps 1

The policy and its update are stand-ins. What to copy is how a score gets to the learner: `rollout` keeps the reward or
the error, and `drums.batch_of` makes columns of them, where whatever does not count is masked and NaN, never a 0. The
policy's name goes with its episodes (`labels`), so that its rates of invalid ones and of checker errors can be watched.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import drums

Policy = Callable[[str, bytes], str]
"""From the instruction and the screen (PNG) to an action: pyautogui code, or WAIT, DONE or FAIL."""

RENAME = "import subprocess; subprocess.run('cd ~/Desktop && mv minutes_draft minutes_final', shell=True)"


@dataclass(frozen=True)
class Sample:
    """One episode: what the policy did, and the reward, or why there is none."""

    actions: Sequence[str]
    outcome: drums.Reward | drums.DrumsError


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
        return Sample(actions, env.verify())
    except (drums.InvalidEpisode, drums.CheckerError, drums.DesktopError) as e:
        # The desktop broke or the checker did, which says nothing about the policy: no score, not a score of 0.
        return Sample(actions, e)


def batch_of(samples: Sequence[Sample]) -> drums.RewardBatch:
    """The rewards as columns: `scores`, NaN where `mask` is false."""
    return drums.batch_of(s.outcome for s in samples)


def advantages(batch: drums.RewardBatch) -> list[float]:
    """Scores against the mean of those that count; NaN, as the score, where the mask is false."""
    mean = batch.mean()
    return [score - mean for score in batch.scores]


def loss_of(batch: drums.RewardBatch, log_probabilities: Sequence[float]) -> float:
    """REINFORCE over what counts. A mask that multiplies is not enough, as 0 * NaN is NaN: *choose* by it."""
    rows = zip(batch.mask, advantages(batch), log_probabilities, strict=True)
    return math.fsum(-advantage * log_p for counts, advantage, log_p in rows if counts)


def renewed(client: drums.Client, env: drums.Env, task: str, labels: Mapping[str, str] | None = None) -> drums.Env:
    """A desktop with a new episode: this one, or another where it is beyond a reset."""
    try:
        if env.refresh()["state"] == "quarantined":
            env.release()
        env.reset()
        return env
    except drums.DesktopError:
        with suppress(drums.SlotNotFound):
            env.close()
        return client.create(task=task, ttl=600, labels=labels)


def close_all(envs: Sequence[drums.Env]) -> None:
    """Close desktops."""
    for env in envs:
        env.close()


def train(
    client: drums.Client, task: str, policy: Policy, labels: Mapping[str, str], *, envs: int, steps: int, length: int
) -> list[Sample]:
    """Train, and return every sample."""
    instruction = client.task(task)["instruction"]
    seen: list[Sample] = []
    with ExitStack() as stack, ThreadPoolExecutor(envs) as pool:
        # The lease ends what a trainer that dies leaves behind.
        running = [client.create(task=task, ttl=600, labels=labels) for _ in range(envs)]
        stack.callback(close_all, running)
        for step in range(steps):
            if step:
                running[:] = pool.map(lambda env: renewed(client, env, task, labels), running)
            for env in running:
                env.extend(600)
            samples = list(pool.map(lambda env: rollout(env, instruction, policy, length), running))
            batch = batch_of(samples)
            loss = loss_of(batch, [math.log(0.5)] * len(batch))  # the stand-in's; here the learner takes its step
            for sample, counts, score in zip(samples, batch.mask, batch.scores, strict=True):
                shown = f"score {score}" if counts else f"masked ({type(sample.outcome).__name__}: {sample.outcome})"
                print(f"step {step}: {shown}, loss {loss:+.2f}")
            seen += samples
    return seen


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="2e208cb7", help="a task's id; by default one of drums' own")
    parser.add_argument("--policy", default="guess", help="the policy's name, for `drums stats --by label`")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="training steps, each one episode per desktop")
    parser.add_argument("--length", type=int, default=3, help="actions per episode")
    options = parser.parse_args()
    with drums.connect() as client:
        labels = {"policy": options.policy}
        seen = train(client, options.task, guess, labels, envs=options.envs, steps=options.steps, length=options.length)
        for row in client.stats(by="label", label="policy"):
            if row["label"] == options.policy:  # with what the journal has of earlier runs
                print(f"policy {row['label']}: valid rate {row['valid_rate']}, {row['checker_errors']} checker errors")
    batch = batch_of(seen)
    print(f"{sum(batch.valid)} of {len(batch)} episodes are valid, mean score {batch.mean():.2f}")


if __name__ == "__main__":
    main()
