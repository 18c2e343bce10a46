# shellcheck shell=sh
# The desktop of this image: GNOME Shell with dock and desktop icons. Sourced by guest/session.sh, with a display and buses there.

shell_property() {
    gdbus call --session --dest org.gnome.Shell --object-path /org/gnome/Shell \
        --method org.freedesktop.DBus.Properties.Get org.gnome.Shell "$1" 2>/dev/null
}

xsetroot -solid '#2c001e' -cursor_name left_ptr
start pulseaudio --daemonize=no --exit-idle-time=-1 -n -L module-null-sink -L module-native-protocol-unix \
    --disable-shm=yes
start /usr/libexec/gsd-xsettings
start gnome-shell --x11
until shell_property ShellVersion | grep -q "'"; do sleep 0.05; done
# It asks the shell for its keys once, as it starts.
start /usr/libexec/gsd-media-keys
until gdbus call --session --dest org.gnome.SettingsDaemon.MediaKeys --object-path / \
    --method org.freedesktop.DBus.Peer.Ping >/dev/null 2>&1; do sleep 0.05; done
# The desktop's icons are a window, of a program of their own.
until xdotool search --classname 'gjs|ding' >/dev/null 2>&1; do sleep 0.05; done
# The first synthetic key changes the keymap, and the shell misses it: let that be a key which does nothing.
xdotool key Shift_L
