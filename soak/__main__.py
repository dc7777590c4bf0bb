"""``python -m soak NAME [options]``."""

from __future__ import annotations

import importlib
import sys

SUBJECTS = {
    "chaos": "half an hour of clients that leave, upstreams that break, a locked store and edited configurations",
    "bombs": "requests and upstream responses that try to cost more than their size",
    "fuzz": "inputs that nobody thought of, at what reads bytes of strangers",
    "connections": "ten thousand streams that are open and say little",
    "timing": "whether the time of an answer tells what another team has stored",
    "servers": "real inference servers behind the proxy",
    "injection": "whether a real small model obeys what old tool results order, once they are summarised",
}
"""What can be checked; each is a module ``soak.NAME.command`` with a click command ``main``."""


def main() -> None:
    """Run a subject with the rest of the arguments; without one, say which there are."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in SUBJECTS:
        importlib.import_module(f"soak.{name}.command").main(args=sys.argv[2:], prog_name=f"soak {name}")
    lines = [f"  {subject:14} {about}" for subject, about in SUBJECTS.items()]
    text = "\n".join(["Usage: soak NAME [options]; soak NAME --help says which.", "", *lines])
    if name in ("-h", "--help"):
        print(text)
        return
    sys.exit(f"There is no {name!r} to check.\n{text}")


if __name__ == "__main__":
    main()
