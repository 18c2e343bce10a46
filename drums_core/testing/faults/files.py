"""The home directory: contents, modes, owners, times, links, extended attributes, entries, odd names, holes."""

from __future__ import annotations

from drums_core.testing.faults.model import PLANT, Fault, Need, Point

_FILE = PLANT / "files.py"
_PLAIN = (
    ("append", "a file is one byte longer", (".bash_logout", "size")),
    ("flip", "one bit of a file is another, its times are the same", (".bash_logout", "hash")),
    ("owner", "a file belongs to somebody else", (".bash_logout", "uid")),
    ("add", "there is one more file", ("'planted' is extra (file)",)),
)
_STAGED = (
    ("mode", "a mode bit of a file is another", ("plain", "mode '0o645'")),
    ("setuid", "a file is set-uid", ("mode '0o4644'",)),
    ("group", "a file's group is another", ("plain", "gid")),
    ("mtime", "a file's modification time is a nanosecond later", ("plain", "mtime_ns")),
    ("remove", "there is one file less", ("plain' is missing",)),
    ("truncate", "a file is empty", ("plain", "size 0")),
    ("to-folder", "a file has become a folder", ("type 'directory', expected 'file'",)),
    ("to-fifo", "a file has become a FIFO", ("type 'fifo', expected 'file'",)),
    ("swap", "two files have each other's names", ("plain", "hash")),
    ("target", "a symbolic link leads elsewhere, its times are the same", ("target 'planted', expected 'plain'",)),
    ("xattr-changed", "an extended attribute has another value", ("tagged", "xattrs")),
    ("xattr-added", "a file has one more extended attribute", ("plain", "xattrs")),
    ("xattr-removed", "a file has one extended attribute less", ("tagged", "xattrs")),
    ("add-folder", "there is one more empty folder", ("another' is extra (directory)",)),
    ("remove-folder", "an empty folder is gone", ("empty' is missing (directory)",)),
    ("folder-mode", "a folder's mode is another", ("empty", "mode '0o701'")),
    ("home-mode", "the home's own mode is another", ("'.' has mode '0o711'",)),
    ("copy", "a hard link has become a copy", ("hard b", "links None")),
    ("hard-link", "a copy has become a hard link", ("same b", "links")),
    ("newline-name", "a file with a newline in its name is longer", ("odd\\nname", "size")),
    ("bytes-name", "a file whose name is no UTF-8 is longer", ("odd-", "size")),
    ("rename", "a name that is no UTF-8 has another byte", ("is missing (file)", "is extra (file)")),
    ("sparse", "one bit in a hole of a sparse file is another, its times are the same", ("sparse", "hash")),
    ("big", "one bit of a file of half a megabyte is another, its times are the same", ("big", "hash")),
)

FILE_FAULTS = [
    *(
        Fault(
            "state_hash" if how == "append" else f"state_hash:{how}",
            ("state_hash",),
            Point.PRE_RESUME,
            f"in the home, {about}",
            "change_home",
            _FILE,
            {"how": how},
            says=says,
        )
        for how, about, says in _PLAIN
    ),
    *(
        Fault(
            f"state_hash:{how}",
            ("state_hash",),
            Point.PRE_RESUME,
            f"in the home, {about}",
            "change_stage",
            _FILE,
            {"how": how},
            needs=frozenset({Need.STAGE}),
            says=says,
        )
        for how, about, says in _STAGED
    ),
]
"""Faults of `state_hash`."""
