"""OSWorld's unmodified evaluation functions as a checker."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from drums.errors import CheckerError, ConfigError, SetupFailed
from drums_core.abc import CheckContext
from drums_core.config import HostConfig
from drums_core.model import Cause, Json, SetupStep, Task
from drums_core.task_files.obtain import obtain
from drums_osworld.files import compared_urls, lay_out
from drums_osworld.symbols import Symbols, locate, named, scan
from drums_osworld.task_file import structure_steps
from drums_verifiers.asking import ask_worker, run_postconfig
from drums_verifiers.grading import score_of
from drums_verifiers.worker import Kind
from drums_verifiers.workers import Workers

JOB = "drums_osworld.worker_job:run"
_GIVE_UP = "FAIL"
# What OSWorld's functions, and the packages that they use, import of the standard library.
_PRELOAD = (
    *("ast", "copy", "csv", "ctypes", "dataclasses", "datetime", "decimal", "difflib", "email.message", "email.parser"),
    *("gzip", "hashlib", "hmac", "html", "http.client", "http.cookiejar", "importlib.metadata", "importlib.resources"),
    *("inspect", "ipaddress", "logging", "mimetypes", "pathlib", "pickle", "pkgutil", "platform", "queue", "random"),
    *("secrets", "shutil", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "unicodedata"),
    *("urllib.request", "xml.etree.ElementTree", "xml.sax.saxutils", "zipfile"),
)
_MISSING = re.compile(r"(\w+)[^ ]* is not installed")
_EXTRAS = {
    "easyocr": "osworld-ocr",
    "librosa": "osworld-audio",
    "fastdtw": "osworld-audio",
    "acoustid": "osworld-audio",
}
_EXTRA = "osworld"
# These run a file that the agent wrote, in the worker itself: whoever writes it can have them say anything.
_RUN_THE_AGENTS_CODE = frozenset({"check_python_file_by_test_suite"})


class OSWorldChecker:
    """Scores with the functions that a task's evaluator names, in a worker of their own.

    Args:
        config: the host's; an OSWorld checkout in it that holds `desktop_env` comes before the installed package.
    """

    begins_early = True

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._workers = Workers(Kind(config.checker_timeout_s, preload=_PRELOAD), config.waiting_workers)

    def claims(self, evaluator: Mapping[str, Json]) -> bool:
        """All but an operator's own verifiers."""
        return evaluator.get("func") != "drums_verifier"

    def validate(self, task: Task) -> None:
        """Refuse what could not be evaluated.

        Raises:
            ConfigError: the evaluator's fields do not fit together.
            VerifierNotFound: it names a function that OSWorld's package does not define.
            PrerequisiteError: the package is not installed.
        """
        postconfig(task)
        if task.evaluator.get("func") != "infeasible":
            _check_shape(task)
            self._names(task, self._symbols())

    def provenance(self, task: Task) -> Mapping[str, Json]:
        """The functions, the checkout's commit, the package's version and the sha256 of each file that has one."""
        out: dict[str, Json] = {"checker": "osworld", "functions": named(task.evaluator.get("func"))}
        out["checkout"] = checkout_commit(self._config.osworld)
        if task.evaluator.get("func") == "infeasible":
            return out
        symbols = self._symbols()
        metrics, getters = self._names(task, symbols)
        files = [symbols.file("metrics", symbols.metric(x)) for x in metrics]
        files += [symbols.file("getters", symbols.getter(x)) for x in getters]
        out["desktop_env"] = locate(self._config.osworld)[1]
        out["files"] = symbols.hashes(files)
        if forgeable := sorted(_RUN_THE_AGENTS_CODE & set(metrics)):
            out["forgeable"] = forgeable
        return out

    async def _request(self, context: CheckContext) -> tuple[dict[str, Any], dict[str, Path]]:
        """What a worker is asked, and the files that it is shown."""
        evaluator = context.task.evaluator
        symbols = await trio.to_thread.run_sync(self._symbols)
        metrics, getters = self._names(context.task, symbols)
        compared = context.scratch / "compared"
        urls = compared_urls(evaluator)
        request = {
            "evaluator": evaluator,
            "fetched": await lay_out(self._config, urls, compared),
            "root": "/drums/files/desktop_env",
            "metrics": {x: _place(symbols.metric(x)) for x in metrics},
            "getters": {x: _place(symbols.getter(x)) for x in getters},
        }
        files = {"desktop_env": symbols.root, "compared": compared, **_kept(context.scratch)}
        return request, files

    async def prepare(self, task: Task) -> None:
        """Fetch what the task compares with; raises `SetupFailed`. A host that fetches nothing says so as it checks."""
        if self._config.fetches_files:
            for url in compared_urls(task.evaluator):
                try:
                    await obtain(self._config, url)
                except SetupFailed as e:
                    raise SetupFailed(
                        f"what the checker compares with: {e.message}", hint=e.hint, index=None, step_type="", **e.facts
                    ) from e

    async def serve(self) -> None:
        """Keep workers waiting, until cancelled."""
        await self._workers.serve()

    async def check(self, context: CheckContext) -> float:
        """The score, in OSWorld's order: `postconfig`, then what the agent said, then the functions."""
        evaluator = context.task.evaluator
        steps = postconfig(context.task)
        gave_up = context.last_action == _GIVE_UP
        if gave_up or evaluator.get("func") == "infeasible":
            await run_postconfig(context, steps)
            return 1.0 if gave_up and evaluator.get("func") == "infeasible" else 0.0

        async def postconfig_done() -> None:
            await run_postconfig(context, steps)
            _let_read(context.scratch)

        source = f"OSWorld's {evaluator['func']!r}"
        request, files = await self._request(context)
        answer, broken = await ask_worker(
            context,
            self._workers,
            request,
            function=JOB,
            source=source,
            files=files,
            ports=context.serve_ports,
            until=postconfig_done,
        )
        if broken:
            error = CheckerError(f"{source} could not be run: {broken[0]}", hint=_remedy(broken[0]), reasons=broken)
            if answer.get("hostile"):
                error.facts.update(cause=Cause.AGENT, evidence=broken)
            raise error
        return score_of(answer["score"], source=source)

    def _symbols(self) -> Symbols:
        return scan(locate(self._config.osworld)[0])

    def _names(self, task: Task, symbols: Symbols) -> tuple[list[str], list[str]]:
        """The metrics and getter types of an evaluator, each once; raises `VerifierNotFound` for one not there."""
        evaluator = task.evaluator
        metrics = list(dict.fromkeys(named(evaluator["func"])))
        kinds = [x["type"] for field in ("result", "expected") for x in named(evaluator.get(field) or []) if x]
        getters = list(dict.fromkeys(kinds))
        for metric in metrics:
            symbols.metric(metric)
        for getter in getters:
            symbols.getter(getter)
        return metrics, getters


