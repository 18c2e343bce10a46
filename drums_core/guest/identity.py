"""Who the user of a desktop is, and what its programs find in their environment."""

import contextlib
import grp

USER = "user"
USER_UID = 1000
USER_GID = 1000
HOME = "/home/user"
# Fixed when the spawner starts: a later change of /etc/group adds no group to anybody.
GROUPS = [USER_GID]
with contextlib.suppress(OSError):
    GROUPS += sorted(entry.gr_gid for entry in grp.getgrall() if USER in entry.gr_mem and entry.gr_gid != USER_GID)

ENVIRONMENT = {
    "HOME": HOME,
    "USER": USER,
    "LOGNAME": USER,
    "SHELL": "/bin/bash",
    "DISPLAY": ":0",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/games",
    "XDG_RUNTIME_DIR": "/run/user/1000",
    "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/1000/bus",
    # pyscreeze takes pictures only when it is told what kind of session this is.
    "XDG_SESSION_TYPE": "x11",
    "LANG": "C.UTF-8",
}
# What the image adds, in lines of NAME=value; session.sh reads it too.
with contextlib.suppress(FileNotFoundError), open("/opt/drums/environment", encoding="utf-8") as lines:
    ENVIRONMENT.update(line.rstrip("\n").split("=", 1) for line in lines if "=" in line)
