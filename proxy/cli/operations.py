"""The commands `init`, `doctor`, and `run`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from proxy.cli.init import PROVIDERS
from proxy.errors import ConfigurationError

FILE = Path("compaction.yaml")
"""The configuration that `init` writes by default."""

CONFIG = click.option(
    "--config",
    type=click.Path(exists=True, path_type=Path),
    envvar="COMPACTION_PROXY_CONFIG",
    show_envvar=True,
    help="The configuration: a YAML file, or a folder of YAML files.",
)


@click.command()
@click.argument("file", default=FILE, type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--provider",
    "providers",
    multiple=True,
    type=click.Choice(sorted(PROVIDERS)),
    help="A provider to send requests to; repeat it for more. Default: openai and anthropic.",
)
def init(file: Path, providers: tuple[str, ...]) -> None:
    """Write a first configuration to FILE (default: compaction.yaml). With - as FILE, print it."""
    from proxy.cli.init import text_for, write

    chosen = providers or ("openai", "anthropic")
    if str(file) == "-":
        click.echo(text_for(FILE, chosen), nl=False)
        return
    try:
        write(file, text_for(file, chosen))
    except ConfigurationError as error:
        click.echo(error.message, err=True)
        sys.exit(2)
    click.echo(f"Wrote {file}. Next: compaction-proxy doctor --config {file}")


@click.command()
@CONFIG
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(config: Path | None, as_json: bool) -> None:
    """Test keys, upstreams, limits, files, and the clock. Sends one small request to each upstream."""
    from proxy.cli.doctor import examined

    findings = examined(config)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(finding.text)
    sys.exit(int(any(finding.state == "failed" for finding in findings)))


@click.command(context_settings={"ignore_unknown_options": True})
@CONFIG
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(config: Path | None, command: tuple[str, ...]) -> None:
    """Start the proxy on a free port and run COMMAND with OPENAI_BASE_URL and ANTHROPIC_BASE_URL set to it."""
    from proxy.cli.wrapped_command import run_command

    try:
        sys.exit(run_command(command, config))
    except ConfigurationError as error:
        click.echo(error.message, err=True)
        sys.exit(2)
