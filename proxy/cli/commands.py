"""All commands. Each larger one imports its module when it runs, so that the others start quickly."""

from __future__ import annotations

import gc
import hashlib
import secrets
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from proxy.constants import __version__
from proxy.errors import ConfigurationError

KEY_PREFIX = "cp-"

KEY_BYTES = 32  # random bytes of a key

CONFIG = click.option(
    "--config",
    type=click.Path(exists=True, path_type=Path),
    envvar="COMPACTION_PROXY_CONFIG",
    show_envvar=True,
    help="The configuration: a YAML file, or a folder of YAML files.",
)


LOCAL = ("forget", "report", "requests", "show", "store")
"""Commands that read the configuration, but send nothing to upstreams."""


class _Commands(click.Group):
    """Commands that print configuration errors without a traceback, and exit with status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            click.echo(error.message, err=True)
            if ctx.invoked_subcommand in LOCAL and "} isn't set" in error.message:
                click.echo("This command sends nothing, so API keys of upstreams may have any value.", err=True)
            sys.exit(2)
        except PermissionError as error:
            reason = (error.strerror or type(error).__name__).lower()
            click.echo(f"{error.filename}: {reason}. Fix: run the command as the user of the server", err=True)
            sys.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=None, version=__version__, prog_name="compaction-proxy")
def main() -> None:
    """An OpenAI-compatible reverse proxy that compacts conversations in flight."""


@main.command(context_settings={"ignore_unknown_options": True})
@CONFIG
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(config: Path | None, command: tuple[str, ...]) -> None:
    """Start the proxy on a free port and run COMMAND, which sends its requests to it.

    Known programs, such as claude, codex, and opencode, get their own options. Others get OPENAI_BASE_URL and
    ANTHROPIC_BASE_URL. The last line has the number of requests, and says so if none came.
    """
    from proxy.server.loopback import run_program

    sys.exit(run_program(command, config))


@main.command()
@CONFIG
@click.option("--host", help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), help="The port to listen on; 0 for any free port.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="The number of worker processes.")
def serve(config: Path | None, host: str | None, port: int | None, workers: int) -> None:
    """Start the proxy."""
    # Modules live as long as the process, so the collector would visit them for nothing.
    gc.disable()
    from proxy.server.run import run as run_server

    gc.freeze()
    gc.enable()

    run_server(config, host, port, workers)


@main.command()
@click.option(
    "--turns", type=click.IntRange(1), default=60, show_default=True, help="The number of turns in the session."
)
@click.option(
    "--api",
    type=click.Choice(["chat", "responses", "messages"]),
    default="chat",
    show_default=True,
    help="The API that the agent uses.",
)
def demo(turns: int, api: str) -> None:
    """Run a long agent session with and without the proxy; needs no API key."""
    from proxy.demo.run import demo as run_demo
    from proxy.telemetry.logs import configure

    configure("error")  # the table is the output
    sys.exit(run_demo(turns, api))


@main.command()
@click.argument("file", required=False, type=click.Path(exists=True, path_type=Path))
@CONFIG
@click.option("--team", help="Show the policy for a team: each value, and the line that sets it.")
@click.option("--model", help="Show the policy for requests with this model.")
@click.option("--host", help="Check for the address that you pass to serve --host.")
@click.option("--strict", is_flag=True, help="Exit with status 1 if there are warnings.")
@click.option("--json", "as_json", is_flag=True, help="Print errors and warnings as JSON.")
@click.option("--no-env", is_flag=True, help="Don't read environment variables or check values that contain them.")
@click.option("--live", is_flag=True, help="Also test the store, the upstreams, files, and the clock.")
def check(
    file: Path | None,
    config: Path | None,
    team: str | None,
    model: str | None,
    host: str | None,
    strict: bool,
    as_json: bool,
    no_env: bool,
    live: bool,
) -> None:
    """Validate a configuration, FILE or --config. Report each error and warning with its line.

    With --live, send one small request to each upstream. Without a configuration, this tests the defaults.
    """
    from proxy.cli.configuration import checked

    path = file or config
    if path is None and not live:
        raise click.UsageError("No configuration. Fix: check FILE, or set COMPACTION_PROXY_CONFIG")
    if live and no_env:
        raise click.UsageError("--live needs the environment. Fix: leave --no-env out")
    status, loaded = checked(path, host, strict=strict, as_json=as_json, no_env=no_env, live=live)
    if status or loaded is None:
        sys.exit(status)
    if team is not None or model is not None:
        from proxy.cli.configuration import shown

        shown(loaded, team, model)


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@CONFIG
@click.option("--model", help="The model. Default: the model in the request.")
@click.option("--policy", help="The policy. Default: the policy named default.")
@click.option(
    "--api",
    type=click.Choice(["chat", "responses", "messages"]),
    help="The API of the request. Default: the one that the request fits.",
)
def explain(file: Path, config: Path | None, model: str | None, policy: str | None, api: str | None) -> None:
    """Show how the proxy would compact a recorded request (its JSON body). Doesn't send it."""
    from proxy.cli.models import explained

    explained(file, config, model, policy, api)