def checkout_commit(folder: Path | None) -> str | None:
    """The commit of a git checkout, None where there is none; read from its files, without git."""
    for place in () if folder is None else (folder, folder.parent):
        git = place / ".git"
        try:
            head = (git / "HEAD").read_text(encoding="ascii").strip()
            name = head.removeprefix("ref: ")
            if name == head:
                return head
            if (git / name).is_file():
                return (git / name).read_text(encoding="ascii").strip()
            packed = (git / "packed-refs").read_text(encoding="ascii").splitlines()
            return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
        except (OSError, UnicodeDecodeError):
            continue
    return None


def _place(symbol: Any) -> dict[str, str]:
    return {"module": symbol.module, "attribute": symbol.attribute}


def _kept(scratch: Path) -> dict[str, Path]:
    """The folder that set-up steps leave the output of commands in (`keep_output`)."""
    cache = scratch / "cache"
    return {"cache": cache} if cache.is_dir() else {}


def _let_read(scratch: Path) -> None:
    """Let a worker read what is kept, once all of it is."""
    for cache in _kept(scratch).values():
        cache.chmod(0o755)
        for entry in os.scandir(cache):
            if stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                Path(entry.path).chmod(0o644)


def _remedy(reason: str) -> str:
    """The command that installs a package that a worker lacks; "" when that is not what it says."""
    found = _MISSING.match(reason)
    return f"pip install 'drums[{_EXTRAS.get(found[1], _EXTRA)}]'" if found else ""


def postconfig(task: Task) -> Sequence[SetupStep]:
    """The steps before an evaluation; raises `ConfigError`."""
    return structure_steps(task.evaluator.get("postconfig", []), f"$.evaluator.postconfig of task {task.id!r}")


def _check_shape(task: Task) -> None:
    evaluator = task.evaluator
    where = f"$.evaluator of task {task.id!r}"
    functions = evaluator.get("func")
    names = named(functions)
    several = isinstance(functions, list)
    if not names or not all(isinstance(x, str) and x for x in names):
        raise ConfigError(f"{where}.func is {functions!r:.100}, not a function's name or a list of them", path=where)
    if evaluator.get("conj", "and") not in ("and", "or"):
        raise ConfigError(f"{where}.conj is {evaluator['conj']!r}, allowed are 'and' and 'or'", path=where)
    if "result" not in evaluator:
        raise ConfigError(f"{where}.result is missing", path=where)
    for field in ("result", "expected", "options"):
        value = evaluator.get(field)
        if field not in evaluator or (field == "expected" and not value):
            continue
        if isinstance(value, list) != several or (several and len(named(value)) != len(names)):
            raise ConfigError(f"{where}.{field} does not fit {where}.func: one entry for each function", path=where)
        for x in named(value):
            empty = field == "options" and not x
            if not empty and (not isinstance(x, dict) or (field != "options" and not isinstance(x.get("type"), str))):
                raise ConfigError(f"{where}.{field} holds {x!r:.100}, which is no such description", path=where)
