"""A shared library for `LD_PRELOAD`, made without a compiler: neither every host nor any desktop has one."""

from __future__ import annotations

import struct

_DYNAMIC, _SYMBOLS, _HASH, _CODE = 0x100, 0x180, 0x1A0, 0x200
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_INIT = 4, 5, 6, 10, 11, 12


def library(text: bytes) -> bytes:
    """An ELF library for x86-64 that prints a text and ends the program (elf(5); `DT_INIT` is called as it is loaded).

    One segment that may be written, run and read: the loader writes into the dynamic section.
    """
    after = b"\xba" + struct.pack("<I", len(text)) + b"\x0f\x05"  # edx = its length; write(1, text, edx)
    after += b"\xb8\xe7\0\0\0\x31\xff\x0f\x05"  # exit_group(0)
    code = b"\xb8\x01\0\0\0\xbf\x01\0\0\0\x48\x8d\x35" + struct.pack("<i", len(after)) + after + text
    names = {_DT_INIT: _CODE, _DT_HASH: _HASH, _DT_STRTAB: _SYMBOLS, _DT_SYMTAB: _SYMBOLS, _DT_STRSZ: 1, _DT_SYMENT: 24}
    dynamic = b"".join(struct.pack("<QQ", *x) for x in [*names.items(), (0, 0)])
    size = _CODE + len(code)
    out = bytearray(size)

    def put(at: int, data: bytes) -> None:
        out[at : at + len(data)] = data

    put(0, struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0))
    put(64, struct.pack("<IIQQQQQQ", 1, 7, 0, 0, 0, size, size, 0x1000))
    put(120, struct.pack("<IIQQQQQQ", 2, 6, _DYNAMIC, _DYNAMIC, _DYNAMIC, len(dynamic), len(dynamic), 8))
    put(_DYNAMIC, dynamic)
    put(_HASH, struct.pack("<5I", 1, 1, 0, 0, 0))  # one bucket, and the null symbol alone
    put(_CODE, code)
    return bytes(out)
