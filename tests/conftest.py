"""For all tests."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for what it starts in the background, and a test's programs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
