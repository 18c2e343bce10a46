"""The daemon: `open_host` over HTTP. It translates requests, answers and errors, and decides nothing."""
