"""OSWorld's own controllers, unmodified, driving a desktop; a program of its own: PORT FOLDER -> results as JSON.

What their package imports besides and the host lacks is stood in for, as in a checker's worker.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drums_osworld.symbols import locate
from drums_osworld.worker_job import StandInFinder, _phase, give_packages


@contextlib.contextmanager
def hurried() -> Iterator[list[str]]:
    """Meanwhile requests name a time-out of a second, which the controller's leave to the server; gives where to."""
    requests: Any = importlib.import_module("requests")
    original, sent = requests.post, list[str]()

    def post(url: str, **options: Any) -> Any:
        sent.append(url)
        return original(url, **options | {"data": json.dumps({**json.loads(options["data"]), "timeout": 1})})

    requests.post = post
    try:
        yield sent
    finally:
        requests.post = original


def main() -> None:
    """Call everything once, and print what came back."""
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    give_packages(str(locate(None)[0]))
    sys.meta_path.append(StandInFinder())
    _phase["importing"] = True
    from desktop_env.controllers.python import PythonController
    from desktop_env.controllers.setup import SetupController

    _phase["importing"] = False
    control: Any = PythonController("127.0.0.1", port)
    control.retry_times, control.retry_interval = 2, 0.5
    setup: Any = SetupController("127.0.0.1", port, cache_dir=str(folder), client_password="password")
    (folder / "letter.txt").write_text("written on the host\n")
    (folder / "picture.png").write_bytes(control.get_vm_wallpaper())
    results: dict[str, Any] = {}

    def call(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        value = function(*args, **options)
        results[name] = f"{len(value)} bytes of {value[:4]!r}" if isinstance(value, bytes) else value
        return value

    control.start_recording()
    steps: list[tuple[str, dict[str, Any]]] = [
        ("upload_file", {"files": [{"local_path": str(folder / "letter.txt"), "path": "/home/user/letter.txt"}]}),
        ("upload_file", {"files": [{"local_path": str(folder / "picture.png"), "path": "/home/user/own picture.png"}]}),
        ("change_wallpaper", {"path": "/home/user/own picture.png"}),
        ("execute", {"command": ["sh", "-c", "echo {SCREEN_WIDTH_HALF} > ~/half"], "stdout": "kept"}),
        ("command", {"command": "mkdir -p ~/tree/below && touch ~/tree/below/leaf", "shell": True}),
        ("launch", {"command": ["gnome-terminal"]}),
        (
            "execute_with_verification",
            {"command": ["true"], "verification": {"window_exists": "user@desktop"}, "max_wait_time": 60},
        ),
        ("open", {"path": "/home/user/letter.txt"}),
        ("activate_window", {"window_name": "letter.txt"}),
        ("close_window", {"window_name": "letter.txt"}),
        ("sleep", {"seconds": 1}),
        ("activate_window", {"window_name": "user@desktop"}),
    ]
    results["setup"] = setup.setup([{"type": kind, "parameters": parameters} for kind, parameters in steps])
    for action in (
        {"action_type": "TYPING", "parameters": {"text": "echo typed by the controller"}},
        {"action_type": "PRESS", "parameters": {"key": "enter"}},
        {"action_type": "MOVE_TO", "parameters": {"x": 700, "y": 500}},
    ):
        control.execute_action(action)
    call("python", control.execute_python_command, "pyautogui.sleep(1); print(*pyautogui.position())")
    call("script", control.run_python_script, "print(6 * 7)")
    call("failing script", control.run_python_script, "print('a'); raise SystemExit(7)")
    with hurried() as sent:
        call("slow script", control.run_python_script, "import time; time.sleep(60)")
    results["slow scripts"] = len(sent)
    call("bash", control.run_bash_script, "cat ~/half; exit 3")
    call("terminal", control.get_terminal_output)
    call("tree", control.get_vm_directory_tree, "/home/user/tree")
    call("screenshot", control.get_screenshot)
    call("file", control.get_file, "/home/user/letter.txt")
    call("no file", control.get_file, "/home/user/none")
    call("platform", control.get_vm_platform)
    call("screen", control.get_vm_screen_size)
    call("window", control.get_vm_window_size, "gnome-terminal-server")
    call("wallpaper", control.get_vm_wallpaper)
    call("desktop", control.get_vm_desktop_path)
    accessibility = control.get_accessibility_tree()
    results["accessibility"] = [name for name in ("gnome-shell", "gnome-terminal-server") if name in accessibility]
    control.end_recording(str(folder / "film.mp4"))
    results["film"] = (folder / "film.mp4").read_bytes()[4:8].decode("latin-1")
    results["kept"] = (folder / "kept").exists()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
