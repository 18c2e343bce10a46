"""The job of a checker's worker: runs OSWorld's unmodified functions, inside the sandbox.

Standard library only. OSWorld's package initialisers import everything, and with it gigabytes of packages that few
functions use. So `desktop_env` and its inner packages are given as bare packages with a path, and only the modules
that define the task's functions are imported. A third-party package that is not installed is stood in for, so that
importing a module works; using such a stand-in raises `WorkerBroken`.

`WorkerBroken` is no `Exception`, because OSWorld's code turns those into a 0 nearly everywhere, and each is recorded
in `BROKEN` besides, because a bare `except` can swallow even this one: where that list is not empty, there is no score.

Evaluation follows `DesktopEnv.evaluate` of desktop-env 1.0.2, which scores: only a `FileNotFoundError` of a result's
getter is caught.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import os
import re
import shutil
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from types import ModuleType
from typing import Any

from drums_osworld.worker_browser import watch_playwright, watched

GUEST = ("127.0.0.1", 5000)
BROWSER_PORT, VLC_PORT = 9222, 8080
CACHE = "cache"
KEPT = "/drums/files/cache"
COMPARED = "/drums/files/compared"

_TYPED_EMPTY = re.compile(r"@a\S* (\[\]|\{\})")
# A field of the reply, which no text in it can look like: there, its quotes are escaped.
_CUT = re.compile(rb'(?<!\\)"(output|error)_truncated": true')
BROKEN: list[str] = []
HOSTILE: list[str] = []  # what the desktop said where only an agent can have put it
_phase = {"importing": False}


class WorkerBroken(BaseException):
    """The worker cannot do what a function asked of it: nothing about the desktop follows."""


def broken(reason: str) -> WorkerBroken:
    """Record that there can be no score, and make the exception that says so."""
    BROKEN.append(reason)
    return WorkerBroken(reason)


# Stand-ins for packages that are not installed.


class StandIn:
    """Something of a package that is not installed; inert while modules are imported, broken in use."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _part(self.__dict__["_name"], name)

    def __call__(self, *_: object, **__: object) -> Any:
        return _part(self._name, "()")

    def __getitem__(self, _: object) -> Any:
        return _part(self._name, "[]")

    def __or__(self, _: object) -> Any:
        return _part(self._name, "|")

    __ror__ = __or__

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()


def _unusable(self: StandIn, *_: object, **__: object) -> Any:
    raise broken(f"{self._name} is not installed")


_OPERATORS = (
    "bool",
    "iter",
    "next",
    "len",
    "contains",
    "enter",
    "exit",
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "floordiv",
    "mod",
    "pow",
    "neg",
    "abs",
    "lt",
    "le",
    "gt",
    "ge",
    "int",
    "float",
    "index",
    "setattr",
    "setitem",
    "delitem",
    "instancecheck",
    "subclasscheck",
    "fspath",
    "bytes",
)
for _name in _OPERATORS:
    setattr(StandIn, f"__{_name}__", _unusable)


def _part(owner: str, name: str) -> Any:
    whole = owner + name if name in ("()", "[]", "|") else f"{owner}.{name}"
    if not _phase["importing"]:
        raise broken(f"{owner.split('.')[0]} is not installed (used: {whole})")
    if name.endswith(("Error", "Exception", "Warning")):
        # `except x.SomeError` must be able to name it; nothing ever raises it.
        return type(name, (Exception,), {"__module__": owner})
    return StandIn(whole)


