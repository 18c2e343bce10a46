"""The files that tasks name by URL: mirrored on this host, or fetched to it."""
