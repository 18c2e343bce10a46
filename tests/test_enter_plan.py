"""Plans of privileged operations: built, described and refused without any privilege."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from requires import requires

from drums_core.boot import INIT_ARGV, NAMESPACES, boot_plan
from drums_core.sys import enter
from drums_core.sys.cgroups import Cgroup
from drums_core.sys.helper import Plan, helper_argv, plan_descriptor, run_helper
from drums_core.sys.seccomp import desktop_filter

CGROUP = Cgroup("d", {"memory": Path("/cg/m/d"), "cpu": Path("/cg/c/d"), "pids": Path("/cg/c/d")})
NOBODY = 65534


def boot() -> Plan:
    return boot_plan(Path("/slots/d/merged"), Path("/dev/of/all"), CGROUP, 7)


def run(plan: Plan, **options: Any) -> subprocess.CompletedProcess[str]:
    with plan_descriptor(plan) as fd:
        return subprocess.run(helper_argv(fd), pass_fds=[fd], capture_output=True, text=True, check=False, **options)


def test_boot_plan_is_json_of_known_operations() -> None:
    """It survives the way to the helper unchanged, and the helper knows every operation."""
    plan = boot()
    assert json.loads(json.dumps(plan)) == plan
    assert {operation for operation, *_ in plan} <= set(enter.OPERATIONS)


def test_boot_plan_in_order() -> None:
    """The order that the kernel and the promises need."""
    names = [operation for operation, *_ in boot()]

    def at(name: str) -> int:
        return names.index(name)

    assert names[-1] == "exec" and boot()[-1][1] == list(INIT_ARGV)
    # Its own cgroup before anything is made, so that nothing escapes it.
    assert at("cgroups") < at("userns") < at("ids") < at("unshare") < at("fork") < at("mount")
    # Nothing that is mounted spreads to the host.
    assert boot()[at("mount")] == ["mount", None, "/", None, ["rec", "private"]]
    assert max(i for i, name in enumerate(names) if name == "mount") < at("pivot_root")
    # Neither descriptors nor rights pass the exec.
    assert at("pivot_root") < at("stdio") < at("close_from") < at("seccomp") < at("exec")


def test_boot_plan_makes_every_namespace() -> None:
    """User, pid, mount, net, ipc, uts and time (DESIGN.md, 5); the cgroup is joined in each hierarchy once."""
    plan = boot()
    assert {"user" if name == "userns" else kind for name, *arguments in plan for kind in _made(name, arguments)} == {
        "user",
        *NAMESPACES,
    }
    assert set(NAMESPACES) == {"pid", "mnt", "net", "ipc", "uts", "time"}
    assert ["cgroups", ["/cg/m/d", "/cg/c/d"]] in plan
    assert ["seccomp", desktop_filter().hex()] in plan
    assert ["close_from", 3, []] in plan


def _made(name: str, arguments: list[Any]) -> list[str]:
    return ["user"] if name == "userns" else arguments[0] if name == "unshare" else []


def test_boot_plan_touches_the_given_places_alone() -> None:
    """Every mount and folder before the pivot lies in the desktop's own tree."""
    for name, *arguments in boot():
        if name == "mount" and arguments[1] != "/":
            assert arguments[1] == "/slots/d/merged" or arguments[1].startswith("/slots/d/merged/")
        if name == "mkdir":
            assert arguments[0].startswith("/slots/d/merged/")


def test_describe() -> None:
    """One operation a line, as a call; the whole plan, in order."""
    text = enter.describe([["setsid"], ["mount", None, "/", None, ["rec"]], ["exec", ["/bin/true"], {"A": "b"}]])
    assert text.splitlines() == ["setsid()", "mount(None, '/', None, ['rec'])", "exec(['/bin/true'], {'A': 'b'})"]
    assert len(enter.describe(boot()).splitlines()) == len(boot())


FAILURES = {
    "chdir": (["chdir", "/no/such/folder"], "chdir('/no/such/folder')", "No such file or directory"),
    "exec": (["exec", ["/no/such/program"], {}], "exec(['/no/such/program'], {})", "No such file or directory"),
    "setns": (["setns", 0, "net"], "setns(0, 'net')", "setns net: Invalid argument"),
    "cgroups": (["cgroups", ["/no/cgroup"]], "cgroups(['/no/cgroup'])", "No such file or directory"),
    "link_up": (["link_up", "nolink"], "link_up('nolink')", "No such device"),
    "symlink": (["symlink", "a", "/proc/x"], "symlink('a', '/proc/x')", ""),
    "mount": (["mount", "x", "/no/place", "tmpfs", []], "mount('x', '/no/place', 'tmpfs', [])", "mount x on /no/place"),
}


