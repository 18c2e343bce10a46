"""Trying a verifier package from its folder, on its recorded end states, each function in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from drums.errors import ConfigError
from drums_core.testing.conformance import Check
from drums_core.testing.conformance_verifiers import check_verifier
from drums_core.testing.end_state import EndState, load_states
from drums_verifiers.trial import score_state
from drums_verifiers.verifier_job import find

LIMIT_S = 120.0
_OUTPUT_LIMIT = 16 << 20
_SHOWN = 1000
_START = "import json, sys; call = json.load(sys.stdin); sys.path[:0] = call['path']; "
_START += "from drums_verifiers.package_trial import run; run(call)"


@attrs.frozen
class Package:
    """A verifier package in its folder.

    Args:
        root: the folder, with `pyproject.toml` and `states/`.
        name: the distribution's; with its `version`.
        verifiers: `module` or `module:attribute` by the verifier's name.
        paths: folders that its modules lie in.
        states: the recorded end states.
    """

    root: Path
    name: str
    version: str
    verifiers: Mapping[str, str]
    paths: Sequence[Path]
    states: Sequence[EndState]

    def functions(self) -> list[str]:
        """Those that the states name."""
        return list(dict.fromkeys(state.function for state in self.states))


def open_package(root: Path) -> Package:
    """The package in a folder. Blocks.

    Raises:
        ConfigError: it is none, or has no verifier or no end state.
    """
    file = root / "pyproject.toml"
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
        project = document["project"]
        verifiers = {str(k): str(v) for k, v in project["entry-points"]["drums_verifier"].items()}
        name, version = str(project["name"]), str(project.get("version", "0"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{str(file)!r} cannot be read: {e}", path=str(file)) from e
    except (KeyError, AttributeError, TypeError) as e:
        raise ConfigError(
            f"{str(file)!r} registers no verifier",
            hint='[project.entry-points.drums_verifier] with NAME = "module"; `drums verifier new NAME` makes one',
            path=str(file),
        ) from e
    source = root / "src"
    paths = [source if source.is_dir() else root]
    return Package(root, name, version, verifiers, paths, load_states(root / "states"))


def try_package(package: Package, *, limit_s: float | None = None) -> list[Check]:
    """Every rule of the verifiers' suite. Blocks.

    Args:
        limit_s: seconds that one function's states may take together; `LIMIT_S` by default.
    """
    checks: list[Check] = []
    for function in package.functions():
        checks += _try(package, function, LIMIT_S if limit_s is None else limit_s)
    return checks


def _try(package: Package, function: str, limit_s: float) -> list[Check]:
    call = {
        "path": [str(x.resolve()) for x in package.paths],
        "verifiers": dict(package.verifiers),
        "function": function,
        "states": str((package.root / "states").resolve()),
    }
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as reply:
        process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[reply.fileno()],
            env={**os.environ, "DRUMS_TRIAL_FD": str(reply.fileno())},
            start_new_session=True,
        )
        fault = ""
        try:
            process.communicate(json.dumps(call).encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            fault = f"its states were not done within {limit_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        reply.seek(0)
        try:
            return [Check(**x) for x in json.loads(reply.read())]
        except ValueError:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _SHOWN))
            text = output.read().decode(errors="replace").strip()
            return [Check(f"{function}: it can be tried", fault or f"its process ended with {code}: {text}")]


def run(call: dict[str, Any]) -> None:
    """The process of one function: writes its checks as JSON."""
    fd = int(os.environ.pop("DRUMS_TRIAL_FD"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_OUTPUT_LIMIT, _OUTPUT_LIMIT))
    name = call["function"]
    try:
        function = _function(call["verifiers"], name)
        mine = [state for state in load_states(Path(call["states"])) if state.function == name]
        checks = check_verifier(lambda state: score_state(function, state), mine)
    except Exception as e:  # noqa: BLE001 - told as the fault
        checks = [Check(f"{name}: it can be loaded", f"{type(e).__name__}: {e}")]
    data = json.dumps([attrs.asdict(x) for x in checks]).encode()
    while data:
        data = data[os.write(fd, data) :]
    os._exit(0)  # threads that it left do not hold this up


def _function(verifiers: Mapping[str, str], name: str) -> Any:
    """The function, of the first verifier that has it."""
    for value in verifiers.values():
        module, _, attribute = value.partition(":")
        try:
            return find(module.strip(), attribute.strip(), name)
        except AttributeError:
            continue
    raise LookupError(f"no verifier of the package has a function {name!r}")
