"""Running a task's set-up steps in a desktop: as the user, with root only for what `sudo` is called on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import attrs

from drums.errors import ConfigError, DrumsError, GuestError, SetupFailed
from drums_core.abc import Accounts, CommandResult
from drums_core.as_user import execute_as_user, upload_as_user
from drums_core.model import Json, SetupStep
from drums_core.task_files.obtain import obtain

if TYPE_CHECKING:
    from drums_core.desktop import Desktop
    from drums_core.guest_client import GuestClient
    from drums_core.host import Host
    from drums_core.plugins import Registry

SCREEN = (1920, 1080)
_SUDO = re.compile(r"(?:^|[\s;&|(`'\"/])sudo(?![\w./=-])")


class Record(Protocol):
    """What steps leave a word in: an episode, or the copy of a desktop that is graded."""

    @property
    def id(self) -> str:
        """Of the episode."""

    @property
    def notes(self) -> list[str]:
        """Remarks."""

    @property
    def outputs(self) -> dict[str, str]:
        """Of commands, kept for the checker."""


class Place(Protocol):
    """Where steps are carried out: a slot, or the copy of its desktop that is graded."""

    id: str
    host: Host

    @property
    def desktop(self) -> Desktop | None:
        """Its desktop."""

    @property
    def guest(self) -> GuestClient:
        """Its desktop's guest server."""

    @property
    def has_acted(self) -> bool:
        """Whether an agent has acted in it."""

    @property
    def episode(self) -> Record:
        """What keeps notes and outputs."""


def calls_sudo(command: str | Sequence[str]) -> bool:
    """Whether a command has the word `sudo` where a command may stand.

    Guessing wrong is harmless: a step that gets the provisioned `sudo` and does not call it runs as the user
    all the same.
    """
    parts = [command] if isinstance(command, str) else command
    return any(_SUDO.search(part) for part in parts)


@attrs.define
class DesktopStepContext:
    """`drums_core.abc.StepContext` over a real desktop."""

    slot: Place
    screen: tuple[int, int] = SCREEN
    cache: Path | None = None  # where the checker under way finds kept outputs

    async def execute(
        self, command: str | Sequence[str], *, shell: bool = False, timeout_s: float = 120.0
    ) -> CommandResult:
        """Run a command as the user; one that calls `sudo` goes through trusted provisioning.

        Not where an agent has acted: there the command finds no `sudo`.
        """
        provisioned = calls_sudo(command)
        if provisioned and self.slot.has_acted:
            self.note("no sudo for a step: an agent has acted in this desktop, and what it left could use it")
            provisioned = False
        if not provisioned:
            return await execute_as_user(self.slot.guest, "/setup/execute", command, shell=shell, timeout_s=timeout_s)
        desktop = self.slot.desktop
        assert desktop is not None
        try:
            reply = await desktop.provisioner.run_step(command, shell=shell, timeout_s=timeout_s)
        finally:
            desktop.track_processes()
        return CommandResult(int(reply["returncode"]), str(reply["output"]), str(reply["error"]))

    async def launch(self, command: str | Sequence[str], *, shell: bool = False) -> None:
        """Start a program and leave it running."""
        document = {"command": command if isinstance(command, str) else list(command), "shell": shell}
        await self.slot.guest.call("POST", "/setup/launch", document)

    async def fetch(self, url: str) -> bytes:
        """As the host's configuration says: `task_files.obtain`."""
        return await obtain(self.slot.host.config, url)

    @property
    def has_acted(self) -> bool:
        """As the slot knows."""
        return self.slot.has_acted

    @property
    def accounts(self) -> Accounts:
        """As the host's configuration has them."""
        config = self.slot.host.config
        return Accounts(config.accounts, config.google_api, config.google_drive_page)

    async def open_file(self, path: str, *, timeout_s: float = 120.0) -> None:
        """Open a file or start a program, and wait for its window."""
        document = {"path": path, "timeout_seconds": timeout_s}
        status, message = await self._ask("/setup/open_file", document, timeout_s=timeout_s + 30)
        if status != 200:
            raise SetupFailed(message, output="")

    async def activate_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Bring a window to the front; false when there is none."""
        return await self._tell_window("/setup/activate_window", name, strict, by_class)

    async def close_window(self, name: str, *, strict: bool = False, by_class: bool = False) -> bool:
        """Ask a window to close; false when there is none."""
        return await self._tell_window("/setup/close_window", name, strict, by_class)

    async def upload(self, path: str, content: bytes) -> None:
        """Write a file as the user."""
        await upload_as_user(self.slot.guest, path, content)

    async def _tell_window(self, route: str, name: str, strict: bool, by_class: bool) -> bool:
        status, message = await self._ask(route, {"window_name": name, "strict": strict, "by_class": by_class})
        if status not in (200, 404):
            raise GuestError(f"the guest server answered POST {route} with {status}: {message}", guest_status=status)
        return status == 200

    async def _ask(self, route: str, document: Mapping[str, Json], *, timeout_s: float = 60.0) -> tuple[int, str]:
        """A request that may be refused: the reply's status and what it says."""
        reply = await self.slot.guest.request(
            "POST", route, json.dumps(document).encode(), [("Content-Type", "application/json")], timeout_s=timeout_s
        )
        text = reply.body.decode("utf-8", "replace")
        try:
            return reply.status, str(json.loads(text)["message"])[:500]
        except (ValueError, TypeError, KeyError):
            return reply.status, text[:500]

    def keep_output(self, name: str, text: str) -> None:
        """Keep a command's output in the episode, for the checker."""
        if "/" in name or name in ("", ".", ".."):
            raise ConfigError(f"{name!r} is no file name to keep an output under", path="$.stdout")
        self.slot.episode.outputs[name] = text
        if self.cache is not None:
            (self.cache / name).write_text(text, encoding="utf-8")

    def note(self, text: str) -> None:
        """Record a remark in the episode."""
        self.slot.episode.notes.append(text)
        self.slot.host.publish("note", self.slot.id, text, self.slot.episode.id)


