"""`drums create`: a desktop that outlives the command."""

from __future__ import annotations

import click

from drums.commands.output import json_option, print_json, seconds

UNLIMITED = float("inf")


def _lease(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Seconds, `UNLIMITED`, or None when the option was not given; the daemon judges what it allows."""
    if value is None or value == "unlimited":
        return UNLIMITED if value else None
    try:
        return float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of seconds nor 'unlimited'", ctx, param) from None


def _labels(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r} is not NAME=TEXT", ctx, param)
    return dict(value.split("=", 1) for value in values)


@click.command()
@click.argument("task", required=False)
@click.option("--image", metavar="NAME", help="Image to start from; the host's default otherwise.")
@click.option("--checkpoint", metavar="NAME", help="Saved checkpoint to start from.")
@click.option("--ttl", callback=_lease, metavar="SECONDS", help="Seconds until it is closed, or 'unlimited'.")
@click.option("--network", default="none", show_default=True, help="What the desktop can reach.")
@click.option("--label", "labels", multiple=True, callback=_labels, metavar="NAME=TEXT", help="Kept with its episodes.")
@click.option("--wait", is_flag=True, help="Wait until the episode is valid; exit code 1 when it is not.")
@json_option("the slot")
def create(
    task: str | None,
    image: str | None,
    checkpoint: str | None,
    ttl: float | None,
    network: str,
    labels: dict[str, str],
    wait: bool,
    as_json: bool,
) -> None:
    """Create a desktop and print its id.

    TASK is a task's id, or 8 or more characters of it. The desktop lives on until it is closed or its lease ends.

    \b
    slot=$(drums create e0df059f --ttl 600 --wait)
    drums step "$slot" "pyautogui.hotkey('ctrl', 'alt', 't')"
    drums verify "$slot"
    drums slots close "$slot"
    """
    from drums._calls import Default
    from drums.commands.session import running_daemon

    with running_daemon() as client:
        lease = Default.TTL if ttl is None else None if ttl == UNLIMITED else ttl
        env = client.create(task, image, checkpoint, lease, network, labels)
        if wait:
            try:
                env.wait_valid()
            except BaseException:
                click.echo(f"drums: the desktop {env.id} is left as it is", err=True)
                raise
        slot = env.refresh()
    if as_json:
        print_json(slot)
        return
    click.echo(env.id)
    click.echo(f"{env.state}; closes in {seconds(slot['expires_in'])}: drums slots close {env.id}", err=True)
