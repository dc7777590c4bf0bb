"""``python -m proxy``."""

from proxy.cli.commands import main

main()
