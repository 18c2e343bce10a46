"""What a process of the spawner does after the fork: it becomes the user's, and then does its job.

A job is a JSON object: `op` and the parameters of the function below that carries its name. It comes through a memory
file that only this process reads, so that the spawner itself never holds what it says.
"""

import atexit
import builtins
import contextlib
import errno
import io
import json
import os
import shutil
import signal
import site
import socket
import stat
import sys
import threading
import traceback

from guest import kernel, windows
from guest.identity import ENVIRONMENT, GROUPS, HOME, USER_GID, USER_UID

_CHUNK = 1 << 20
# No program can be run by that name: a fact about the desktop, no failure to ask it.
_NO_PROGRAM = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC, errno.ELOOP, errno.ENAMETOOLONG)


class Refused(Exception):
    """The job cannot be done as asked; `kind` is one of absent, unsuitable, failed."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind


def main(descriptors):
    """Runs in the forked process and never returns.

    Args:
        descriptors: job, standard output, standard error, status socket and, for some jobs, a file of data.
    """
    code = 126
    try:
        code = _main(*descriptors)
    except BaseException:  # noqa: BLE001 - whatever it is, this process must not fall back into the spawner's loop
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _main(job_fd, output_fd, error_fd, status_fd, data_fd=None):
    os.setsid()
    signal.set_wakeup_fd(-1)
    # Python ignores the last two, which programs would inherit.
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDWR)
    for source, target in ((null, 0), (output_fd, 1), (error_fd, 2)):
        os.dup2(source, target)
    _close_all_but({0, 1, 2, job_fd, status_fd, data_fd})
    kernel.become(USER_UID, USER_GID, GROUPS)
    # socket.recv_fds ignores its flags: without this the user's programs could answer in the spawner's name.
    os.set_inheritable(status_fd, False)
    status = socket.socket(fileno=status_fd)
    try:
        os.umask(0o022)
        os.environ.clear()
        os.environ.update(ENVIRONMENT)
        os.chdir(HOME if os.path.isdir(HOME) else "/")
        with open(job_fd, "rb") as file:
            job = json.load(file)
        return _OPERATIONS[job.pop("op")](status, data_fd, **job)
    except Refused as refusal:
        _tell(status, refusal.kind, str(refusal))
    except OSError as error:
        _tell(status, "failed", str(error))
    return 127


def _close_all_but(kept):
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            # The folder's own descriptor is in the list, and closed by now.
            with contextlib.suppress(OSError):
                os.close(int(name))


def _tell(status, kind, message):
    with contextlib.suppress(OSError):
        status.send(json.dumps({"kind": kind, "message": message[:4000]}).encode())


# --- commands ---


def _exec(_status, _data, argv):
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        raise Refused(*_of_program(error, argv)) from error


def _of_program(error, argv):
    """The error's kind, and its text with the program that was asked for, and not the last place that was looked at."""
    kind = "absent" if error.errno in _NO_PROGRAM else "failed"
    return kind, str(OSError(error.errno, error.strerror, argv[0]))


def _launch(_status, _data, argv):
    """Starts a program that outlives this process, and is pid 1's child afterwards."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.setsid()
            os.dup2(0, 1)
            os.dup2(0, 2)
            os.execvpe(argv[0], argv, os.environ)
        except OSError as error:
            os.write(writer, json.dumps(_of_program(error, argv)).encode())
        finally:
            os._exit(127)
    os.close(writer)
    # The pipe closes by itself when the program starts.
    with open(reader, "rb") as file:
        failure = file.read()
    if failure:
        raise Refused(*json.loads(failure))
    return 0


def _open(status, data, path):
    """Starts what shows a file, or a program by its name; prints what it took the path for."""
    target = os.path.join(HOME, _expand(path))
    if os.path.exists(target):
        told = {"path": target, "name": os.path.basename(target.rstrip("/"))}
        argv = ["xdg-open", target]
    else:
        program = shutil.which(path)
        if program is None:
            raise Refused("absent", f"Application/file not found: {path}")
        told = {"path": "", "name": os.path.basename(path)}
        argv = [program]
    os.write(1, json.dumps(told).encode())
    return _launch(status, data, argv)


def _script(_status, _data, script, working_dir):
    """A script by bash, whose errors go where its output goes. It is in memory alone: a script may be long."""
    if working_dir is not None:
        try:
            os.chdir(_expand(working_dir))
        except OSError as error:
            raise Refused("unsuitable", f"Working directory does not exist: {working_dir}") from error
    memory = os.memfd_create("script", 0)
    with open(memory, "wb", closefd=False) as file:
        file.write(script.encode("utf-8", "surrogateescape"))
    os.dup2(1, 2)
    # A new open file, at its beginning. The program inherits the memory's descriptor: /proc/self leads to it.
    argv = ["bash", f"/proc/self/fd/{memory}"]
    os.execve("/bin/bash", argv, os.environ)


def _windows(_status, _data):
    """Prints the desktop's windows, as JSON."""
    try:
        found = windows.listed()
    except windows.DisplayRefused as error:
        raise Refused("failed", str(error)) from error
    with open(1, "w", encoding="utf-8", errors="replace", closefd=False) as output:
        json.dump(found, output)
    return 0


