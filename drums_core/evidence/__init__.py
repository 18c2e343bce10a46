"""Readers of host-side evidence: what gates compare, read from proc, netlink and the file tree.

Public, blocking and pure: each function reads and returns normalised values made of JSON's own types (but for
`ProcessIdentity`), equal between a desktop and its faithful copy. Call them in a thread. Nothing that a desktop
can write is followed as a link, evaluated, or opened before it is known to be a regular file.
"""

VERSION = 3
"""Changes with what gates record: a checkpoint whose evidence is of another version is made anew, not failed."""