@pytest.mark.parametrize(("operation", "said", "why"), FAILURES.values(), ids=FAILURES)
def test_a_failed_operation_is_named(tmp_path: Path, operation: list[Any], said: str, why: str) -> None:
    """Exit code 125, the operation with its arguments on standard error, and nothing after it is carried out."""
    done = run([operation, ["write", str(tmp_path / "after"), "x", 0o600]])
    assert done.returncode == 125 and done.stdout == ""
    assert done.stderr.startswith(f"drums-enter: {said}: ") and why in done.stderr
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize(
    "operation",
    [
        ["no such operation"],
        ["chdir"],
        ["setns", 0, "no such kind"],
        ["mount", "a", "b", "c", ["no such flag"]],
        ["seccomp", "no hex"],
        ["rlimit", "NO_SUCH", 1, 1],
    ],
    ids=str,
)
def test_a_wrong_plan_is_named_as_well(tmp_path: Path, operation: list[Any]) -> None:
    """A mistake in a plan ends the helper in the same way, by name; the program is not run."""
    done = run([operation, ["write", str(tmp_path / "after"), "x", 0o600]])
    assert done.returncode == 125
    assert done.stderr.startswith(f"drums-enter: {operation[0]}(") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "after").exists()


@requires("root")
@pytest.mark.parametrize("operation", [["unshare", ["mnt"]], ["hostname", "planted"], ["ids", 0, 0, []]], ids=str)
def test_without_privilege(operation: list[Any]) -> None:
    """What the kernel refuses a user is named with the kernel's word."""
    done = run([["ids", NOBODY, NOBODY, []], operation])
    assert done.returncode == 125
    assert done.stderr.startswith(f"drums-enter: {operation[0]}(") and "not permitted" in done.stderr


def test_the_programs_exit_code_and_signal_are_passed_on() -> None:
    """Of the program itself, and through a fork: a signal is 128 and its number, as shells have it."""
    cases: list[tuple[Plan, int]] = [
        ([["exec", ["/bin/sh", "-c", "exit 7"], {}]], 7),
        ([["fork", None, True], ["exec", ["/bin/sh", "-c", "exit 7"], {}]], 7),
        ([["fork", None, True], ["exec", ["/bin/sh", "-c", "kill -9 $$"], {}]], 128 + 9),
    ]
    for plan, code in cases:
        assert run(plan).returncode == code


def test_descriptors_do_not_pass() -> None:
    """`close_from` leaves the program the three standard streams and what was to be kept."""
    read_fd, write_fd = os.pipe()
    code = "import os; print([fd for fd in range(256) if os.path.exists(f'/proc/self/fd/{fd}')])"
    try:
        with plan_descriptor([["close_from", 3, [write_fd]], ["exec", [sys.executable, "-I", "-c", code], {}]]) as fd:
            done = subprocess.run(
                helper_argv(fd), pass_fds=[fd, read_fd, write_fd], capture_output=True, text=True, check=True
            )
    finally:
        os.close(read_fd)
        os.close(write_fd)
    assert json.loads(done.stdout) == [0, 1, 2, write_fd]


async def test_run_helper_raises_what_the_helper_said() -> None:
    """The library's way: an OSError with the text, or the code where the caller wants to look itself."""
    plan: Plan = [["chdir", "/no/such/folder"]]
    with pytest.raises(OSError, match=r"helper ended with 125: drums-enter: chdir\('/no/such/folder'\)"):
        await run_helper(plan)
    code, output = await run_helper(plan, check=False)
    assert code == 125 and output.startswith(b"drums-enter: chdir")
    assert await run_helper([["exec", ["/bin/echo", "well"], {}]]) == (0, b"well\n")


def test_the_helper_needs_the_standard_library_alone() -> None:
    """It runs isolated and without site packages."""
    assert helper_argv(9) == [sys.executable, "-I", "-S", enter.__file__, "9"]
