"""Waits until its owner is gone, however that came, and then removes what the owner left. Standard library only.

Containers belong to their engine and outlive who started them: this process is what sees the owner's end.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from asyncrl.sandbox import leases

_TRIES = 3  # of an engine that fails; what is left then is the next start's


def main(owned: str) -> None:
    """Return when nothing of the owner is left: because it has removed everything, or is gone and this has.

    Args: `owned` is the ledger's directory, a slash and the owner's name.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    directory, owner = os.path.split(owned)
    ledger = leases.Ledger.of_owner(directory, owner)
    process = leases.open_owner(owner)
    while os.read(0, 4096):
        pass
    if process is not None and ledger.files():
        select.select([process], [], [])  # its end of the pipe closes before it is gone
    for _ in range(_TRIES):
        if not ledger.files():
            break
        leases.reap(directory)
    sys.exit(0)
