"""The few calls that Python has no function for: prctl, capset and mallopt."""

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_M_ARENA_MAX = -8
_M_MMAP_THRESHOLD = -3

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result, call):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _prctl(option, value=0):
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def set_dumpable(dumpable):
    """Says whether processes of the same user may read this one's memory and trace it."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def give_memory_back():
    """Has the C library return large blocks to the kernel as they are freed, rather than keep some for each thread.

    A screenshot needs 30 MB for a moment; kept by eight threads, that would be in every checkpoint.
    """
    _libc.mallopt(_M_ARENA_MAX, 1)
    _libc.mallopt(_M_MMAP_THRESHOLD, 256 << 10)


def die_with_parent(signal_number):
    """Has the kernel send this signal when the parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def drop_capabilities():
    """Gives up every capability of this process for good, and any way to new ones."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, nothing), "capset")


def become(uid, gid, groups):
    """Turns this process into another user's, without capabilities.

    Raises:
        OSError: some of it failed; the process must not go on.
        PermissionError: the kernel does not confirm it.
    """
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    # Between two users that are not root the kernel leaves capabilities as they are.
    drop_capabilities()
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    held = (ctypes.c_uint32 * 6)()
    _check(_libc.capget(header, held), "capget")
    if any(held) or os.getresuid() != (uid,) * 3 or os.getresgid() != (gid,) * 3:
        raise PermissionError(f"still {os.getresuid()}, {os.getresgid()}, capabilities {list(held)}")