class _StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _part(self.__name__, name)


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: gives modules of `desktop_env` a stand-in for a package that no other finder has found.

    Other packages get their `ImportError`: many have optional dependencies.
    """

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A stand-in's specification, or None."""
        top = fullname.partition(".")[0]
        if top == "desktop_env" or (top not in self.packages and not self._asked_by_osworld()):
            return None
        if top != fullname and top not in self.packages:
            return None  # the package is there, this part of it is not: an honest ImportError
        if not _phase["importing"]:
            raise broken(f"{fullname} is not installed")
        self.packages.add(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    @staticmethod
    def _asked_by_osworld() -> bool:
        frame = sys._getframe(2)
        while frame and frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back  # type: ignore[assignment]
        return bool(frame) and str(frame.f_globals.get("__name__", "")).startswith("desktop_env.")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty module whose parts are stand-ins."""
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to execute."""


# OSWorld's modules.


def give_packages(root: str) -> None:
    """Make `desktop_env` and its inner packages importable without running their initialisers."""
    for name in ("", ".evaluators", ".evaluators.metrics", ".evaluators.getters", ".controllers"):
        module = ModuleType("desktop_env" + name)
        module.__path__ = [root + name.replace(".", "/")]
        sys.modules["desktop_env" + name] = module
        if name:
            parent, _, child = module.__name__.rpartition(".")
            setattr(sys.modules[parent], child, module)


def load(kind: str, symbols: Mapping[str, Mapping[str, str]]) -> dict[str, Callable[..., Any]]:
    """The functions that these symbols name; `kind` is `metrics` or `getters`."""
    out = {}
    for name, place in symbols.items():
        module = importlib.import_module(f"desktop_env.evaluators.{kind}.{place['module']}")
        # Before the builtin's, the module's own globals are looked up: what the desktop wrote is never run.
        vars(module)["eval"] = literal
        watch_playwright(module, broken)
        out[name] = getattr(module, place["attribute"])
    return out


def literal(text: str, *_: object) -> Any:
    """In the place of `eval`: the value of a literal, as programs print lists. Code gives no score.

    Raises:
        SyntaxError: as of `eval`, of what `gsettings` prints of an empty list: `@as []` (GVariant's text format).
        WorkerBroken: it is something else that is no literal.
    """
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as e:
        if isinstance(e, SyntaxError) and _TYPED_EMPTY.fullmatch(text.strip()):
            raise
        reason = f"the desktop answered with {text[:200]!r}, which is no literal, and OSWorld would run it"
        HOSTILE.append(reason)
        raise broken(reason) from e


def stay_offline() -> None:
    """Let `tldextract` use the list that it brings; it would ask for a newer one first, and do without."""
    module: Any = sys.modules.get("tldextract")
    if module is not None and not isinstance(module, _StandInModule):
        module.extract = module.TLDExtract(suffix_list_urls=(), cache_dir=None)


def controller() -> Any:
    """OSWorld's own controller, which speaks to the desktop's guest server."""
    module = importlib.import_module("desktop_env.controllers.python")
    return module.PythonController(GUEST[0], GUEST[1])


# What must never pass for evidence about the desktop.


def guard_network(fetched: Mapping[str, Mapping[str, str]]) -> None:
    """Record every connection that fails or that this worker cannot make.

    Args:
        fetched: URLs that are answered with a file of `COMPARED` (`file`), or with why the host has none (`cause`) of
            which URL, as it may be told (`url`).
    """

    reached = {GUEST, (GUEST[0], BROWSER_PORT), (GUEST[0], VLC_PORT)}

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(args[1], tuple) and args[1][:2] not in reached:
            raise broken(f"a connection to {args[1][0]}:{args[1][1]} was asked for, which a checker's worker has not")
        if event == "socket.getaddrinfo" and args[0] not in (GUEST[0], None):
            raise broken(f"the network address {args[0]!r} was asked for, which a checker's worker has not")

    sys.addaudithook(audit)
    requests = sys.modules.get("requests")
    if requests is None or isinstance(requests, _StandInModule):
        return
    original = requests.Session.send
    failure = requests.exceptions.RequestException

    # As requests itself spells them.
    known = {requests.Request("GET", url).prepare().url: entry for url, entry in fetched.items()}

    def send(self: Any, request: Any, **options: Any) -> Any:
        if request.method == "GET" and request.url in known:
            entry = known[request.url]
            if "file" not in entry:
                raise broken(f"{entry['url']!r}, which the task compares with, cannot be had: {entry['cause']}")
            response = requests.Response()
            response.status_code, response.url, response.request = 200, request.url, request
            response.raw = open(os.path.join(COMPARED, entry["file"]), "rb")  # noqa: SIM115 - requests closes it
            return response
        try:
            response = original(self, request, **options)
        except failure as e:
            raise broken(f"{request.method} {request.url} failed: {type(e).__name__}: {e}") from e
        if request.url == f"http://{GUEST[0]}:{GUEST[1]}/execute" and _CUT.search(response.content):
            # OSWorld's server passes on all of it: what a metric looks for may be in the rest.
            raise broken("a command printed more than the desktop's guest server passes on")
        if request.url.startswith(f"http://{GUEST[0]}:{VLC_PORT}/") and response.status_code != 200:
            # Its page is there or it is not: another program, or a password that is not the task's.
            raise broken(
                f"what listens on port {VLC_PORT} of the desktop answered {response.status_code}, as VLC does not"
            )
        return response

    requests.Session.send = send


class Env:
    """What OSWorld's getters use of a `DesktopEnv`."""

    vm_ip = GUEST[0]
    server_port = GUEST[1]
    chromium_port = BROWSER_PORT
    vlc_port = VLC_PORT
    vm_platform = "Linux"
    vm_machine = "x86_64"
    current_use_proxy = False

    def __init__(self, cache_dir: str, make_controller: Callable[[], Any]) -> None:
        self.cache_dir = cache_dir
        self.controller = make_controller()

    @property
    def vm_screen_size(self) -> Any:
        """As the guest says."""
        return self.controller.get_vm_screen_size()

    def __getattr__(self, name: str) -> Any:
        raise broken(f"a getter asked for env.{name}, which a checker's worker has not")


# Evaluation.


def evaluate(
    evaluator: Mapping[str, Any],
    env: Any,
    metrics: Mapping[str, Callable[..., Any]],
    getters: Mapping[str, Callable[..., Any]],
) -> Any:
    """The score as OSWorld computes it, unchecked.

    One function: its value. Several with `conj` "and": 0 as soon as one gives 0 or its result is not there, else the
    mean; with "or": 1 as soon as one gives exactly 1, else the greatest.
    """
    functions = evaluator["func"]
    expects = "expected" in evaluator and bool(evaluator["expected"])
    if isinstance(functions, str):
        options = evaluator.get("options", {})
        try:
            state = getters[evaluator["result"]["type"]](env, evaluator["result"])
        except FileNotFoundError:
            return 0
        if expects:
            return metrics[functions](
                state, getters[evaluator["expected"]["type"]](env, evaluator["expected"]), **options
            )
        return metrics[functions](state, **options)

    conjunction = evaluator.get("conj", "and")
    options = [x or {} for x in evaluator.get("options", [{}] * len(functions))]
    scores: list[Any] = []
    for i, name in enumerate(functions):
        result = evaluator["result"][i]
        try:
            state = getters[result["type"]](env, result)
        except FileNotFoundError:
            if conjunction == "and":
                return 0
            # With "or" OSWorld goes on with the state of the function before, and fails where there is none.
        if expects:
            expected = evaluator["expected"][i]
            score = metrics[name](state, getters[expected["type"]](env, expected), **options[i])
        else:
            score = metrics[name](state, **options[i])
        if conjunction == "and" and float(score) == 0.0:
            return 0
        if conjunction == "or" and float(score) == 1.0:
            return 1
        scores.append(score)
    return sum(scores) / len(scores) if conjunction == "and" else max(scores)


def _plain(value: Any) -> Any:
    """What JSON can carry of a value; numpy's scalars have `item`. The host judges it."""
    item = getattr(value, "item", None)
    value = item() if item else value
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)[:200]