@main.command()
@click.argument("names", nargs=-1)
@CONFIG
def models(names: tuple[str, ...], config: Path | None) -> None:
    """Show the limits in force, their sources, and the limits learned from upstreams."""
    from proxy.cli.models import limits

    limits(names, config)


@main.group()
def keys() -> None:
    """Manage keys for teams."""


def _name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    from proxy.config.fields import NAME

    if value is not None and not NAME.fullmatch(value):
        raise click.BadParameter("must be 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit")
    return value


_ANNOUNCEMENT = """\
The key. It is shown only once and not stored. Give it to {owner}:

  {key}

Its hash, for the configuration. {others}

{lines}
"""

_OTHERS = "The team's other keys stay valid while they are listed:"


@keys.command()
@click.option("--team", callback=_name, help="The team's name in the configuration.")
@click.option("--admin", is_flag=True, help="Create a key of an administrator.")
@click.option("--name", callback=_name, help="The key's name in records and reports. Default: the start of its hash.")
@click.option(
    "--expires", type=click.DateTime(["%Y-%m-%d"]), help="The first day (UTC) on which the proxy rejects the key."
)
def new(team: str | None, admin: bool, name: str | None, expires: datetime | None) -> None:
    """Create a key, and print it with the lines for the configuration. Writes no file."""
    if (team is None) is not admin:
        raise click.UsageError("Pass either --team NAME or --admin.")
    if expires is not None and expires.replace(tzinfo=UTC) <= datetime.now(UTC):
        raise click.BadParameter("must be a day in the future", param_hint="--expires")
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    digest = f'"sha256:{hashlib.sha256(key.encode()).hexdigest()}"'
    named = "" if name is None else f', name: "{name}"'
    ends = "" if expires is None else f", expires: {expires.date()}"
    entry = f"{{hash: {digest}{named}{ends}}}" if named or ends else digest
    if admin:
        owner, others, lines = "an administrator", "It works only below /compaction:", "admin:\n  keys:\n    - "
    else:
        owner, others, lines = "the team", _OTHERS, f"teams:\n  {team}:\n    keys:\n      - "
    click.echo(_ANNOUNCEMENT.format(key=key, owner=owner, others=others, lines=lines + entry), nl=False)


