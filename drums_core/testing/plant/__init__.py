"""The processes that make faults, by subject: what they do, they do to the kernel or to the disk.

They know a desktop by the kernel's names only, and no gate: standard library, and the stand-alone modules of
`drums_core.sys`. `main.py` is started for each fault by `drums_core.testing.faults`.
"""
