"""Waits until its owner is gone, however that came, and then removes what the owner left. Standard library only.

Containers belong to their engine and outlive who started them: this process is what sees the owner's end.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from asyncrl.sandbox import leases

_TRIES = 20
_PAUSE_S = 0.2  # between looks at an owner that is about to be gone: its end of the pipe closes before it does


def main(directory: str) -> None:
    """Return when standard input has ended and the ledger in `directory` holds nothing of a dead owner any more."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    for _ in range(_TRIES):
        if not os.path.isdir(directory):
            break
        leases.reap(directory)
        if not os.listdir(directory):
            break
        time.sleep(_PAUSE_S)
    sys.exit(0)
