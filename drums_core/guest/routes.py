"""The routes: OSWorld's dialect, with each job done as the desktop's user."""

import contextlib
import json
import os
import platform
import shlex
import stat
import time
import urllib.parse

from guest import VERSION, recording, windows, x11
from guest.jobs import JobError, JobTimeout
from guest.wire import HttpError, Reply, json_reply

_COMMAND_TIMEOUT_S = 120.0
# OSWorld's client waits 90 s, and runs code again when it gets no whole answer.
_PYTHON_TIMEOUT_S = 80.0
_SCRIPT_TIMEOUT_S = 100.0
_FILE_TIMEOUT_S = 60.0
_WINDOW_TIMEOUT_S = 10.0
_VERIFY_TIMEOUT_S = 5.0
_A11Y_TIMEOUT_S, _PATIENT_A11Y_TIMEOUT_S = 30.0, 75.0
_OPEN_TIMEOUT_S = 1800.0
_OPEN_POLL_S = 0.2
_A11Y = ["/usr/bin/python3", "-I", "/opt/drums/guest/a11y.py"]
_WALLPAPER = ["gsettings", "get", "org.gnome.desktop.background"]
_MAX_TIMEOUT_S = 3600.0
# The query of a request for an accessibility tree or a terminal's text of which nothing may be left out.
_WHOLE = "whole"
_STATUS_OF = {"absent": 404, "unsuitable": 400, "failed": 500}


