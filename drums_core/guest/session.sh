#!/bin/sh
# The user's session, as uid 1000 without capabilities: display, buses, and the desktop that the image brings. Its
# argument is the screen's size. Everything in it is the agent's to kill; it is not started again.
set -u
umask 022
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/games
export HOME=/home/user USER=user LOGNAME=user SHELL=/bin/bash
export DISPLAY=:0 XDG_RUNTIME_DIR=/run/user/1000 DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/1000/bus
export XDG_SESSION_TYPE=x11
# What programs of this image find besides; guest/identity.py reads it too.
set -a
. /opt/drums/environment
set +a
cd "$HOME" || exit 1

start() { "$@" </dev/null >>"$XDG_RUNTIME_DIR/session.log" 2>&1 & }

# RFB on a socket of the user's own: no port, as an X server without access control must not be reached from elsewhere.
start Xtigervnc :0 -geometry "${1:-1920x1080}" -depth 24 -SecurityTypes None -rfbunixpath "$XDG_RUNTIME_DIR/vnc.sock" \
    -rfbunixmode 0600 -rfbport -1 -nolisten tcp -ac -AlwaysShared -s 0 -dpms
start dbus-daemon --session --nofork --nopidfile --nosyslog --address="$DBUS_SESSION_BUS_ADDRESS"

until xset q >/dev/null 2>&1; do sleep 0.02; done
until [ -S "$XDG_RUNTIME_DIR/bus" ]; do sleep 0.02; done
xset s off s noblank
start /usr/libexec/at-spi-bus-launcher --launch-immediately
# Sourced, so that what it starts is this shell's to wait for. It returns when the desktop is there.
. /opt/drums/desktop.sh
: >"$XDG_RUNTIME_DIR/session-ready"
wait
