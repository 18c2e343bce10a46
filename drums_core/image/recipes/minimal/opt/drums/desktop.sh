# shellcheck shell=sh
# The desktop of this image: a window manager. Sourced by guest/session.sh, with a display and buses there.
xsetroot -solid '#336699' -cursor_name left_ptr
start openbox --sm-disable
# A window manager that owns the root window has set this property.
until xprop -root -notype _NET_SUPPORTING_WM_CHECK 2>/dev/null | grep -q 'window id'; do sleep 0.02; done
