"""The self-test on a kernel with version 2 cgroups alone: Debian's own, in a qemu guest that is thrown away.

    sudo .venv/bin/python tests/v2_guest.py [--clean 2] [--minutes 60] [GATE]...

A host has its controllers either on version 1 or on version 2 (cgroups(7)), so a host with version 1 can try version 2
only with another kernel. The guest has a small Debian, this checkout with its environment, and the CRIU and image of
the host's state folder. It is emulated in software and some twenty times slower than the host. Exit code 1 on a miss or
a false alarm.

Needs `./run setup`, and `apt-get install --no-install-recommends qemu-system-x86`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drums_core.config import load_config

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = ("linux-image-cloud-amd64", "initramfs-tools", "iproute2", "perl", "python3", "procps", "mmdebstrap")
PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs"}
DISK, ANSWER = 8 << 30, 8 << 20
MEMORY_MB = 3072
_INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DRUMS_STATE_DIR={state}
mount -t proc proc /proc; mount -t sysfs sys /sys; mountpoint -q /dev || mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
for where in /dev/shm /run /tmp; do mount -t tmpfs tmpfs $where; done
mount -t cgroup2 cgroup /sys/fs/cgroup
for module in overlay unix_diag tcp_diag udp_diag inet_diag packet_diag netlink_diag nf_tables dummy; do
    modprobe $module
done
ip link set lo up
echo 1024 >/proc/sys/fs/inotify/max_user_instances
ulimit -Hn 65536; ulimit -n 8192
cd {checkout}
.venv/bin/drums doctor
.venv/bin/drums gates selftest {arguments} --at-once 3 --json >/run/found
dd if=/run/found of=/dev/vdb conv=notrunc
sync; mount -o remount,ro /
echo o >/proc/sysrq-trigger
sleep 60
"""


def make_disk(folder: Path, arguments: Sequence[str]) -> None:
    """`vmlinuz`, `initrd.img` and `disk.img` in a folder.

    Raises:
        CalledProcessError: a program failed; it has said why.
    """
    state = load_config().state_dir
    root = folder / "root"
    include = f"--include={','.join(PACKAGES)}"
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", include, "bookworm", str(root)], check=True)
    for name in ("vmlinuz", "initrd.img"):
        shutil.copy(next((root / "boot").glob(f"{name}-*")), folder / name)
    wanted = [CHECKOUT, state / "criu", state / "images/minimal"]
    if Path(sys.base_prefix) != Path("/usr"):
        wanted.append(Path(sys.base_prefix))
    for path in wanted:
        target = root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", str(path), str(target)], check=True)
    init = root / "drums-guest"
    init.write_text(_INIT.format(state=state, checkout=CHECKOUT, arguments=shlex.join(arguments)))
    init.chmod(0o755)
    with (folder / "disk.img").open("wb") as f:
        f.truncate(DISK)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(folder / "disk.img")], check=True)


def run_guest(folder: Path, minutes: float) -> dict[str, Any]:
    """Boot it and return what the self-test printed.

    Raises:
        RuntimeError: it did not come to its end, or printed nothing.
    """
    answer = folder / "answer"
    with answer.open("wb") as f:
        f.truncate(ANSWER)
    command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(MEMORY_MB)]
    command += ["-nographic", "-no-reboot", "-nic", "none"]
    command += ["-kernel", str(folder / "vmlinuz"), "-initrd", str(folder / "initrd.img")]
    command += ["-append", "console=ttyS0 quiet panic=-1 root=/dev/vda rw init=/drums-guest"]
    for file in (folder / "disk.img", answer):
        command += ["-drive", f"file={file},format=raw,if=virtio"]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True, timeout=60 * minutes)
    except subprocess.SubprocessError as e:
        raise RuntimeError(f"the guest did not come to its end within {minutes:g} min: {e}") from e
    said = answer.read_bytes().rstrip(b"\0").decode()
    try:
        found: dict[str, Any] = json.loads(said)
    except ValueError as e:
        raise RuntimeError(f"the self-test printed no JSON in the guest: {said[:500]!r}") from e
    return found


def selftest_in_guest(gates: Sequence[str], *, clean: int, minutes: float) -> dict[str, Any]:
    """What `drums gates selftest --json` prints there; its folder is removed.

    Raises:
        RuntimeError: a program is missing, or as in `run_guest`.
    """
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        raise RuntimeError(f"missing: apt-get install --no-install-recommends {' '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="drums-guest-", dir="/var/tmp") as name:
        os.chmod(name, 0o755)  # mmdebstrap's helpers have other users
        make_disk(Path(name), [*gates, "--clean", str(clean)])
        shutil.rmtree(Path(name) / "root")
        return run_guest(Path(name), minutes)


def main() -> int:
    """Print what it found; 1 on a miss or a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gates", nargs="*", metavar="GATE", help="whose faults; of none, all")
    parser.add_argument("--clean", type=int, default=2, help="how many clean restores (2)")
    parser.add_argument("--minutes", type=float, default=60, help="after which the guest is given up (60)")
    options = parser.parse_args()
    found = selftest_in_guest(options.gates, clean=options.clean, minutes=options.minutes)
    print(json.dumps({key: value for key, value in found.items() if key != "faults"}, indent=1))
    return 1 if found["missed"] or found["false_alarms"] else 0


if __name__ == "__main__":
    sys.exit(main())
