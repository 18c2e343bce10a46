"""A desktop's life: create, step, verify, fork, save, reset, quarantine, release, close; and what an agent may not."""

from __future__ import annotations

import json
import os
import signal
import struct
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from desktops import Outcome, Played, play_on_hosts
from life_scenarios import SCENARIOS, crowded
from requires import requires

from drums.errors import (
    ImageUnsuitable,
)
from drums_core import desktop, load_config
from drums_core.boot import boot
from drums_core.opening import open_host
from drums_core.slot_state import SlotState
from drums_core.sys.cgroups import Cgroup

pytestmark = requires("root", "criu")


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    small = {"max_slots": 2, "allow_unlimited_ttl": False}
    yield play_on_hosts([(SCENARIOS, {}), ({"crowded": crowded}, small)])


def test_a_task_is_scored(played: Played) -> None:
    found = played["scored"]
    assert found["early"].value == "pending"
    assert found["scores"] == [0.0, 1.0, 0.0] and found["valid"] == [True] * 3
    assert len(found["episodes"]) == 2 and found["origin"] == "reset"
    assert found["png"].startswith(b"\x89PNG") and struct.unpack(">II", found["png"][16:24]) == (1920, 1080)
    good, bad, special = found["replies"]
    assert good["returncode"] == 0 and special["status"] == "success"
    assert bad["returncode"] != 0 and "of the agent" in bad["error"]
    assert {"episode", "task", "checker", "image_digest", "criu", "gates"} <= set(found["provenance"])


def test_states_and_what_they_refuse(played: Played) -> None:
    found = played["states"]
    assert "is up; 'release' needs it quarantined" in str(found["up"][0])
    for error in found["quarantined"]:
        assert "is quarantined (and another), so" in str(error) or "a broken page" in str(error)
    reward = found["quarantined verify"]
    assert reward.score is None and not reward.valid and reward.bad_gates == ("not_quarantined",)
    assert reward.checker_skipped.startswith("quarantined: ")
    assert found["strict"].facts["bad_gates"] == ["not_quarantined"]
    assert found["screenshot"].startswith(b"\x89PNG")
    assert found["state after release"] == (SlotState.DOWN, "released from quarantine")
    for error in found["down"]:
        assert "is down" in str(error)
    assert found["valid again"]
    for error in found["closed"]:
        assert isinstance(error, LookupError)


def test_the_states_in_their_order(played: Played) -> None:
    assert played["states"]["seen"] == ["starting", "up", "quarantined", "down", "down", "starting", "up", "closed"]


def test_one_operation_at_a_time(played: Played) -> None:
    found = played["busy"]
    assert all("busy with 'execute'" in str(error) for error in found["refused"])
    assert found["after"] < 1.5 and found["picture"].startswith(b"\x89PNG")
    assert 1.9 < found["closed"] < 5


def test_a_quarantine_waits_for_nothing(played: Played) -> None:
    found = played["quarantined while busy"]
    assert found["state"] is SlotState.QUARANTINED
    assert found["outcome"].bad_gates == {"not_quarantined"}


def test_a_quarantine_stops_a_verify_that_waits(played: Played) -> None:
    reward = played["quarantined while verified"]
    assert (reward.score, reward.checker_skipped) == (None, "quarantined: the page broke"), reward


@pytest.mark.parametrize("what", ["fork", "saved"])
def test_a_crash_that_an_agent_prepared_before_the_copy_is_still_the_agents(played: Played, what: str) -> None:
    found = played["inherited crash"][what]
    assert found.bad_gates == {"no_app_crash"} and found.causes == ["agent"], found.lines["no_app_crash"]


def test_forks_are_independent(played: Played) -> None:
    parent, a, b, grandchild, fourth = played["families"]["looks"]
    pid = parent[-1]
    assert parent == ["parent", "p", "p", "/home/user/only-p", pid]
    assert a == ["parent", "a", "a", "/home/user/only-a", pid]
    assert b == ["parent", "b", "b", "/home/user/only-b", pid]
    assert grandchild == fourth == a
    assert all(played["families"]["counted"]), "a process of the agent's runs on in each"


