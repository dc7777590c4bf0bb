"""``python -m soak NAME [options]``."""

from __future__ import annotations

import importlib
import sys

SUBJECTS = {
    "chaos": "half an hour of disconnecting clients, upstream failures, a locked store, and configuration edits",
    "memory": "memory and CPU time with ever new conversations",
    "clients": "real clients with default settings, in sessions longer than the window",
}
"""The checks. Each has a module ``soak.NAME.command`` with a click command ``main``."""


def main() -> None:
    """Run a check with the rest of the arguments. Without a name, list the checks."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in SUBJECTS:
        importlib.import_module(f"soak.{name}.command").main(args=sys.argv[2:], prog_name=f"soak {name}")
    lines = [f"  {subject:14} {about}" for subject, about in SUBJECTS.items()]
    text = "\n".join(["Usage: soak NAME [options]. For the options: soak NAME --help.", "", *lines])
    if name in ("-h", "--help"):
        print(text)
        return
    sys.exit(f"No check is named {name!r}.\n{text}")


if __name__ == "__main__":
    main()
