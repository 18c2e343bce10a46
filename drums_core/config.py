"""A host's configuration: a TOML file, then `DRUMS_…` environment variables, then what the caller passes."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import cattrs
from cattrs import transform_error
from cattrs.v import format_exception

from drums.errors import ConfigError
from drums_core.abc import GOOGLE_API, GOOGLE_DRIVE_PAGE
from drums_core.guest_client import PORT as GUEST_PORT
from drums_core.image.software import Software
from drums_core.model import Limits
from drums_core.urls import without_credentials

DEFAULT_TTL_S: float | None = 3600.0
END_STATE_MAX_AGE_S: float | None = 7 * 86400.0
DEFAULT_STATE_DIR = Path("/var/lib/drums")


def _reachable(_: object, attribute: attrs.Attribute[tuple[int, ...]], value: tuple[int, ...]) -> None:
    for port in value:
        if not 0 < port < 65536 or port == GUEST_PORT:
            what = "the guest server's own" if port == GUEST_PORT else "none"
            raise ValueError(f"{attribute.name} has {port!r}, which is {what}; allowed are others from 1 to 65535")


def _positive_or_none(_: object, attribute: attrs.Attribute[float | None], value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{attribute.name} is {value!r}, it must be more than 0")


def _text(path: Path | str | None) -> str | None:
    return None if path is None else str(path)


def keeps_secrets(url: str) -> bool:
    """Whether what is sent to a URL is encrypted, or stays on the machine; false for what is no URL."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    return bool(host) and (
        parts.scheme == "https" or (parts.scheme == "http" and host in ("localhost", "127.0.0.1", "::1"))
    )


