"""The guest server: what the host talks to inside a desktop.

These files are installed in the image under /opt/drums/guest and run there on the image's own interpreter, with the
standard library and PIL only. Nothing on the host imports them, but for tests.
"""

VERSION = "0.1.0"
