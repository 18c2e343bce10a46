#!/bin/sh
# What is computed from the installed packages. Run once, as root of the image, without a network.
set -eu
cd /opt/drums/build

# Chrome's names, as tasks' window titles and checkers know them.
ln -sf google-chrome /usr/local/bin/google-chrome-stable
# The kernel names the browser's processes by their file, and set-ups and checks end them by Chrome's name.
mv /usr/lib/chromium/chromium /usr/lib/chromium/chrome
ln -s chrome /usr/lib/chromium/chromium
applications=/usr/share/applications
sed -e 's/^Name=.*/Name=Google Chrome/' -e 's#^Exec=/usr/bin/chromium#Exec=/usr/local/bin/google-chrome#' \
    -e 's/^StartupWMClass=.*/StartupWMClass=Google-chrome/' \
    -e '/^Name\[/d; /^GenericName\[/d; /^Comment\[/d; /^NoDisplay/d' \
    $applications/chromium.desktop >$applications/google-chrome.desktop
sed -i -e '/^NoDisplay/d' -e 's/^\[Desktop Entry\]/&\nNoDisplay=true/' $applications/chromium.desktop
python3 rename_chromium.py /usr/lib/chromium/locales/en-US.pak

# LibreOffice's other name.
ln -sf soffice /usr/local/bin/libreoffice

# A gradient by rows, so that a screenshot of it is small.
python3 wallpaper.py /usr/share/backgrounds/drums.png

# Indexers and monitors of hardware work while the desktop should rest.
services=/usr/share/dbus-1/services
rm -f $services/org.freedesktop.Tracker3.Miner.* $services/org.gnome.Nautilus.Tracker3.Miner.* \
    $services/org.gtk.vfs.UDisks2VolumeMonitor.service /usr/share/gvfs/remote-volume-monitors/udisks2.monitor \
    /etc/xdg/autostart/tracker-miner-fs-3.desktop

localedef -i en_US -f UTF-8 en_US.UTF-8
glib-compile-schemas /usr/share/glib-2.0/schemas
dconf update

# Made once here rather than at every start.
fc-cache -s
update-desktop-database -q
update-mime-database /usr/share/mime
gtk-update-icon-cache -q /usr/share/icons/hicolor
