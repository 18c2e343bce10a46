"""The `googledrive` step: clean or fill the operator's Google Drive, from the host.

Its parameters are a list `operation`, and `args` with as many mappings: `delete` takes `query` and `trash`, `mkdirs`
takes `path`, a list of folders' names, and `upload` takes `url` and `path`, whose last name is the file's. The file
comes from the host, as those of `download` do. An empty query deletes all that the account has, as in OSWorld.

OSWorld's own `upload` makes a list the file's title, and ends the step; here it does what the parameters say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import trio

from drums.errors import ConfigError
from drums_core.abc import Step, StepContext
from drums_core.hookspecs import RegisterStep, hookimpl
from drums_core.model import Json
from drums_osworld.steps.account import check_settings_file, failure
from drums_osworld.steps.drive import FOLDER, Drive, DriveError, open_drive, read_credentials
from drums_osworld.steps.parameters import NO, Flag, structure

LIMIT_S = 600.0  # for the whole step


@attrs.frozen
class Delete:
    """Delete what a query finds, or put it into the trash."""

    query: str = ""
    trash: Flag = NO


@attrs.frozen
class MakeFolders:
    """Make the folders of a path that are not there."""

    path: tuple[str, ...]


@attrs.frozen
class Upload:
    """Add a file."""

    url: str
    path: tuple[str, ...]


Operation = Delete | MakeFolders | Upload
_OPERATIONS: dict[str, type[Delete] | type[MakeFolders] | type[Upload]] = {
    "delete": Delete,
    "mkdirs": MakeFolders,
    "upload": Upload,
}


@attrs.frozen
class _Raw:
    settings_file: str
    operation: tuple[str, ...]
    args: tuple[dict[str, Any], ...]


@attrs.frozen
class GoogleDriveParameters:
    """The parameters of `googledrive`."""

    settings_file: str
    operations: tuple[Operation, ...]


class GoogleDrive:
    """The step."""

    def parse(self, parameters: Mapping[str, Json]) -> GoogleDriveParameters:
        """The parameters; raises `ConfigError`."""
        raw = structure(parameters, _Raw, "googledrive")
        check_settings_file(raw.settings_file, "googledrive")
        if len(raw.args) != len(raw.operation):
            raise _wrong(f"{len(raw.operation)} operations have {len(raw.args)} args", "$.parameters.args")
        pairs = zip(raw.operation, raw.args, strict=True)
        return GoogleDriveParameters(raw.settings_file, tuple(_operation(i, *pair) for i, pair in enumerate(pairs)))

    async def run(self, context: StepContext, parameters: object) -> None:
        """Carry the operations out in order; raises `SetupFailed`."""
        assert isinstance(parameters, GoogleDriveParameters)
        name, operations = parameters.settings_file, parameters.operations
        credentials = await trio.to_thread.run_sync(read_credentials, context.accounts, name)
        # All files first: one that is not there must not leave the account half done.
        urls = dict.fromkeys(x.url for x in operations if isinstance(x, Upload))
        files = {url: await context.fetch(url) for url in urls}
        problem = DriveError(f"the operations took longer than {LIMIT_S} s")
        done = 0
        with trio.move_on_after(LIMIT_S):
            try:
                async with open_drive(context.accounts.google_api, credentials) as drive:
                    for operation in operations:
                        await _carry_out(drive, operation, files)
                        done += 1
                return
            except DriveError as e:
                problem = e
        raise failure(name, str(problem), problem.hint, operations_done=done)


async def _carry_out(drive: Drive, operation: Operation, files: Mapping[str, bytes]) -> None:
    if isinstance(operation, Delete):
        narrowed = f"( {operation.query} ) and " if operation.query.strip() else ""
        # Both before anything is deleted, and files first, as in OSWorld.
        found = [*await drive.find(f"{narrowed}mimeType != '{FOLDER}'")]
        found += await drive.find(f"{narrowed}mimeType = '{FOLDER}'")
        for file in found:
            await drive.remove(file, trash=bool(operation.trash))
    elif isinstance(operation, MakeFolders):
        await drive.make_folders(operation.path)
    else:
        parent = await drive.make_folders(operation.path[:-1])
        await drive.upload(operation.path[-1], parent, files[operation.url])


def _operation(index: int, name: str, args: Mapping[str, Any]) -> Operation:
    if name not in _OPERATIONS:
        known = ", ".join(_OPERATIONS)
        raise _wrong(f"operation {index} is {name!r}; known are {known}", f"$.parameters.operation[{index}]")
    place = f"$.parameters.args[{index}]"
    try:
        found: Operation = structure(args, _OPERATIONS[name], "googledrive")
    except ConfigError as e:
        faults: Sequence[str] = [x.replace("$.parameters", place) for x in e.facts["faults"]]
        raise ConfigError(e.message.replace("$.parameters", place), path=place, faults=faults) from e
    if not isinstance(found, Delete) and not (found.path and all(x.strip() for x in found.path)):
        raise _wrong(f"path of operation {index} is {list(found.path)!r}", f"{place}.path")
    return found


def _wrong(fault: str, path: str) -> ConfigError:
    return ConfigError(
        f"the parameters of a 'googledrive' step are wrong: {fault}", path=path, faults=[f"{fault} @ {path}"]
    )


def _factory() -> Step:
    return GoogleDrive()


@hookimpl
def drums_register_setup_steps(register: RegisterStep) -> None:
    """The `googledrive` step."""
    register("googledrive", _factory)