def _digest(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    digest = None if value is None else value.lower().removeprefix("sha256:")
    if digest is not None and (len(digest) != 64 or set(digest) - set("0123456789abcdef")):
        raise click.BadParameter('must be 64 hex digits, from: printf %s "$KEY" | sha256sum')
    return digest


@main.command()
@CONFIG
@click.option("--team", help="The team's name in the configuration.")
@click.option("--key-sha256", callback=_digest, help="The SHA-256 of the caller's key, with auth.mode open.")
@click.option("--dry-run", is_flag=True, help="Only count the entries that would be removed.")
def forget(config: Path | None, team: str | None, key_sha256: str | None, dry_run: bool) -> None:
    """Remove all stored data of a team or a caller, except what a team has spent. The server may be running."""
    from proxy.cli.forgetting import forget as run

    run(team, key_sha256, config, dry_run=dry_run)


@main.command()
@click.argument("id")
@CONFIG
@click.option("--messages", is_flag=True, help="Print the summary and the text of stored messages, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def show(id: str, config: Path | None, messages: bool, as_json: bool) -> None:
    """Show a request by its ID, from the response header x-compaction-id. The server may be running."""
    from proxy.cli.records import show as run

    if messages and as_json:
        raise click.UsageError("Pass either --messages or --json.")
    run(id, config, messages=messages, as_json=as_json)


FILTER_HELP = {
    "team": "The team.",
    "key": "The team's key, by its name or the start of its hash.",
    "policy": "The policy.",
    "model": "The model in the request.",
    "api": "The API: chat, responses, messages, or other.",
    "verdict": "What the proxy did: compacted, none, shadow, off, failed, unsupported, or refused.",
    "status": "The status, such as 429 or 4xx.",
    "error": "The error code, or the code or type in the upstream's error.",
    "since": "The start: 30m, 24h, 7d, or a date like 2026-11-01T08:00.",
    "until": "The end, in the same forms.",
    "slow": "The least milliseconds that the whole request took.",
    "conversation": "The conversation, as a record names it. Its requests come oldest first, with their sums.",
    "user": "The end user, as the client names it, or as a record does.",
    "client": "The client's product, or its start with the version, such as OpenAI/Python 2.",
}


def _filters(command: Callable[..., None]) -> Callable[..., None]:
    for name, meaning in reversed(FILTER_HELP.items()):
        command = click.option(f"--{name}", help=meaning)(command)
    return command


@main.command()
@CONFIG
@_filters
@click.option("--limit", type=click.IntRange(1, 1000), help="The most to list. Default: 50, or all of a conversation.")
@click.option("--json", "as_json", is_flag=True, help="Print one record as JSON on each line.")
def requests(config: Path | None, limit: int | None, as_json: bool, **given: str | None) -> None:
    """List requests, newest first. The server may be running."""
    from proxy.cli.records import listed

    filters = {name: value for name, value in given.items() if value is not None}
    listed(config, filters, limit, as_json=as_json)


@main.command()
@CONFIG
@click.option("--team", help="Show only this team.")
@click.option("--since", default="7d", show_default=True, help="The first day: 7d, 24h, or a date like 2026-11-01.")
@click.option("--until", help="The last day, in the same forms. Default: today.")
@click.option(
    "--by",
    default="team",
    show_default=True,
    help="Group by team, key, policy, model, upstream, api, or day; or by several.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print all columns as CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def report(
    config: Path | None, team: str | None, since: str, until: str | None, by: str, as_csv: bool, as_json: bool
) -> None:
    """Sum up requests, tokens, costs, and savings. The server may be running."""
    from proxy.cli.records import report as run

    if as_csv and as_json:
        raise click.UsageError("Pass either --csv or --json.")
    run(config, team, since, until, by, "csv" if as_csv else "json" if as_json else "text")


@main.group()
def store() -> None:
    """Back up a store, or copy it to another one."""


@store.command()
@click.option(
    "--from", "source", required=True, help="The store to copy: its address, a backup, or the file of a configuration."
)
@click.option("--add", is_flag=True, help="Add a backup to a store that isn't empty, or continue an interrupted copy.")
@CONFIG
def migrate(source: str, add: bool, config: Path | None) -> None:
    """Copy a store or a backup to the store of the configuration. The servers of both may be running.

    If the command was interrupted, run it again. Exits with status 1 if some entries can't be read.
    """
    from proxy.cli.store import migrated

    sys.exit(migrated(source, config, add=add))


@store.command()
@click.argument("path", type=click.Path(path_type=Path))
@CONFIG
def backup(path: Path, config: Path | None) -> None:
    """Copy the store and the records to the new file PATH. The server may be running.

    A store with encryption has an encrypted backup. Exits with status 1 if some entries can't be read.
    """
    from proxy.cli.store import backed_up

    sys.exit(backed_up(path, config))
