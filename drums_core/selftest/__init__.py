"""Proof on this host: the whole fault matrix, planted in throw-away desktops, and clean restores that no gate flags."""
