"""Running checker code in a worker process of its own: unprivileged, without network but for the desktop under test."""