def _service(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not keeps_secrets(value):  # a password or a token goes there
        shown = without_credentials(value)
        raise ValueError(f"{attribute.name} is {shown!r}; allowed are https:// URLs, and http:// ones of the loopback")


@attrs.frozen
class HostConfig:
    """What `open_host` needs to know.

    Args:
        state_dir: images, checkpoints, slots and CRIU live here; ext4, xfs or btrfs, not an overlay.
        image: the image that `create` takes when none is named.
        max_slots: how many desktops may live at once; more raise `CapacityExhausted`.
        default_ttl_s: seconds that a desktop lives unless its creator says otherwise; None is unlimited.
        allow_unlimited_ttl: whether a creator may ask for `ttl=None`.
        limits: what each desktop may use.
        ready_limit_s: seconds within which a restored desktop's guest server must answer.
        settle_s: seconds after ready at which `alive_after_resume` looks; the specification says 5.
        gate_timeout_s: seconds that one gate may take.
        criu_timeout_s: seconds that CRIU may be silent during a dump or a restore.
        osworld: an OSWorld checkout's folder (the one that holds `evaluation_examples`), or None.
        file_mirror: a folder with the files that tasks name by URL, or its base URL, or None; see `file_folders`.
        files_offline: whether such files are never fetched when a desktop or a checker wants one that is not here.
        files_private_addresses: whether a file's own URL may lead to an address of this host or of its network. The
            base URL in `file_mirror` may.
        accounts: a folder with the files in which tasks look for the operator's passwords and tokens, or None.
        google_api: the base URL of Google's APIs: a mirror's or a stand-in's.
        google_drive_page: the page of Google Drive where desktops' browsers are asked to sign in.
        extra_required_gates: gates that must pass besides those of the specification.
        checker_timeout_s: seconds that a checker may take, once there is a desktop to ask.
        waiting_workers: how many workers each checker keeps waiting, so that a check does not wait for one to start.
        verify_in_place: whether `verify`, unless told otherwise, grades the desktop itself and not a frozen copy.
        keep_end_states: whether `verify`, unless told otherwise, keeps the graded copy, for `reverify`.
        max_end_states: how many end states are kept at most; the oldest is removed first.
        end_state_max_age_s: seconds after which an end state is removed; None is never.
        max_copies: how many desktops may be copied and graded at once, besides `max_slots`; more wait their turn.
        listen: where the daemon listens: `HOST:PORT` with an address of the loopback, or `unix:/path`.
        allow_remote: whether `listen` may be an address that other machines reach. The token then travels in the clear:
            put TLS in front of it.
        max_connections: how many clients may be connected to the daemon at once.
        ports: ports of a desktop that clients may reach through the daemon.
        software: packages of apt sources besides Debian's that images get as they are built.
    """

    state_dir: Path = DEFAULT_STATE_DIR
    image: str = "minimal"
    max_slots: int = attrs.field(default=32, validator=attrs.validators.ge(1))
    default_ttl_s: float | None = attrs.field(default=DEFAULT_TTL_S, validator=_positive_or_none)
    allow_unlimited_ttl: bool = True
    limits: Limits = attrs.field(factory=Limits)
    ready_limit_s: float = 30.0
    settle_s: float = attrs.field(default=5.0, validator=attrs.validators.ge(5.0))
    gate_timeout_s: float = 30.0
    criu_timeout_s: float = 60.0
    osworld: Path | None = None
    file_mirror: str | None = attrs.field(default=None, converter=_text)
    files_offline: bool = False
    files_private_addresses: bool = False
    accounts: Path | None = None
    google_api: str = attrs.field(default=GOOGLE_API, validator=_service)
    google_drive_page: str = attrs.field(default=GOOGLE_DRIVE_PAGE, validator=_service)
    extra_required_gates: tuple[str, ...] = ()
    checker_timeout_s: float = 300.0
    waiting_workers: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    verify_in_place: bool = False
    keep_end_states: bool = False
    max_end_states: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    end_state_max_age_s: float | None = attrs.field(default=END_STATE_MAX_AGE_S, validator=_positive_or_none)
    max_copies: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    listen: str = "127.0.0.1:7070"
    allow_remote: bool = False
    max_connections: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    ports: tuple[int, ...] = attrs.field(default=(9222, 8080), validator=_reachable)
    software: tuple[Software, ...] = ()

    def file_folders(self) -> list[Path]:
        """The folders with the files that tasks name by URL, as they are looked through.

        That is `file_folder` alone, where there is one; else what was fetched, and `file_cache` of the checkout. A
        file's path in them is that of `task_files.mirror`.
        """
        if self.file_folder is not None:
            return [self.file_folder]
        beside = self.checkout_files()
        return [self.files] if beside is None else [self.files, beside]

    @property
    def file_folder(self) -> Path | None:
        """The folder that `file_mirror` names: files are looked for there alone; None where it names none."""
        return None if self.file_mirror is None or self.file_url is not None else Path(self.file_mirror)

    @property
    def file_url(self) -> str | None:
        """The base URL of the mirror that files are fetched from; None for the URLs themselves."""
        mirror = self.file_mirror
        return mirror if mirror is not None and mirror.startswith(("http://", "https://")) else None

    @property
    def fetches_files(self) -> bool:
        """Whether files that are not here are fetched."""
        return not self.files_offline and self.file_folder is None

    @property
    def files(self) -> Path:
        """The store: where files are that were fetched."""
        return self.state_dir / "files"

    def checkout_files(self) -> Path | None:
        """The folder `file_cache` of the OSWorld checkout, if it is there."""
        beside = None if self.osworld is None else self.osworld / "file_cache"
        return beside if beside is not None and beside.is_dir() else None


def _fault(error: BaseException, kind: type | None) -> str:
    # cattrs would say "invalid value" alone; a validator's own words hold observed against allowed.
    return str(error) if type(error) is ValueError else format_exception(error, kind)


_PATHS = ("state_dir", "osworld", "file_mirror", "accounts")
_SCALARS = {
    *_PATHS,
    "image",
    "max_slots",
    "files_offline",
    "default_ttl_s",
    "listen",
    "google_api",
    "google_drive_page",
}
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def _switch(value: object, _: object) -> bool:
    # cattrs would take "no" for true.
    if isinstance(value, bool):
        return value
    raise ValueError(f"expected true or false, found {value!r:.60}")


def _absolute(folder: str | None) -> str | None:
    return None if folder is None else str(Path(folder).absolute())


def load_config(path: Path | None = None, *, environ: Mapping[str, str] | None = None, **overrides: Any) -> HostConfig:
    """The configuration of this host.

    Args:
        path: a TOML file; None reads `/etc/drums/drums.toml` if it is there.
        environ: the environment; `DRUMS_STATE_DIR`, `DRUMS_OSWORLD` and the like win over the file.
        overrides: win over both; a value of None is as if it were not given.

    Raises:
        ConfigError: an unknown key or a wrong value, with the path of each.
    """
    document: dict[str, Any] = {}
    source = path or Path("/etc/drums/drums.toml")
    if path is not None or source.exists():
        try:
            document = tomllib.loads(source.read_text())
        except (OSError, ValueError) as e:  # no TOML, or no UTF-8
            raise ConfigError(f"configuration {str(source)!r} cannot be read: {e}", path="$") from e
    for key in _SCALARS:
        value = (os.environ if environ is None else environ).get(f"DRUMS_{key.upper()}")
        if value:
            document[key] = _BOOLS.get(value.lower(), value) if key == "files_offline" else value
    document.update({k: v for k, v in overrides.items() if v is not None})
    for key in _PATHS:
        if isinstance(document.get(key), Path):
            document[key] = str(document[key])
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(bool, _switch)
    try:
        config = converter.structure(document, HostConfig)
    except (cattrs.BaseValidationError, ValueError) as e:
        faults = transform_error(e, format_exception=_fault) if isinstance(e, cattrs.BaseValidationError) else [str(e)]
        raise ConfigError(f"configuration is wrong: {'; '.join(faults)}", path="$", faults=faults) from e
    return attrs.evolve(
        config,
        state_dir=config.state_dir.absolute(),
        osworld=config.osworld.absolute() if config.osworld else None,
        file_mirror=config.file_mirror if config.file_url else _absolute(config.file_mirror),
        accounts=config.accounts.absolute() if config.accounts else None,
    )