class Routes:
    """What each path does. `dispatch` may be called by several threads at once.

    Args:
        jobs: the spawner's other end.
        slots: bounds how many commands run at once, so that a thread is always left for the short requests.
    """

    def __init__(self, jobs, slots):
        self._jobs = jobs
        self._slots = slots
        self._table = {
            "/health": ("GET", self._health),
            "/execute": ("POST", self._execute),
            "/setup/execute": ("POST", self._execute),
            "/execute_with_verification": ("POST", self._execute_with_verification),
            "/setup/execute_with_verification": ("POST", self._execute_with_verification),
            "/setup/launch": ("POST", self._launch),
            "/setup/open_file": ("POST", self._open_file),
            "/setup/activate_window": ("POST", self._activate_window),
            "/setup/close_window": ("POST", self._close_window),
            "/run_python": ("POST", self._run_python),
            "/run_bash_script": ("POST", self._run_bash_script),
            "/start_recording": ("POST", self._start_recording),
            "/end_recording": ("POST", self._end_recording),
            "/wallpaper": ("POST", self._wallpaper),
            "/setup/change_wallpaper": ("POST", self._change_wallpaper),
            "/setup/download_file": ("POST", self._download_file),
            "/screenshot": ("GET", self._screenshot),
            "/screen_size": ("POST", self._screen_size),
            "/cursor_position": ("GET", self._cursor_position),
            "/window_size": ("POST", self._window_size),
            "/windows": ("GET", self._windows),
            "/platform": ("GET", self._platform),
            "/terminal": ("GET", self._terminal),
            "/accessibility": ("GET", self._accessibility),
            "/desktop_path": ("POST", self._desktop_path),
            "/list_directory": ("POST", self._list_directory),
            "/file": ("POST", self._file),
            "/setup/upload": ("POST", self._upload),
        }

    def dispatch(self, request):
        """Answers a request.

        Raises:
            HttpError: with the status for it.
        """
        if request.path not in self._table:
            raise HttpError(404, f"there is no route {request.path!r}")
        method, handler = self._table[request.path]
        if request.method != method:
            raise HttpError(405, f"{request.path} takes {method}")
        try:
            return handler(request)
        except JobTimeout as error:
            raise HttpError(500, str(error), timed_out=True) from error
        except JobError as error:
            raise HttpError(_STATUS_OF.get(error.kind, 500), str(error)) from error
        except x11.DisplayError as error:
            raise HttpError(500, str(error)) from error

    # --- the server itself ---

    def _health(self, _request):
        return json_reply({"status": "ok", "version": VERSION})

    def _platform(self, _request):
        return Reply(platform.system().encode())

    # --- commands ---

    @contextlib.contextmanager
    def _slot(self):
        """A place for something that may take long."""
        if not self._slots.acquire(blocking=False):
            raise HttpError(503, "too many commands are running in this desktop")
        try:
            yield
        finally:
            self._slots.release()

    def _run_slow(self, op, **parameters):
        with self._slot():
            return self._jobs.run(op, **parameters)

    def _call(self, argv, timeout_s=_WINDOW_TIMEOUT_S):
        """Runs a program that a route needs. One that is missing is the image's fault: no fact about the desktop."""
        try:
            return self._jobs.run("exec", argv=argv, timeout_s=timeout_s)
        except JobError as error:
            if error.kind == "absent":
                raise JobError("failed", str(error)) from error
            raise

    def _execute(self, request):
        document = request.json()
        argv = _argv(document)
        timeout_s = _timeout(document, _COMMAND_TIMEOUT_S)
        # Agents' actions come as `python -c` with this beginning; the loaded interpreter runs them at once.
        if len(argv) == 3 and argv[:2] == ["python", "-c"] and argv[2].startswith("import pyautogui"):
            result = self._run_slow("python", code=argv[2], timeout_s=timeout_s)
        else:
            result = self._run_slow("exec", argv=argv, timeout_s=timeout_s)
        return json_reply({"status": "success", **_outcome(result)})

    def _execute_with_verification(self, request):
        """Runs a command, and waits until a window is there or another command succeeds."""
        document = request.json()
        wanted = document.get("verification", {})
        if not isinstance(wanted, dict):
            raise HttpError(400, "verification is not an object")
        limit_s = _timeout(document, 10.0, "max_wait_time")
        pause_s = _timeout(document, 1.0, "check_interval")
        result = self._run_slow("exec", argv=_argv(document), timeout_s=_COMMAND_TIMEOUT_S)
        if not wanted:
            return json_reply({"status": "success", **_outcome(result)})
        began = time.monotonic()
        while not self._verified(wanted):
            if time.monotonic() - began > limit_s:
                failed = {"status": "verification_failed", "message": f"not verified after {limit_s:g} seconds"}
                failed |= {"verification": "failed", "wait_time": limit_s}
                return json_reply(failed | _outcome(result), status=500)
            time.sleep(min(pause_s, limit_s))
        waited = {"verification": "passed", "wait_time": time.monotonic() - began}
        return json_reply({"status": "success", **_outcome(result), **waited})

    def _verified(self, wanted):
        title, command = wanted.get("window_exists"), wanted.get("command_success")
        if title:
            # As in OSWorld: a part of the line, whatever the case.
            listed = self._call(["wmctrl", "-l"])
            if listed.returncode != 0 or str(title).lower() not in _printed(listed.output).lower():
                return False
        if not command:
            return True
        # As in OSWorld, a line for the shell.
        argv = _argv({"command": command, "shell": isinstance(command, str)})
        try:
            return self._run_slow("exec", argv=argv, timeout_s=_VERIFY_TIMEOUT_S).returncode == 0
        except JobTimeout:
            return False
        except JobError as error:
            if error.kind == "absent":
                return False
            raise

    def _launch(self, request):
        argv = _argv(request.json())
        self._run_slow("launch", argv=argv, timeout_s=30.0)
        return Reply(f"{shlex.join(argv)} launched successfully".encode("utf-8", "replace"))

    def _run_python(self, request):
        document = request.json()
        code = document.get("code")
        nothing_ran = {"need_more": False, "output": None}
        if not isinstance(code, str) or not code:
            raise HttpError(400, "Code not supplied!", **nothing_ran)
        try:
            result = self._run_slow("python", code=code, timeout_s=_timeout(document, _PYTHON_TIMEOUT_S))
        except JobTimeout as error:
            raise HttpError(500, str(error), error="TimeoutExpired", timed_out=True, **nothing_ran) from error
        outcome = _outcome(result)
        if result.returncode != 0 and not outcome["error"]:
            outcome["error"] = f"Process exited with code {result.returncode}"
        told = {
            "status": "success" if result.returncode == 0 else "error",
            "message": "\n".join(text for text in (outcome["output"], outcome["error"]) if text),
            "need_more": False,
            "return_code": result.returncode,
        }
        return json_reply(told | outcome)

    def _run_bash_script(self, request):
        document = request.json()
        script, folder = document.get("script"), document.get("working_dir")
        nothing_ran = {"error": "", "returncode": -1}
        if not isinstance(script, str) or not script:
            raise HttpError(400, "Script not supplied!", output="Script not supplied!", **nothing_ran)
        if folder is not None and not isinstance(folder, str):
            raise HttpError(400, "working_dir is not a string", output="working_dir is not a string", **nothing_ran)
        try:
            result = self._run_slow(
                "script",
                script=script,
                working_dir=folder or None,
                timeout_s=_timeout(document, _SCRIPT_TIMEOUT_S),
            )
        except JobError as error:
            status = 400 if error.kind == "unsuitable" else 500
            raise HttpError(status, str(error), output=str(error), **nothing_ran) from error
        return json_reply({"status": "success" if result.returncode == 0 else "error", **_outcome(result)})

    # --- windows ---

    def _list_windows(self):
        result = self._jobs.run("windows", timeout_s=_WINDOW_TIMEOUT_S)
        if result.returncode != 0 or result.output_truncated:
            raise HttpError(500, f"the windows cannot be listed: {result.error[-300:].decode('utf-8', 'replace')}")
        return json.loads(result.output)

    def _windows(self, _request):
        return json_reply({"windows": self._list_windows()})

    def _open_file(self, request):
        document = request.json()
        path, title = document.get("path"), document.get("window_name")
        if not isinstance(path, str) or not path:
            raise HttpError(400, "Path not supplied!")
        if title is not None and not isinstance(title, str):
            raise HttpError(400, "window_name is not a string")
        timeout_s = _timeout(document, _OPEN_TIMEOUT_S, "timeout_seconds")
        deadline = time.monotonic() + timeout_s
        with self._slot():
            before = self._list_windows()
            told = json.loads(self._jobs.run("open", path=path, timeout_s=_FILE_TIMEOUT_S).output)
            name, target = (title, "") if title else (told["name"], told["path"])
            while True:
                window = windows.opened(self._list_windows(), before, name, target)
                if window is not None:
                    break
                if time.monotonic() > deadline:
                    raise HttpError(500, f"Failed to find window for {name!r} within {timeout_s:g} seconds.")
                time.sleep(_OPEN_POLL_S)
            self._call(["wmctrl", "-i", "-a", window["id"]])
        return Reply(b"File opened and window activated successfully")

    def _activate_window(self, request):
        self._tell_window(request, "a")
        return Reply(b"Window activated successfully")

    def _close_window(self, request):
        self._tell_window(request, "c")
        return Reply(b"Window closed successfully.")

    def _tell_window(self, request, action):
        """Has wmctrl act on a window by its title, or by its class.

        Raises:
            HttpError: 404 when there is no such window. OSWorld's Linux server says nothing then, its others this.
        """
        document = request.json()
        name = document.get("window_name")
        if not isinstance(name, str) or not name or "\0" in name:
            raise HttpError(400, "window_name required")
        options = "-" + ("x" if document.get("by_class") else "") + ("F" if document.get("strict") else "") + action
        result = self._call(["wmctrl", options, name])
        if result.returncode != 0:
            raise HttpError(404, f"Window {name} not found")

    # --- the screen ---

    def _screenshot(self, _request):
        return Reply(x11.screenshot_png(), content_type="image/png")

    def _screen_size(self, _request):
        with x11.Display() as display:
            width, height = display.size()
        return json_reply({"width": width, "height": height})

    def _cursor_position(self, _request):
        with x11.Display() as display:
            return json_reply(list(display.pointer()))

    def _window_size(self, request):
        wanted = _text(request.form(), "app_class_name").lower()
        for window in self._list_windows():
            if wanted in [part.lower() for part in window["class"]]:
                return json_reply({"width": window["width"], "height": window["height"]})
        # A fact about the desktop: 500 is for one that could not be asked.
        raise HttpError(404, f"no window has the class {wanted!r}")

    def _start_recording(self, _request):
        with x11.Display() as display:
            argv = recording.start_argv(*display.size())
        self._record(argv, "Recording is already in progress.")
        return json_reply({"status": "success", "message": "Started recording."})

    def _end_recording(self, _request):
        self._record(recording.end_argv(), "No recording in progress to stop.")
        return self._sent_file(recording.PATH)

    def _record(self, argv, refusal):
        with self._slot():
            result = self._call(argv, _FILE_TIMEOUT_S)
        if result.returncode == recording.REFUSED:
            raise HttpError(400, refusal)
        if result.returncode != 0:
            raise HttpError(500, f"the screen cannot be recorded: {result.error[-300:].decode('utf-8', 'replace')}")

    def _wallpaper(self, _request):
        result = self._call([*_WALLPAPER, "picture-uri"])
        if result.returncode != 0 and b"No such schema" not in result.error:
            raise HttpError(500, f"the wallpaper cannot be asked for: {result.error[-300:].decode('utf-8', 'replace')}")
        uri = result.output.decode("utf-8", "replace").strip().strip("'")
        # A path that is no URI shows nothing, but OSWorld takes it.
        path = urllib.parse.unquote(uri.removeprefix("file://")) if uri.startswith("file://") else uri
        if not path.startswith("/"):
            raise HttpError(404, "this desktop has no wallpaper")
        return self._sent_file(path)

    def _change_wallpaper(self, request):
        path = request.json().get("path")
        if not isinstance(path, str) or not path:
            raise HttpError(400, "Path not supplied!")
        result = self._call(["realpath", "-e", "--", _at_home(path)])
        if result.returncode != 0:
            raise HttpError(404, f"File not found: {path}")
        uri = "file://" + urllib.parse.quote(result.output.decode("utf-8", "surrogateescape").removesuffix("\n"))
        result = self._call(["gsettings", "set", *_WALLPAPER[2:], "picture-uri", uri])
        if result.returncode != 0:
            raise HttpError(500, f"the wallpaper is not changed: {result.error[-300:].decode('utf-8', 'replace')}")
        return Reply(b"Wallpaper changed successfully")

    def _terminal(self, request):
        # OSWorld reads the text of GNOME's terminal only; without that one the answer is null, and quick.
        found = self._call(["pgrep", "-x", "gnome-terminal-"])
        if found.returncode == 1:
            return json_reply({"output": None, "status": "success"})
        if found.returncode != 0:
            raise HttpError(500, f"the processes cannot be listed: {_printed(found.error[-300:])}")
        text, marks = self._ask_a11y("terminal", request)
        return json_reply({"output": json.loads(text), "status": "success", **marks})

    def _accessibility(self, request):
        tree, marks = self._ask_a11y("tree", request)
        return json_reply({"AT": tree.decode("utf-8", "replace"), **marks})

    def _ask_a11y(self, what, request):
        """What a11y.py prints, and a field about the programs that did not answer, when there are any."""
        whole = request.query == _WHOLE
        argv = [*_A11Y, what, *(["whole"] if whole else [])]
        with self._slot():
            result = self._call(argv, _PATIENT_A11Y_TIMEOUT_S if whole else _A11Y_TIMEOUT_S)
        if result.returncode != 0 or result.output_truncated:
            message = result.error[-500:].decode("utf-8", "replace").strip()
            raise HttpError(500, f"the accessibility tree cannot be read: {message}")
        head, _, answer = bytes(result.output).partition(b"\n")
        marks = json.loads(head)
        return answer, marks if marks["unanswered"] else {}

    # --- files ---

    def _desktop_path(self, _request):
        result = self._call(["xdg-user-dir", "DESKTOP"])
        path = result.output.decode("utf-8", "replace").strip()
        # Without a configuration of its own, xdg-user-dir names the home or its Desktop folder.
        return json_reply({"desktop_path": path if path.rstrip("/") != "/home/user" else "/home/user/Desktop"})

    def _list_directory(self, request):
        path = request.json().get("path")
        if not isinstance(path, str):
            raise HttpError(400, "path is not a string")
        result = self._jobs.run("list_directory", path=path, timeout_s=_FILE_TIMEOUT_S)
        if result.output_truncated:
            raise HttpError(400, f"the tree below {path!r} is too large")
        return json_reply({"directory_tree": json.loads(result.output.decode("utf-8", "surrogateescape"))})

    def _file(self, request):
        return self._sent_file(_text(request.form(), "file_path"))

    def _sent_file(self, path):
        result = self._jobs.run("open_file", path=path, timeout_s=_FILE_TIMEOUT_S)
        if result.descriptor is None:
            raise HttpError(500, f"{path!r} was not opened")
        if not stat.S_ISREG(os.fstat(result.descriptor).st_mode):
            os.close(result.descriptor)
            raise HttpError(400, f"{path!r} is not a regular file")
        name = urllib.parse.quote(result.name)
        disposition = f"attachment; filename*=UTF-8''{name}"
        return Reply(
            content_type="application/octet-stream",
            file=result.descriptor,
            headers={"Content-Disposition": disposition},
        )

    def _download_file(self, request):
        """Has the desktop itself fetch a file; what is there already stays when it cannot."""
        document = request.json()
        url, path = document.get("url"), document.get("path")
        if not isinstance(url, str) or not isinstance(path, str) or not url or not path:
            raise HttpError(400, "Path or URL not supplied!")
        target = _at_home(path)
        argv = ["curl", "-fsSL", "--retry", "2", "--create-dirs", "--proto", "=http,https", "-o", f"{target}.part"]
        with self._slot():
            result = self._call([*argv, "--", url], _COMMAND_TIMEOUT_S)
            if result.returncode == 0:
                result = self._call(["mv", "-f", "--", f"{target}.part", target])
        if result.returncode != 0:
            raise HttpError(500, f"{url!r} is not downloaded: {result.error[-300:].decode('utf-8', 'replace')}")
        return Reply(b"File downloaded successfully")

    def _upload(self, request):
        form = request.form()
        request.body = bytearray()
        path, data = _text(form, "file_path"), form.get("file_data")
        if data is None:
            raise HttpError(400, "file_data is missing")
        memory = os.memfd_create("upload")
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(data)
            os.lseek(memory, 0, os.SEEK_SET)
            self._jobs.run("write_file", path=path, timeout_s=_FILE_TIMEOUT_S, data_fd=memory)
        finally:
            os.close(memory)
        return Reply(b"File Uploaded")


