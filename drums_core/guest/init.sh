#!/bin/sh
# pid 1's only child: root of the desktop's user namespace. It starts the session of the user and the guest server, and
# lives as long as the desktop does: nothing that uid 1000 can do ends it. Its arguments are the session's.
set -u
umask 077
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH LANG=C.UTF-8
cd /

# The secret lets the host's requests in. Host software writes another one over it for each desktop, in place, so the
# file's length never changes and it has no line end.
install -d -m 0700 -o 900 -g 900 /run/drums-guest
head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >/run/drums-guest/secret
chown 900:900 /run/drums-guest/secret
# A folder in which anybody may make sockets belongs to root, or the first program of the user would own it.
[ -d /tmp/.ICE-unix ] || mkdir -m 1777 /tmp/.ICE-unix
chmod 1777 /tmp/.ICE-unix

# What the image's desktop needs of the system, such as a bus.
[ ! -x /opt/drums/system.sh ] || (umask 022 && exec /opt/drums/system.sh) &

setpriv --reuid 1000 --regid 1000 --init-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
    /opt/drums/guest/session.sh "$@" &

while :; do
    # The three capabilities are for the spawner alone; the part that speaks HTTP gives them up as it starts.
    setpriv --reuid 900 --regid 900 --clear-groups --no-new-privs \
        --bounding-set=-all,+setuid,+setgid,+kill --inh-caps=-all,+setuid,+setgid,+kill \
        --ambient-caps=-all,+setuid,+setgid,+kill \
        /usr/bin/python3 -I /opt/drums/guest/server.py
    sleep 0.2
done
