"""Which tasks need the agent itself to act as root: a rule over a task's evaluator, no list of tasks.

A desktop never gives the agent root. A task is unsupported when what its checker reads can only be changed by root and
is not so in the image already: the account database, the system's clock and zone, the package database, services,
a program on the search path that the image lacks, files in folders that only root writes. Set-up that needs root is no
reason: the runtime does that as trusted provisioning. Nor is an infeasible task, which nobody can solve.

`IMAGE_COMMANDS` and `IMAGE_PACKAGES` say what the `osworld` image provides; one task wants a Java runtime in the
package database, which the image holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

IMAGE_COMMANDS = frozenset(
    (
        "bash",
        "sh",
        "python",
        "python3",
        "code",
        "soffice",
        "libreoffice",
        "gimp",
        "vlc",
        "thunderbird",
        "google-chrome",
        "chromium",
        "nautilus",
        "git",
        "gsettings",
        "wmctrl",
        "xclip",
        "xsel",
        "jq",
        "unzip",
        "expect",
        "ffmpeg",
        "java",
    )
)
IMAGE_PACKAGES = (
    "openjdk-17-jre",
    "libreoffice",
    "gimp",
    "vlc",
    "thunderbird",
    "git",
    "jq",
    "unzip",
    "xsel",
    "sysstat",
    "expect",
)

_ACCOUNTS = re.compile(r"\bgetent\s+(passwd|group|shadow)\b|/etc/(passwd|group|shadow|ssh|sudoers)\b")
_CLOCK = re.compile(r"\btimedatectl\b|\bhwclock\b|/etc/(localtime|timezone)\b")
_PACKAGES = re.compile(r"\bapt(-get)?\s+list\b|\bdpkg(-query)?\b|\bapt-cache\b|\bsnap\s+list\b|\bflatpak\s+list\b")
_SERVICES = re.compile(r"\b(systemctl|service)\s+(?!--user\b)\S+")
_LOOKUP = re.compile(r"\b(?:which|command\s+-v|type\s+-[pP])\s+([\w.+-]+)")
_ROOT_FOLDERS = re.compile(r"(?<![\w.~/-])/(?!usr/(?:local/)?s?bin/)(etc|usr|opt|boot|root|srv|var/lib)/")


def probes(evaluator: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a checker runs or reads in the desktop, as text, each with the rules that it is compared with."""
    results = _listed(evaluator.get("result"))
    expected = _listed(evaluator.get("expected"))
    kept = {}
    for step in evaluator.get("postconfig", []):
        parameters = step.get("parameters", {})
        if step.get("type") in ("execute", "command") and parameters.get("stdout"):
            kept[parameters["stdout"]] = _text(parameters.get("command"))
    for i, result in enumerate(results):
        if not isinstance(result, Mapping):
            continue
        rules = expected[i].get("rules") if i < len(expected) and isinstance(expected[i], Mapping) else None
        kind = result.get("type")
        if kind in ("vm_command_line", "vm_command_error"):
            yield _text(result.get("command")), rules
        elif kind == "vm_file":
            for path in _listed(result.get("path")):
                yield str(path), rules
        elif kind == "cache_file" and result.get("path") in kept:
            yield kept[result["path"]], rules


def unsupported_reason(evaluator: Mapping[str, Any]) -> str:
    """Why a task with this evaluator cannot be solved without root, or "" when it can."""
    if evaluator.get("func") == "infeasible":
        return ""
    for text, rules in probes(evaluator):
        reason = _judge(text, rules)
        if reason:
            return f"the agent would have to act as root: its checker reads {reason} ({text[:120]!r})"
    return ""


def _judge(text: str, rules: Any) -> str:
    if _ACCOUNTS.search(text):
        return "the account database"
    if _CLOCK.search(text):
        return "the system's clock or time zone"
    if _PACKAGES.search(text) and not _provided(rules):
        return "the package database"
    if _SERVICES.search(text):
        return "the state of system services"
    missing = [x for x in _LOOKUP.findall(text) if x not in IMAGE_COMMANDS]
    if missing:
        return f"whether the program {missing[0]!r} is installed, which the image has not"
    folder = _ROOT_FOLDERS.search(text)
    return f"files below '/{folder[1]}'" if folder else ""


def _provided(rules: Any) -> bool:
    """Whether the image's packages meet every pattern that the rules expect."""
    wanted = rules.get("expect") if isinstance(rules, Mapping) else None
    if not isinstance(wanted, Sequence) or isinstance(wanted, str):
        return False
    listing = [f"{x}/stable,now 0 amd64 [installed]" for x in IMAGE_PACKAGES]
    try:
        return all(any(re.search(str(pattern), line) for line in listing) for pattern in wanted)
    except re.error:
        return False


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _text(command: Any) -> str:
    return " ".join(map(str, command)) if isinstance(command, list) else str(command or "")
