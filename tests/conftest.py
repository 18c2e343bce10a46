"""For all tests."""

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for what it starts in the background, and a test's programs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test asks another machine for a file that it names; those of fetching say so, and ask a server of their own.
os.environ.setdefault("DRUMS_FILES_OFFLINE", "true")
