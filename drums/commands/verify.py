"""`drums verify`: the reward."""

from __future__ import annotations

import click

from drums.commands.output import json_option, one_line, print_json


@click.command()
@click.argument("slot")
@click.option("--strict/--no-strict", default=True, help="Exit code 1 unless the reward is valid and has a score.")
@click.option(
    "--in-place/--copy",
    default=None,
    help="Score the desktop itself, or a frozen copy of it; as the host is configured otherwise.",
)
@click.option(
    "--keep/--no-keep",
    default=None,
    help="Keep the scored copy as the episode's end state, or not; as the host is configured otherwise.",
)
@json_option("the reward")
def verify(slot: str, strict: bool, in_place: bool | None, keep: bool | None, as_json: bool) -> None:
    """Score a desktop.

    Waits for the verdict on the episode, runs the task's checker, and prints the reward in any case. What is scored is
    a frozen copy, unless the host is configured otherwise; the desktop runs on. `drums episodes reverify` scores a kept
    copy again.

    \b
    drums verify d-0123456789ab
    drums verify d-0123456789ab --json | jq .score
    drums verify d-0123456789ab --in-place
    drums verify d-0123456789ab --keep
    """
    from drums._calls import require_score
    from drums.commands.session import running_daemon

    with running_daemon() as client:
        reward = client.slot(slot).verify(strict=False, in_place=in_place, keep=keep)
    if as_json:
        print_json(reward.to_dict())
    else:
        click.echo(f"score    {'-' if reward.score is None else reward.score}")
        click.echo(f"verdict  {reward.verdict}")
        for reason in reward.invalid_reasons:
            click.echo(f"         {one_line(reason)}")
        told = (
            ("error", reward.checker_error),
            ("cause", reward.checker_error_cause),
            ("skipped", reward.checker_skipped),
        )
        for name, value in told:
            if value is not None:
                click.echo(f"{name:8} {one_line(value)}")
    if strict:
        require_score(slot, reward)
