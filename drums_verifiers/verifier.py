"""Operators' own verifiers as a checker: `{"func": "drums_verifier", "verifier": NAME, "function": FN, "options": {}}`.

NAME is an entry point of the group `drums_verifier`, in any installed package; FN a function of the module or class
that it names. It is called as `FN(desktop, task, **options)` in a worker of its own, with
`drums_verifiers.verifier_job.Desktop` and the task as a mapping, may be `async`, and returns a number from 0 to 1, a
bool, or an object with `score` and, if it likes, `evidence` and `notes`, which go into the reward's provenance.

Order and the agent's FAIL are OSWorld's: `postconfig` first, then a last action FAIL scores 0.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from drums.errors import CheckerError, ConfigError, VerifierNotFound
from drums_core.abc import CheckContext, Checker, Pinned
from drums_core.config import HostConfig
from drums_core.hookspecs import RegisterChecker, hookimpl
from drums_core.model import Json, PluginRecord, SetupStep, Task
from drums_verifiers import sandbox
from drums_verifiers.asking import ask_worker, refuse_unasked, run_postconfig
from drums_verifiers.grading import score_of
from drums_verifiers.installed import Installed, find, records, require_function
from drums_verifiers.pinning import Copies, Copy
from drums_verifiers.worker import Kind
from drums_verifiers.workers import Workers

FUNC = "drums_verifier"
JOB = "drums_verifiers.verifier_job:run"
_FIELDS = {"func", "verifier", "function", "options", "postconfig"}
_GIVE_UP = "FAIL"
# What the job and the view import, and what verifiers mostly do.
_PRELOAD = ("asyncio", "dataclasses", "datetime", "http.client", "inspect", "pathlib", "re", "urllib.parse")


class VerifierChecker:
    """Scores with a function of an installed package."""

    begins_early = True

    def __init__(self, config: HostConfig) -> None:
        self._workers = Workers(Kind(config.checker_timeout_s, preload=_PRELOAD), config.waiting_workers)
        self._copies = Copies()
        self._loaded: dict[tuple[str, str], str] = {}
        # Two at once would load each twice, and one that begins anew take the other's results away.
        self._looking = threading.Lock()

    def claims(self, evaluator: Mapping[str, Json]) -> bool:
        """Those that say so."""
        return evaluator.get("func") == FUNC

    def validate(self, task: Task) -> None:
        """Refuse what could not be called.

        Raises:
            ConfigError: a field is wrong, missing or unknown.
            VerifierNotFound: no such verifier or function is installed.
        """
        where = f"$.evaluator of task {task.id!r}"
        if unknown := sorted(set(task.evaluator) - _FIELDS):
            raise ConfigError(
                f"{where}: {unknown[0]!r} is no field of a {FUNC!r}", path=f"$.evaluator.{unknown[0]}", unknown=unknown
            )
        for key in ("verifier", "function"):
            value = task.evaluator.get(key)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{where}.{key} is {value!r:.80}, a name is needed", path=f"$.evaluator.{key}")
        options = task.evaluator.get("options", {})
        if not isinstance(options, dict):
            raise ConfigError(f"{where}.options is {options!r:.80}, an object is needed", path="$.evaluator.options")
        _postconfig(task)
        require_function(find(task.evaluator["verifier"]), task.evaluator["function"])

    def provenance(self, task: Task) -> Mapping[str, Json]:
        """The verifier and the function, the package with its version, and the sha256 of its files."""
        try:
            verifier = find(str(task.evaluator.get("verifier")))
            return _facts(task, verifier, verifier.sha256())
        except (VerifierNotFound, OSError) as e:  # it was removed meanwhile; the reward still says what was asked for
            return {**_named(task), "missing": str(e)}

    def pin(self, task: Task, folder: Path) -> Pinned:
        """A copy of the package, so that the episode is scored by what was installed when it began.

        What the package imports from other packages is not copied.

        Raises:
            VerifierNotFound: it is gone, or cannot be read.
        """
        verifier = find(str(task.evaluator.get("verifier")))
        try:
            copy = self._copies.of(verifier, folder)
        except OSError as e:
            raise VerifierNotFound(
                f"the verifier {verifier.name!r} cannot be copied: {e}", verifier=verifier.name
            ) from e
        return Pinned(_facts(task, verifier, copy.sha256), copy)

    def installed(self, *, anew: bool = False) -> Sequence[PluginRecord]:
        """The verifiers that are installed, each loaded in a process of its own, once per state of its files."""
        with self._looking:
            if anew:
                self._loaded.clear()
            return records(self._loaded)

    async def _request(self, context: CheckContext) -> tuple[dict[str, Any], dict[str, Path]]:
        """What a worker is asked, and the files that it is shown."""
        task = context.task
        if context.pinned is not None:
            copy = context.pinned.handle
            assert isinstance(copy, Copy)
            verifier, files, path = copy.verifier, {copy.place.name: copy.place}, [sandbox.FILES]
        else:
            try:
                verifier = await trio.to_thread.run_sync(find, task.evaluator["verifier"])
            except VerifierNotFound as e:
                raise CheckerError(f"{_source(task)} is gone: {e.message}") from e
            files, path = _shown(verifier)
        request = {
            "module": verifier.module,
            "attribute": verifier.attribute,
            "function": task.evaluator["function"],
            "options": task.evaluator.get("options", {}),
            "task": _document(task),
            "last_action": context.last_action,
            "path": path,
        }
        return request, files

    async def serve(self) -> None:
        """Keep workers waiting, until cancelled."""
        await self._workers.serve()

    async def check(self, context: CheckContext) -> float:
        """The score."""
        postconfig = partial(run_postconfig, context, _postconfig(context.task))
        if context.last_action == _GIVE_UP:
            await postconfig()
            return 0.0
        source = _source(context.task)
        request, files = await self._request(context)
        answer, broken = await ask_worker(
            context, self._workers, request, function=JOB, source=source, files=files, until=postconfig
        )
        refuse_unasked(broken)
        context.findings.update({key: answer[key] for key in ("evidence", "notes") if key in answer})
        return score_of(answer["score"], source=source)


def _source(task: Task) -> str:
    return f"the verifier {task.evaluator['verifier']}.{task.evaluator['function']}"


def _postconfig(task: Task) -> Sequence[SetupStep]:
    """The steps before the check; raises `ConfigError`."""
    steps = task.evaluator.get("postconfig", [])
    if not isinstance(steps, list):
        raise ConfigError(f"$.evaluator.postconfig of task {task.id!r} is no list", path="$.evaluator.postconfig")
    found = []
    for index, step in enumerate(steps):
        parameters = step.get("parameters", {}) if isinstance(step, dict) else None
        if not isinstance(step, dict) or not isinstance(step.get("type"), str) or not isinstance(parameters, dict):
            raise ConfigError(
                f"$.evaluator.postconfig[{index}] of task {task.id!r} is {step!r:.80}, a step with a type is needed",
                path=f"$.evaluator.postconfig[{index}]",
            )
        found.append(SetupStep(step["type"], parameters))
    return found


def _named(task: Task) -> dict[str, Json]:
    return {key: task.evaluator.get(key) for key in ("verifier", "function")}


def _facts(task: Task, verifier: Installed, sha256: str) -> dict[str, Json]:
    return {
        **_named(task),
        "distribution": verifier.distribution,
        "version": verifier.version,
        "module": verifier.module,
        "sha256": sha256,
    }


def _document(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "instruction": task.instruction,
        "domain": task.domain,
        "evaluator": dict(task.evaluator),
        "sha256": task.sha256,
    }


def _shown(verifier: Installed) -> tuple[dict[str, Path], list[str]]:
    """What a worker must be shown besides the installed packages, and where it looks for it."""
    if any(library.resolve() in verifier.place.resolve().parents for library in sandbox.library_paths()):
        return {}, []
    return {verifier.place.name: verifier.place}, [sandbox.FILES]


def _checker(config: HostConfig) -> Checker:
    return VerifierChecker(config)


@hookimpl
def drums_register_checkers(register: RegisterChecker) -> None:
    """Operators' own verifiers."""
    register("drums_verifier", _checker)
