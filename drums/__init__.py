"""drums: Linux desktops for computer-use agents, with a validity verdict on every score."""

__version__ = "0.1.0"
