"""Parity: our score of a desktop's state beside the one of OSWorld's own `DesktopEnv.evaluate`, on a sibling of it."""
