"""Processes whose parent is gone: a ServerApp without its SuperLink, a run without its sweep."""

import os
import signal
import sys
import threading
import time

FLOWERS = ("flwr-serverapp", "flwr-simulation")  # processes that Flower starts for a ServerApp


def end_with_flower() -> None:
    """Have this process get SIGINT when its parent ends, if it is one that Flower started.

    Flower 1.42 does the same, but raises the signal in a thread of its own. That does not wake a main thread that waits
    for another one, as it does while it sends: the process would look for its SuperLink for ever, and hold the record.
    """
    if sys.argv[0].endswith(FLOWERS):
        end_with_parent()


def end_with_parent() -> None:
    """Have this process get SIGINT when its parent ends, where the system has parents."""
    if os.name != "posix":
        return
    parent, main_thread, handler = os.getppid(), threading.main_thread().ident, signal.getsignal(signal.SIGINT)
    assert main_thread

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        if signal.getsignal(signal.SIGINT) is handler:  # else it has been called, and the process is ending
            signal.pthread_kill(main_thread, signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