def test_forks_are_judged_and_scored_on_their_own(played: Played) -> None:
    found = played["families"]
    assert [x.score for x in found["rewards"]] == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert all(x.valid for x in found["rewards"])
    assert len(found["episodes"]) == 5
    assert found["origins"] == ["create", "fork", "fork", "fork", "fork"]


def test_a_reset_of_a_fork_goes_back_to_the_root_creates_checkpoint(played: Played) -> None:
    reward, files = played["families"]["reset"]
    assert (reward.score, reward.valid) == (0.0, True)
    assert files.split() == ["/home/user/.profile"]
    assert len(played["families"]["base"]) == 1
    assert played["families"]["forks left"] == []


def test_a_saved_desktop(played: Played) -> None:
    found = played["kept"]
    heir, anew = found["tasks"]
    assert heir == anew
    assert found["logs"] == ["setup\nagent\n", "setup\nagent\nsetup\n"], "set-up is inherited, unless a task is given"
    assert found["reward"] == (1.0, True)
    assert found["reset"] == ["setup\nagent\n", "reset"]
    assert (found["name"], "saved") in found["listed"]


def test_names_of_checkpoints(played: Played) -> None:
    found = played["kept"]
    assert "already there" in str(found["taken"])
    assert len(found["bad names"]) == 6 and all("is no name" in str(error) for error in found["bad names"])
    assert found["state"] is SlotState.UP
    assert all(found["name"] in str(error) for error in found["deleted"])


def test_creates_that_are_refused_start_nothing(played: Played) -> None:
    assert played["refused"]["new"] <= set(), played["refused"]["new"]
    assert all(str(error) for error in played["refused"]["errors"])
    unsuitable = [error for error in played["refused"]["errors"] if isinstance(error, ImageUnsuitable)]
    assert 'network="none"' in unsuitable[1].hint and "yet" in unsuitable[1].hint
    assert [error.facts["missing"] for error in unsuitable] == [["gimp"], ["network"]]
    assert unsuitable[0].facts["suitable"] == ["osworld"]


def test_a_desktop_without_task(played: Played) -> None:
    found = played["no task"]
    assert "has no task" in str(found["verify"]) and "at least 1" in str(found["nothing"])
    assert found["described"]["state"] == "up" and found["described"]["task"] is None
    assert json.dumps(found["described"])


def test_capacity(played: Played) -> None:
    found = played["crowded"]
    assert found["create"].facts["allowed"] == 2 and found["create"].facts["free"] == 0
    assert found["too many"].facts == {"wanted": 2, "free": 1, "allowed": 2}
    assert found["state"] is SlotState.UP and found["slots"] == 2 and found["valid"] == [True, True]
    assert set(found["started"]) == found["allowed"] and len(found["started"]) == 3


def test_a_lease_ends(played: Played) -> None:
    found = played["leased"]
    assert 0 < found["left"] <= 2 and found["reason"] == "its time to live ended"


@pytest.mark.parametrize("when", ["early", "later"])
def test_the_end_of_init(played: Played, when: str) -> None:
    found = played[f"init killed {when}"]
    assert found["state"] is SlotState.FAILED and "init ended" in found["reason"]
    result: Outcome = found["outcome"]
    assert result.verdict == "invalid" and "not_quarantined" in result.bad_gates
    assert any("init ended" in reason for reason in result.reasons)
    assert "is failed" in str(found["step"]) and found["again"]


def test_the_agent_cannot_touch_init_and_guest_server(played: Played) -> None:
    agent = played["powerless"]["agent"]
    assert agent["guests"] == 2
    for name, number in agent.items():
        if any(name.startswith(x) for x in ("kill", "stop", "trace", "read", "list", "pidfd", "write")):
            assert number in (1, 13), (name, number)  # EPERM, EACCES
    assert all(agent[f"http {route}"] in (401, 403) for route in ("/health", "/screenshot", "/run_python")), agent
    assert played["powerless"]["secrets"] == ""
    assert played["powerless"]["outcome"].verdict == "valid"


