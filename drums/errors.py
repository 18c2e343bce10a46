"""The public error hierarchy; the runtime raises these and the client maps the wire's codes to them.

Three things are never the same class: the desktop broke (`DesktopError`), the checker broke
(`CheckerError`), and the agent failed (no error at all: a valid reward with a low score).
"""

from __future__ import annotations

from typing import Any, ClassVar


class DrumsError(Exception):
    """Base of everything that drums raises on purpose.

    Args:
        message: one line: what failed, observed against allowed, objects by repr.
        hint: the remedy, or an empty string.
        facts: the facts of the message as attributes, JSON-able.
    """

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.facts)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def _rebuild(cls: type[DrumsError], message: str, hint: str, facts: dict[str, Any]) -> DrumsError:
    return cls(message, hint=hint, **facts)


class ConfigError(DrumsError, ValueError):
    """A document from outside (configuration, task, request) is wrong; `.path` names the place."""

    code = "config_error"
    status = 422


class PrerequisiteError(DrumsError):
    """The host lacks something that its operator can mend; shown without a traceback."""

    code = "prerequisite"
    status = 503


class DaemonUnreachable(PrerequisiteError, ConnectionError):
    """No daemon answered.

    `.url` is where it was sought, `.may_have_arrived` whether it may have acted all the same, `.again` whether another
    try is worth it.
    """

    code = "daemon_unreachable"
    status = 503


class PluginError(DrumsError):
    """A plugin cannot be used; `.plugin` and `.distribution` name it."""

    code = "plugin_error"
    status = 500


class VerifierNotFound(PluginError):
    """A task names a checker, a verifier or a function that is not installed."""

    code = "verifier_not_found"
    status = 422


class AuthError(DrumsError):
    """The token is missing or wrong."""

    code = "unauthorized"
    status = 401


class InsecureTransport(DrumsError):
    """A token would travel over plain HTTP to a host that is not loopback."""

    code = "insecure_transport"
    status = 400


class TaskNotFound(DrumsError, LookupError):
    """No task has this id or prefix."""

    code = "task_not_found"
    status = 404


class TaskAmbiguous(TaskNotFound):
    """Several tasks begin with this prefix; `.candidates` are some of them."""

    code = "task_ambiguous"
    status = 409


class TaskUnsupported(DrumsError):
    """The task needs the agent itself to act as root, which a desktop never allows."""

    code = "task_unsupported"
    status = 422


class ImageNotFound(DrumsError, LookupError):
    """No image has this name; `.image` and `.known` say which."""

    code = "image_not_found"
    status = 404


class ImageUnsuitable(DrumsError):
    """The chosen image lacks what the task needs."""

    code = "image_unsuitable"
    status = 422


class ImageBuildError(DrumsError):
    """An image could not be built; nothing half-usable is left."""

    code = "image_build_failed"
    status = 500


class CapacityExhausted(DrumsError):
    """The host runs as many desktops as it may."""

    code = "capacity_exhausted"
    status = 503


class DesktopError(DrumsError):
    """The desktop broke, or was asked for what its state forbids; never the agent's score."""

    code = "desktop_error"
    status = 500


class SetupFailed(DesktopError):
    """A set-up step of the task failed; `.index`, `.step_type` and `.output` say which and how.

    Where what a checker needs cannot be had, before any step: `.index` is None.
    """

    code = "setup_failed"
    status = 422


class SlotNotFound(DesktopError, LookupError):
    """No slot has this id, or it is closed."""

    code = "slot_not_found"
    status = 404


class SlotQuarantined(DesktopError):
    """The desktop is quarantined; release it and reset it, or close it."""

    code = "slot_quarantined"
    status = 409


class SlotBusy(DesktopError):
    """Another operation on this slot is under way."""

    code = "slot_busy"
    status = 409


class InvalidTransition(DesktopError):
    """The desktop's state forbids the operation; `.state` and `.operation` name both."""

    code = "invalid_transition"
    status = 409


class CheckpointError(DesktopError):
    """A checkpoint cannot be used: missing, incomplete, damaged or made on another kind of host."""

    code = "checkpoint_error"
    status = 409


class CheckpointNotFound(CheckpointError):
    """There is no checkpoint of this name."""

    code = "checkpoint_not_found"
    status = 404


class DumpError(CheckpointError):
    """Freezing a desktop into a checkpoint failed; `.log_excerpt` quotes CRIU around each error."""

    code = "dump_failed"
    status = 500


class RestoreError(CheckpointError):
    """Restoring a checkpoint failed; `.log_excerpt` quotes CRIU around each error."""

    code = "restore_failed"
    status = 500


class GuestError(DesktopError):
    """The desktop's guest server could not be asked, or refused; not evidence about the desktop's content."""

    code = "guest_error"
    status = 502


class PortNotAllowed(DrumsError):
    """The host lets no client through to this port of a desktop; `.allowed` are those that it does."""

    code = "port_not_allowed"
    status = 403


class PortError(DrumsError):
    """Nothing listens on the desktop's port, or what does gave no answer that can be passed on."""

    code = "port_error"
    status = 502


class DesktopFileNotFound(DrumsError, LookupError):
    """The desktop has no such file."""

    code = "file_not_found"
    status = 404


class FileUnsuitable(DrumsError):
    """The desktop's file cannot be read or written: it is a folder, no regular file, or not the user's."""

    code = "file_unsuitable"
    status = 409


class EpisodeNotFound(DrumsError, LookupError):
    """The journal has no such episode."""

    code = "episode_not_found"
    status = 404


class EndStateNotFound(EpisodeNotFound):
    """No end state of the episode is there: it was not kept, or was removed since."""

    code = "end_state_not_found"
    status = 404


class CheckerChanged(DrumsError):
    """What would grade an end state again is not what graded it; `.differences` says what differs."""

    code = "checker_changed"
    status = 409


class InvalidEpisode(DrumsError):
    """The episode is not valid; `.reward` rides along when there is one."""

    code = "invalid_episode"
    status = 409


class CheckerError(DrumsError):
    """The checker failed, so there is no score; `.reward` rides along when there is one."""

    code = "checker_error"
    status = 500