def run(request: dict[str, Any]) -> Generator[None, None, dict[str, Any]]:
    """Evaluate a task; what its functions need is imported before there is a desktop to ask.

    Args:
        request: `evaluator`; `root`, the folder of `desktop_env`; `metrics` and `getters`, name -> `module` and
            `attribute`, of all functions that the evaluator names; `fetched`, as for `guard_network`.
    """
    sys.meta_path.append(StandInFinder())
    give_packages(request["root"])
    _phase["importing"] = True
    try:
        metrics = load("metrics", request["metrics"])
        getters = load("getters", request["getters"])
        importlib.import_module("desktop_env.controllers.python")
        stay_offline()
    finally:
        _phase["importing"] = False
    yield
    if os.path.isdir(KEPT):
        shutil.copytree(KEPT, CACHE)
    else:
        os.mkdir(CACHE)
    guard_network(request["fetched"])
    score: Any = None
    try:
        env = Env(os.path.abspath(CACHE), controller)
        getters = watched(getters, broken)
        # A copy: `rule_relativeTime` writes into its configuration.
        score = _plain(evaluate(copy.deepcopy(request["evaluator"]), env, metrics, getters))
    except WorkerBroken:
        pass  # it is in BROKEN
    return {"score": score, "broken": BROKEN[:20], "hostile": HOSTILE[:20]}