def test_the_agent_has_no_rights(played: Played) -> None:
    agent = played["powerless"]["agent"]
    for what in ("setuid", "userns by unshare", "mntns by unshare", "userns by clone", "bpf", "mount", "chroot"):
        assert agent[what] == 1, what
    assert agent["userns by clone3"] == agent["io_uring"] == 38  # ENOSYS
    assert agent["vsock"] == 97 and agent["raw socket"] == 1 and agent["core_pattern"] in (13, 30)
    assert agent["int80"] in (False, 1, 13)


def test_no_process_of_the_users_has_a_capability(played: Played) -> None:
    found = played["powerless"]
    users = [x for x in found["statuses"] if x["Uid"].split()[0] == "1001000"]
    assert len(users) >= 5
    for status in [*users, found["agent"]["status"]]:
        for what in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(status[what], 16) == 0, status
        assert status["NoNewPrivs"] == "1"
    assert all(x["Seccomp"] == "2" for x in found["statuses"]), "root's processes as well"


def test_provisioning_gives_root_to_the_operand_alone(played: Played) -> None:
    found = played["provisioned"]
    assert found["look"][:3] == ["root 755", "root 644", "user 755"]
    assert found["look"][3] == "0 /home/user /home/user/Desktop", "HOME and the working folder are kept"
    assert found["look"][4] == "1000" and found["look"][5].startswith("/run/drums-step-")
    assert found["roots file"].splitlines()[0] == "root"


def test_sudo_is_gone_after_the_step(played: Played) -> None:
    result = played["provisioned"]["sudo now"]
    assert result.returncode != 0 and result.output == "" and "not found" in result.error


def test_only_descendants_of_the_step_get_root(played: Played) -> None:
    found = played["provisioned"]
    assert found["intruder"].startswith(("answer b''", "refused [Errno 104]", "refused [Errno 32]")), found["intruder"]
    assert "No such file" in found["roots file"].splitlines()[1]
    assert found["outcome"].verdict == "valid" and found["child"].verdict == "valid", found["child"].reasons


def test_events(played: Played) -> None:
    seen = played["watched"]
    kinds = [x.kind for x in seen]
    assert kinds.index("episode_started") < kinds.index("verdict") < kinds.index("reward")
    verdicts = [x.data["verdict"] for x in seen if x.kind == "verdict"]
    assert verdicts[0] == "valid" and set(verdicts[1:]) == {"invalid"}
    assert [x.data["event"] for x in seen if x.kind == "desktop_event"][-1] == "Quarantined"
    crash = next(x for x in seen if x.kind == "verdict" and x.data["verdict"] == "invalid")
    assert crash.data["bad_gates"] == ["no_app_crash"] and crash.episode == seen[-2].episode


async def test_a_boot_that_fails_half_way_waits_for_its_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper has ended before it is moved out of the desktop's cgroup: the kernel refuses, and it is reaped."""
    helpers: list[trio.Process] = []
    evict = Cgroup.evict

    async def booted(*arguments: Any) -> tuple[trio.Process, int]:
        helper, pid = await boot(*arguments)
        helpers.append(helper)
        return helper, pid

    def evict_late(self: Cgroup, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        evict(self, pid)
        raise ProcessLookupError(3, "planted: the kernel of another version takes a zombie")

    monkeypatch.setattr(desktop, "boot", booted)
    monkeypatch.setattr(Cgroup, "evict", evict_late)
    async with open_host(load_config()) as host:
        booting = desktop.Desktop(host.services, f"d-{uuid.uuid4().hex[:12]}", host.config.limits)
        with pytest.raises(ProcessLookupError):
            await booting.start_booted(host.images.load(host.config.image).layer)
        await booting.stop()
    assert helpers[0]._proc.returncode == -signal.SIGKILL  # unasked: a question would reap it
    assert not booting.folder.exists()


def test_nothing_is_left(played: Played) -> None:
    assert played.left == []
