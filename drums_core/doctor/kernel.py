"""Probes that try the kernel: namespaces, cgroup limits, process events, ptrace."""

from __future__ import annotations

import secrets
import socket
import struct
import subprocess
import time
from pathlib import Path

import attrs

from drums_core.doctor.finding import Finding
from drums_core.doctor.trial import run_trial
from drums_core.model import KernelLimits, Limits
from drums_core.sys import cgroups

# linux/connector.h and linux/cn_proc.h
_NETLINK_CONNECTOR, _CN_IDX_PROC, _CN_VAL_PROC = 11, 1, 1
_MCAST_LISTEN, _MCAST_IGNORE = 1, 2
_NLMSG_DONE, _EVENT_EXIT = 3, 0x80000000
_EVENT_TIMEOUT_S = 3.0


def user_namespace(state_dir: Path) -> Finding:
    """A user namespace with a desktop's id map."""
    answer = run_trial("user_namespace")
    remedy = "" if answer.ok else "sysctl -w user.max_user_namespaces=15000"
    return Finding("user_namespace", True, answer.ok, answer.detail, "root inside is uid 1000000 outside", remedy)


def network_namespace(state_dir: Path) -> Finding:
    """A network namespace whose loopback carries a connection."""
    answer = run_trial("network_namespace")
    remedy = "" if answer.ok else "sysctl -w user.max_net_namespaces=15000, or a kernel with CONFIG_NET_NS"
    return Finding("network_namespace", True, answer.ok, answer.detail, "TCP over its own lo", remedy)


def time_namespace(state_dir: Path) -> Finding:
    """A time namespace, so that a restored desktop's monotonic clock goes on."""
    answer = run_trial("time_namespace")
    remedy = "" if answer.ok else "use a kernel with CONFIG_TIME_NS"
    return Finding("time_namespace", True, answer.ok, answer.detail, "a time namespace of its own", remedy)


def ptrace(state_dir: Path) -> Finding:
    """Tracing a process, which CRIU and the repair of locks need."""
    answer = run_trial("ptrace")
    remedy = "" if answer.ok else "sysctl -w kernel.yama.ptrace_scope=1 (from 3 only a reboot leads back)"
    return Finding("ptrace", True, answer.ok, answer.detail, "a child that can be seized and stopped", remedy)


def cgroup_limits(state_dir: Path) -> Finding:
    """A desktop's cgroup: limits that read back equal, and a freezer."""
    wanted = "cpu, memory, swap and pids limits that read back equal, and a freezer"
    remedy = "boot with cgroup_enable=memory swapaccount=1, or mount the cgroup controllers"
    limits = Limits(cpus=0.5, memory_bytes=64 << 20, swap_bytes=0, pids=64)
    root = Path("/sys/fs/cgroup")
    had_parent = any((*root.glob(cgroups.PARENT), *root.glob(f"*/{cgroups.PARENT}")))
    try:
        version = cgroups.host_version()
        try:
            back = _limits_read_back(limits)
        finally:
            if not had_parent:
                cgroups.remove_parent()
    except OSError as error:
        return Finding("cgroup", True, False, str(error), wanted, remedy)
    observed = (
        f"version {version}: cpus {back.cpus}, memory {back.memory_bytes}, swap {back.swap_bytes} bytes, "
        f"pids {back.pids}"
    )
    equal = attrs.asdict(back) == attrs.asdict(limits)
    return Finding("cgroup", True, equal, observed, wanted, "" if equal else remedy)


def _limits_read_back(limits: Limits) -> KernelLimits:
    group = cgroups.create_cgroup(f"drums-doctor-{secrets.token_hex(4)}")
    try:
        group.write_limits(limits)
        group.freeze()
        group.thaw()
        return group.read_limits()
    finally:
        group.remove()


def proc_connector(state_dir: Path) -> Finding:
    """The kernel's process events: they tell of crashes and of the OOM killer without a gap."""
    wanted = "the exit event of a process that was just started"
    remedy = "use a kernel with CONFIG_PROC_EVENTS, in the host's own pid and network namespace"
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_CONNECTOR) as events:
            events.bind((0, _CN_IDX_PROC))
            events.send(_connector_message(_MCAST_LISTEN))
            try:
                observed = _wait_exit(events)
            finally:
                events.send(_connector_message(_MCAST_IGNORE))
    except OSError as error:
        return Finding("proc_connector", True, False, str(error), wanted, remedy)
    if observed is None:
        return Finding("proc_connector", True, False, f"no event within {_EVENT_TIMEOUT_S:.0f} s", wanted, remedy)
    return Finding("proc_connector", True, True, f"exit event after {observed:.1f} ms", wanted)


def _connector_message(operation: int) -> bytes:
    # struct cn_msg: idx, val, seq, ack, len, flags, then the operation.
    body = struct.pack("=IIIIHHI", _CN_IDX_PROC, _CN_VAL_PROC, 0, 0, 4, 0, operation)
    return struct.pack("=IHHII", 16 + len(body), _NLMSG_DONE, 0, 0, 0) + body


def _wait_exit(events: socket.socket) -> float | None:
    """Milliseconds from a process's start to its exit event."""
    began = time.monotonic()
    child = subprocess.Popen(["/bin/true"], stdin=subprocess.DEVNULL)
    child.wait()
    while (left := began + _EVENT_TIMEOUT_S - time.monotonic()) > 0:
        events.settimeout(left)
        try:
            message = events.recv(4096)
        except TimeoutError:
            return None
        # nlmsghdr 16, cn_msg 20, then struct proc_event: what, cpu, timestamp, process_pid.
        what, _cpu, _timestamp, pid = struct.unpack_from("=IIQI", message, 36)
        if what == _EVENT_EXIT and pid == child.pid:
            return (time.monotonic() - began) * 1000
    return None
