"""The commands `store status` and `store migrate`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from proxy.cli.operations import CONFIG
from proxy.errors import ConfigurationError


@click.group()
def store() -> None:
    """Show where data is stored, or copy it to another store."""


@store.command()
@CONFIG
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def status(config: Path | None, as_json: bool) -> None:
    """Show the entries, sizes, and encryption of the store, the archive, and the records. Reads all entries.

    Exits with status 1 if one of them isn't reachable.
    """
    from proxy.cli.store_status import show

    try:
        sys.exit(show(config, as_json=as_json))
    except ConfigurationError as error:
        click.echo(error.message, err=True)
        sys.exit(2)


@store.command()
@click.option("--from", "source", required=True, help="The store to copy: its address, or the file of a configuration.")
@CONFIG
def migrate(source: str, config: Path | None) -> None:
    """Copy a store to the store and the archive of the configuration. The servers of both may be running.

    If the command was interrupted, run it again. Exits with status 1 if some entries can't be read.
    """
    from proxy.cli.store_migration import migrated

    try:
        sys.exit(migrated(source, config))
    except ConfigurationError as error:
        click.echo(error.message, err=True)
        sys.exit(2)
