"""The reference: a program of its own in which OSWorld's unmodified `DesktopEnv` evaluates a desktop in place.

A request as JSON on standard input, an answer as JSON on the last line of standard output:

    {"root": folder of desktop_env, "ports": {"guest": n, "browser": n, "vlc": n}, "cache": folder,
     "task": the document, "files": {url: path}, "gave_up": b}
    {"score": 0.5}  or  {"raised": "AssertionError", "message": "..."}  or  {"broken": ["cv2 is not installed ..."]}

`evaluate`, getters, metrics and both controllers are OSWorld's own, and so are `DesktopEnv.__init__`, `_start_emulator`
and `_set_task_info`. Three things are given to them from outside:

- a provider, in the place of the function that makes providers, since there is no virtual machine to start: it names
  the ports on which the desktop's guest server, browser and VLC are reached. `object.__new__` would have left out the
  very code that makes the controllers;
- the files that would come from the internet, in OSWorld's own cache folder, which it looks in first;
- `StandInFinder` for packages that are not installed: importing them works, using one is told as `broken`.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

from drums_osworld.symbols import named
from drums_osworld.worker_job import BROKEN, StandInFinder, WorkerBroken, _phase, _plain


class _Provider:
    """A machine that runs already, and its manager."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._ports = ports

    def get_vm_path(self, **_: object) -> str:
        return "a desktop of drums"

    def start_emulator(self, *_: object) -> None:
        """It runs."""

    def get_ip_address(self, _: str) -> str:
        # Nothing listens on port 9, where VNC would be.
        return f"127.0.0.1:{self._ports['guest']}:{self._ports['browser']}:9:{self._ports['vlc']}"


def fill_cache(cache: Path, task: dict[str, Any], files: dict[str, str]) -> None:
    """Put files where `get_cloud_file` and the step `download` look before they fetch; the first of a name stays."""
    cache.mkdir(parents=True, exist_ok=True)
    evaluator = task["evaluator"]
    wanted: list[tuple[str, str]] = []
    for key in ("result", "expected"):
        for getter in named(evaluator.get(key) or []):
            if getter and getter.get("type") == "cloud_file":
                wanted += zip(named(getter["path"]), named(getter["dest"]), strict=False)
    for step in evaluator.get("postconfig", []):
        if step["type"] == "download":
            for file in step["parameters"]["files"]:
                name = f"{uuid.uuid5(uuid.NAMESPACE_URL, file['url'])}_{os.path.basename(file['path'])}"
                wanted.append((file["url"], name))
    for url, name in wanted:
        if url in files and not (cache / name).exists():
            shutil.copyfile(files[url], cache / name)


def evaluate(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    sys.path.insert(0, str(Path(request["root"]).parent))
    sys.meta_path.append(StandInFinder())
    _phase["importing"] = True
    osworld: Any = importlib.import_module("desktop_env.desktop_env")

    _phase["importing"] = False
    provider = _Provider(request["ports"])
    osworld.create_vm_manager_and_provider = lambda *_, **__: (provider, provider)
    task = request["task"]
    try:
        # "docker" is the kind of provider whose address carries ports.
        env: Any = osworld.DesktopEnv(provider_name="docker", cache_dir=request["cache"])
        env._set_task_info(task)
        fill_cache(Path(env.cache_dir), task, request["files"])
        env.setup_controller.reset_cache_dir(env.cache_dir)
        if request["gave_up"]:
            env.action_history.append("FAIL")
        answer: dict[str, Any] = {"score": _plain(env.evaluate())}
    except WorkerBroken:
        answer = {}
    except Exception as e:  # noqa: BLE001 - what OSWorld raises is the answer
        answer = {"raised": type(e).__name__, "message": str(e)[:500]}
    return {"broken": BROKEN[:5]} if BROKEN else answer


if __name__ == "__main__":
    answered = evaluate(json.load(sys.stdin))
    print("\n" + json.dumps(answered), flush=True)
