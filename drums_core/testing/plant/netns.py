"""A network that is not as it was, over netlink and by its sysctls.

Sources: rtnetlink(7), netlink(7), the kernel's `include/uapi/linux/netfilter/nf_tables.h`, `networking/ip-sysctl.rst`.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from drums_core.sys import enter
from drums_core.testing.plant.target import NotHere, Target

_REQUEST, _ACK, _CREATE_EXCL = 0x1, 0x4, 0x600
_NEWLINK, _NEWADDR, _DELADDR, _NEWROUTE, _DELROUTE, _NEWRULE, _DELRULE = 16, 20, 21, 24, 25, 32, 33
_IPV4, _IPV6 = socket.AF_INET, socket.AF_INET6
_LOOPBACK = 1
_LINK_KINDS = ("dummy", "veth", "bridge", "ifb", "sit", "vxlan")


def _attribute(kind: int, value: bytes) -> bytes:
    data = struct.pack("=HH", 4 + len(value), kind) + value
    return data + b"\0" * (-len(data) % 4)


def _number(value: int) -> bytes:
    return struct.pack("=I", value)


def _netlink(target: Target, protocol: int, messages: Sequence[tuple[int, int, bytes]]) -> None:
    """Send messages (type, flags, payload) in the desktop's network namespace, in one datagram; each ACK is read."""
    enter.setns(target.namespace("net"), "net")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as s:
        s.bind((0, 0))
        s.settimeout(5.0)
        data = b"".join(
            struct.pack("=IHHII", 16 + len(payload), kind, flags | _REQUEST, number, 0) + payload
            for number, (kind, flags, payload) in enumerate(messages, 1)
        )
        s.send(data)
        waiting = sum(1 for _, flags, _ in messages if flags & _ACK)
        while waiting:
            reply = s.recv(1 << 16)
            while len(reply) >= 20:
                length, kind, *_ = struct.unpack_from("=IHHII", reply)
                if kind == 2:  # NLMSG_ERROR
                    (number,) = struct.unpack_from("=i", reply, 16)
                    if number:
                        raise OSError(-number, f"netlink: {os.strerror(-number)}")
                    waiting -= 1
                reply = reply[(length + 3) & ~3 :]


def _route(kind: int, flags: int, destination: str, table: int) -> tuple[int, int, bytes]:
    family = _IPV6 if ":" in destination else _IPV4
    address = socket.inet_pton(family, destination)
    local = table == 255
    # The local ones are the kernel's; to remove one, any maker will do.
    maker, scope, what = (0, 254, 2) if local else (4, 253, 1)
    header = struct.pack("=BBBBBBBBI", family, len(address) * 8, 0, 0, table, maker, scope, what, 0)
    return kind, flags, header + _attribute(1, address) + _attribute(4, _number(_LOOPBACK))  # RTA_DST, RTA_OIF


def _address(kind: int, flags: int, text: str) -> tuple[int, int, bytes]:
    family = _IPV6 if ":" in text else _IPV4
    address = socket.inet_pton(family, text)
    header = struct.pack("=BBBBI", family, len(address) * 8, 0, 0, _LOOPBACK)
    return kind, flags, header + _attribute(2, address) + _attribute(1, address)  # IFA_LOCAL, IFA_ADDRESS


def _rule(kind: int, flags: int, priority: int, table: int) -> tuple[int, int, bytes]:
    header = struct.pack("=BBBBBBBBI", _IPV4, 0, 0, 0, table, 0, 0, 1, 0)
    return kind, flags, header + _attribute(6, _number(priority))  # FRA_PRIORITY


def change_network(target: Target, what: str) -> None:
    """Change one thing of the desktop's network.

    Args:
        what: `address`, `address6`, `route`, `route6`, `rule`, `link`: one more. `no-address`, `no-route`, `no-rule`:
            one less. `mtu`, `queue`: another one on the loopback.
    """
    make = _ACK | _CREATE_EXCL
    if what == "link":
        _add_link(target)
        return
    messages = {
        "address": lambda: _address(_NEWADDR, make, "10.99.0.1"),
        "address6": lambda: _address(_NEWADDR, make, "fd99::1"),
        "no-address": lambda: _address(_DELADDR, _ACK, "::1"),
        "route": lambda: _route(_NEWROUTE, make, "10.99.0.1", 254),
        "route6": lambda: _route(_NEWROUTE, make, "fd99::1", 254),
        "no-route": lambda: _route(_DELROUTE, _ACK, "::1", 255),
        "rule": lambda: _rule(_NEWRULE, make, 4711, 254),
        "no-rule": lambda: _rule(_DELRULE, _ACK, 32767, 253),
        "mtu": lambda: _link(_attribute(4, _number(1400))),  # IFLA_MTU
        "queue": lambda: _link(_attribute(13, _number(7))),  # IFLA_TXQLEN
    }
    _netlink(target, 0, [messages[what]()])


def _link(attributes: bytes) -> tuple[int, int, bytes]:
    return _NEWLINK, _ACK, struct.pack("=BxHiII", 0, 0, _LOOPBACK, 0, 0) + attributes


def _add_link(target: Target) -> None:
    for kind in _LINK_KINDS:
        info = _attribute(18, _attribute(1, kind.encode()))  # IFLA_LINKINFO, IFLA_INFO_KIND
        payload = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + _attribute(3, b"fault0\0") + info  # IFLA_IFNAME
        try:
            _netlink(target, 0, [(_NEWLINK, _ACK | _CREATE_EXCL, payload)])
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM):
                raise
        else:
            return
    raise NotHere(f"this kernel makes none of the links {', '.join(_LINK_KINDS)}")


def change_nftables(target: Target, what: str) -> None:
    """Add a `table` to nftables; or a table with a `chain`, or a `set`, in it."""
    edge = struct.pack("=BB", 0, 0) + struct.pack(">H", 10)
    header = struct.pack("=BB", 1, 0) + struct.pack(">H", 0)
    name = _attribute(1, b"drums_fault\0")
    make = _ACK | _CREATE_EXCL
    messages = [(16, 0, edge), ((10 << 8) | 0, make, header + name)]  # NFT_MSG_NEWTABLE
    if what == "chain":  # NFT_MSG_NEWCHAIN; NFTA_CHAIN_TABLE, NFTA_CHAIN_NAME
        messages.append(((10 << 8) | 3, make, header + name + _attribute(3, b"planted\0")))
    if what == "set":  # NFT_MSG_NEWSET; NFTA_SET_TABLE, _NAME, _KEY_TYPE, _KEY_LEN, _ID: all big-endian
        numbers = b"".join(_attribute(kind, struct.pack(">I", value)) for kind, value in ((4, 7), (5, 4), (10, 1)))
        messages.append(((10 << 8) | 9, make, header + name + _attribute(2, b"planted\0") + numbers))
    try:
        _netlink(target, 12, [*messages, (17, 0, edge)])
    except OSError as e:
        if e.errno in (errno.EPROTONOSUPPORT, errno.EOPNOTSUPP):
            raise NotHere(f"this kernel has no nftables: {e}") from e
        raise


def change_sysctl(target: Target, name: str) -> None:
    """Let a sysctl of the desktop's network be one more, or one less where it is 1."""
    enter.setns(target.namespace("net"), "net")
    path = Path("/proc/sys/net") / name  # of the namespace that the process is in
    if not path.exists():
        raise NotHere(f"this kernel has no sysctl net/{name}")
    value = int(path.read_text().split()[0])
    path.write_text(str(value - 1 if value == 1 else value + 1))
