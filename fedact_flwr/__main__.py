"""The command `fedact`, from its first instant on: the imports behind it take seconds, and Ctrl-C may come in them."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    signal.signal(signal.SIGINT, _quit)  # `fedact run` has its own once there is something to end
    from fedact_flwr.cli import app

    app()


def _quit(number: int, frame: FrameType | None) -> None:
    print("error: interrupted before the start", file=sys.stderr, flush=True)
    os._exit(130)


if __name__ == "__main__":
    main()