def parse_steps(registry: Registry, steps: Sequence[SetupStep], where: str) -> None:
    """Refuse steps that no plugin knows or whose parameters are wrong.

    Raises:
        ConfigError: with the path of the fault.
    """
    for index, step in enumerate(steps):
        if step.type not in registry.steps:
            raise ConfigError(
                f"no plugin provides the set-up step {step.type!r}",
                path=f"$.{where}[{index}].type",
                hint=f"installed: {', '.join(sorted(registry.steps))}",
            )
        try:
            registry.steps[step.type][0]().parse(step.parameters)
        except ConfigError as e:
            place = f"$.{where}[{index}]"
            facts = {k: v for k, v in e.facts.items() if k != "path"}
            path = str(e.facts.get("path", "$.parameters")).replace("$", place, 1)
            raise ConfigError(f"{place}: {e.message}", hint=e.hint, path=path, **facts) from e


async def run_steps(slot: Place, steps: Sequence[SetupStep], *, cache: Path | None = None) -> None:
    """Carry out steps in order.

    Args:
        slot: where.
        cache: a folder that kept outputs are written to besides, for a checker under way.

    Raises:
        SetupFailed: names the step by index and type, with what it put out.
    """
    registry = slot.host.plugins.registry
    context = DesktopStepContext(slot, cache=cache)
    for index, step in enumerate(steps):
        slot.host.publish("progress", slot.id, {"step": index, "type": step.type, "of": len(steps)})
        try:
            implementation = registry.steps[step.type][0]()
            await implementation.run(context, implementation.parse(step.parameters))
        except DrumsError as e:
            facts = {k: v for k, v in e.facts.items() if k not in ("index", "step_type")}
            facts.setdefault("output", "")
            raise SetupFailed(
                f"set-up step {index} ({step.type}) failed: {e.message}",
                hint=e.hint,
                index=index,
                step_type=step.type,
                **facts,
            ) from e
