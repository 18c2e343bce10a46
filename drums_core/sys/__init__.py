"""Privileged system calls: namespaces, mounts, cgroups, CRIU, ptrace. Nothing here imports the layers above."""