def _argv(document):
    """The command line of a request, as OSWorld reads it."""
    command, shell = document.get("command", [] if document.get("shell") is None else ""), bool(document.get("shell"))
    if isinstance(command, str):
        try:
            argv = ["/bin/sh", "-c", command] if shell else shlex.split(command)
        except ValueError as error:
            raise HttpError(400, f"the command is malformed: {error}") from error
    elif isinstance(command, list) and all(isinstance(part, str) for part in command):
        argv = ["/bin/sh", "-c", *command] if shell else list(command)
    else:
        raise HttpError(400, "command is neither a string nor a list of strings")
    if not argv or not argv[0]:
        raise HttpError(400, "the command is empty")
    if any("\0" in part for part in argv):
        raise HttpError(400, "the command holds a NUL")
    return [_at_home(part) if part.startswith("~/") else part for part in argv]


def _at_home(path):
    """A path that may begin with `~/` or at the home folder, as a whole one."""
    return os.path.join("/home/user", path.removeprefix("~/"))


def _timeout(document, default_s, key="timeout"):
    value = document.get(key, default_s)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_TIMEOUT_S:
        raise HttpError(400, f"{key} is not a number of seconds up to {_MAX_TIMEOUT_S:g}")
    return float(value)


def _text(form, name):
    value = form.get(name, b"").decode("utf-8", "surrogateescape")
    if not value:
        raise HttpError(400, f"{name} is missing")
    return value


def _printed(stream):
    """A stream as text. The ends of lines become one kind, as in OSWorld, whose checkers compare whole outputs."""
    return stream.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def _outcome(result):
    """What a command printed and how it ended; the flags are there only when a stream was cut."""
    outcome = {
        "output": _printed(result.output),
        "error": _printed(result.error),
        "returncode": result.returncode,
    }
    if result.output_truncated:
        outcome["output_truncated"] = True
    if result.error_truncated:
        outcome["error_truncated"] = True
    return outcome