def _python(status, _data, code):
    """Runs code as `python -c` would, in this interpreter, which has most modules loaded already."""
    status.close()
    # As after an exec: the agent's own programs may be looked at by the agent.
    kernel.set_dumpable(True)
    for name in [name for name in sys.modules if name == "guest" or name.startswith("guest.")]:
        del sys.modules[name]
    sys.path[:] = ["", *(path for path in sys.path if path != "/opt/drums"), site.getusersitepackages()]
    sys.argv = ["-c"]
    sys.stdin = open(0)  # noqa: SIM115 - the interpreter's own, open until it ends
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "surrogateescape", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
    main_module = sys.modules["__main__"] = type(sys)("__main__")
    main_module.__builtins__ = builtins
    result = 0
    try:
        exec(compile(code, "<string>", "exec"), main_module.__dict__)  # noqa: S102 - what the job is
    except SystemExit as stop:
        result = _exit_code(stop.code)
    except BaseException as error:  # noqa: BLE001 - the interpreter's own last resort is like it
        # The frames of this file are no part of what the code's author wants to see.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, trace)
        result = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    return result


def _exit_code(value):
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1


# --- files ---


def _expand(path):
    if not path or "\0" in path:
        raise Refused("unsuitable", f"{path!r} is not a path")
    return os.path.expandvars(os.path.expanduser(path))


def _open_file(status, _data, path):
    """Opens a regular file and hands over its descriptor."""
    path = _expand(path)
    try:
        # Without O_NONBLOCK a named pipe would hold the request until somebody writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Refused("absent", f"{path!r} does not exist") from error
    except OSError as error:
        # Of the user's own making, and so a fact about the desktop, no failure to ask it.
        if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO):
            raise Refused("unsuitable", f"{path!r} cannot be read: {error.strerror}") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise Refused("unsuitable", f"{path!r} is not a regular file")
    socket.send_fds(status, [json.dumps({"kind": "opened", "name": os.path.basename(path)}).encode()], [descriptor])
    return 0


def _write_file(_status, data_fd, path):
    """Writes the data file's content to a path whose parents it makes.

    An existing file is written over in place, as OSWorld's server does: its mode and its links stay.
    """
    path = os.path.join(HOME, _expand(path))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise Refused("unsuitable", f"{path!r} is not a regular file")
    os.ftruncate(descriptor, 0)
    while chunk := os.read(data_fd, _CHUNK):
        view = memoryview(chunk)
        while view:
            view = view[os.write(descriptor, view) :]
    os.close(descriptor)
    return 0


def _list_directory(_status, _data, path):
    """Writes the tree below a folder to standard output, as JSON."""
    path = _expand(path)
    if not os.path.isdir(path):
        raise Refused("unsuitable", f"{path!r} is not a folder")
    with open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False) as output:
        json.dump(_tree(path, os.path.basename(path.rstrip("/"))), output)
    return 0


def _tree(path, name):
    """Files and folders below a path; links to folders are named and not followed."""
    children = []
    with contextlib.suppress(PermissionError), os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                children.append(_tree(entry.path, entry.name))
            else:
                children.append({"type": "file", "name": entry.name})
    return {"type": "directory", "name": name, "children": children}


_OPERATIONS = {
    "exec": _exec,
    "launch": _launch,
    "open": _open,
    "script": _script,
    "windows": _windows,
    "python": _python,
    "open_file": _open_file,
    "write_file": _write_file,
    "list_directory": _list_directory,
}
