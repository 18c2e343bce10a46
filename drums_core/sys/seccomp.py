"""The seccomp filter of desktops and workers, as classic BPF.

A desktop's filter refuses what CRIU cannot dump or a network namespace does not contain: new user namespaces
(their children would nest), io_uring, AF_VSOCK sockets and bpf; and key rings, which no namespace holds: desktops see
each other's keys there. Sources: seccomp(2), keyrings(7), linux/filter.h, `struct seccomp_data` (nr at 0, arch at 4,
args[i] at 16 + 8 i).
"""

from __future__ import annotations

import errno
import struct

_AUDIT_ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_CLONE_NEWUSER = 0x10000000
_AF_VSOCK = 40
_NR = {"socket": 41, "clone": 56, "unshare": 272, "socketpair": 53, "clone3": 435}
_IO_URING = (425, 426, 427)
_FORBIDDEN = (321, 248, 249, 250)  # bpf; add_key, request_key, keyctl
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF0000
_NR_OFFSET, _ARCH_OFFSET, _ARG0_OFFSET = 0, 4, 16


def _instruction(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, jump_true, jump_false, k)


def _refuse(number: int) -> bytes:
    return _instruction(_RETURN, 0x00050000 | number)


def desktop_filter() -> bytes:
    """The filter that every process of a desktop has, root included."""
    out = [
        _instruction(_LOAD, _ARCH_OFFSET),
        _instruction(_JEQ, _AUDIT_ARCH_X86_64, 1, 0),
        _refuse(errno.EPERM),  # 32-bit calls have other numbers: none of the rules below would see them
        _instruction(_LOAD, _NR_OFFSET),
        _instruction(_JGE, _X32_BIT, 0, 1),
        _refuse(errno.EPERM),
        # ENOSYS makes the C library fall back to clone, whose flags a filter can read.
        _instruction(_JEQ, _NR["clone3"], 0, 1),
        _refuse(errno.ENOSYS),
    ]
    for number in _IO_URING:
        out += [_instruction(_JEQ, number, 0, 1), _refuse(errno.ENOSYS)]
    for number in _FORBIDDEN:
        out += [_instruction(_JEQ, number, 0, 1), _refuse(errno.EPERM)]
    for call in ("clone", "unshare"):
        out += [
            _instruction(_JEQ, _NR[call], 0, 4),
            _instruction(_LOAD, _ARG0_OFFSET),
            _instruction(_JSET, _CLONE_NEWUSER, 0, 1),
            _refuse(errno.EPERM),
            _instruction(_RETURN, _ALLOW),
        ]
    for call in ("socket", "socketpair"):
        out += [
            _instruction(_JEQ, _NR[call], 0, 4),
            _instruction(_LOAD, _ARG0_OFFSET),
            _instruction(_JEQ, _AF_VSOCK, 0, 1),
            _refuse(errno.EAFNOSUPPORT),
            _instruction(_RETURN, _ALLOW),
        ]
    out.append(_instruction(_RETURN, _ALLOW))
    return b"".join(out)
