"""A piece of memory that another process of the desktop can write into, by its number (System V).

Unlike a file's mapping it cannot be made shorter by the one who shares it. Sources: shmget(2), shmop(2), shmctl(2).
"""

import contextlib
import ctypes
import os

_IPC_PRIVATE, _IPC_CREAT, _IPC_RMID = 0, 0o1000, 0
_EVERYBODY = 0o666
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmat.restype = ctypes.c_void_p
_libc.shmat.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_libc.shmdt.argtypes = (ctypes.c_void_p,)


@contextlib.contextmanager
def segment(size):
    """For the block: the number of a segment of so many bytes, and the bytes. It goes with its last user.

    Raises:
        OSError: the kernel gives none.
    """
    number = _libc.shmget(_IPC_PRIVATE, ctypes.c_size_t(size), _IPC_CREAT | _EVERYBODY)
    if number < 0:
        raise OSError(ctypes.get_errno(), f"shmget: {os.strerror(ctypes.get_errno())}")
    try:
        address = _libc.shmat(number, None, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), f"shmat: {os.strerror(ctypes.get_errno())}")
        try:
            yield number, (ctypes.c_char * size).from_address(address)
        finally:
            _libc.shmdt(address)
    finally:
        _libc.shmctl(number, _IPC_RMID, None)
