"""``python -m proxy``, and the command ``compaction-proxy``."""

import os
import signal
import sys


def main() -> None:
    """Run a command. From the first moment, SIGTERM ends ``serve`` with status 0.

    The kernel drops the signal if process 1 of a container has no handler, and the imports take seconds on a busy
    machine. ``server.run`` replaces the handler.
    """
    if sys.argv[1:2] == ["serve"]:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    from proxy.cli.commands import main as command

    command()


if __name__ == "__main__":
    main()
