"""`drums step`: one action in a desktop."""

from __future__ import annotations

import sys

import click

from drums.commands.output import json_option, print_json


@click.command()
@click.argument("slot")
@click.argument("action")
@json_option("what the action answered")
def step(slot: str, action: str, as_json: bool) -> None:
    """Do one action in a desktop.

    ACTION is pyautogui code, or WAIT, DONE or FAIL; - reads it from standard input. Exit code 1 when the code failed.

    \b
    drums step d-0123456789ab "pyautogui.click(960, 540)"
    drums step d-0123456789ab "pyautogui.typewrite('hello', interval=0.05)"
    drums step d-0123456789ab DONE
    drums step d-0123456789ab - < actions.py
    """
    from drums.commands.session import running_daemon

    if action == "-":
        action = sys.stdin.read()
    with running_daemon() as client:
        answer = client.slot(slot).step(action)
    if as_json:
        print_json(answer)
    else:
        click.echo(answer["output"], nl=not answer["output"].endswith("\n") and bool(answer["output"]))
        if answer["error"]:
            click.echo(answer["error"].rstrip("\n"), err=True)
    if answer["status"] != "success":
        raise SystemExit(1)
