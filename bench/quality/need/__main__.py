"""``python -m bench.quality.need``."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console

from bench.quality.__main__ import PYTHON
from bench.quality.langchain import langchain
from bench.quality.need.rows import METHODS, Chosen, Row, measure
from bench.quality.need.score import Scorer
from bench.quality.need.sources import FOLDER, SOURCES, half
from bench.quality.need.table import markdown, raw, show
from bench.table import write_json

_FOLDER = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--source", type=click.Choice(list(SOURCES)), help="Measure one source only.")
@click.option("--window", "windows", type=int, multiple=True, help="A window in tokens, instead of the source's own.")
@click.option("--method", type=click.Choice(list(METHODS)), help="Measure one method only.")
@click.option("--half", "part", type=click.Choice(["a", "b"]), help="Half of the cases: a to develop, b held out.")
@click.option("--readable", is_flag=True, help="Ignore names that occur only in escaped JSON.")
@click.option("--data", "folder", type=_FOLDER, default=FOLDER, show_default=False,
              help="The folder with prepared cases.")  # fmt: skip
@click.option("--repository", "places", type=click.Path(exists=True, file_okay=False, path_type=Path), multiple=True,
              help="A git repository or a folder with sessions of Codex (on the branch of the tool entire), or with "
              "tau-bench's conversations.")  # fmt: skip
@click.option("--langchain", "python", type=click.Path(path_type=Path), default=PYTHON, show_default=False,
              help="The interpreter of the environment with LangChain.")  # fmt: skip
@click.option("--json", "file", type=_FILE, help="Write every figure, and the lost names, to FILE.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table of docs/benchmarks.md.")
def main(
    source: str | None, windows: tuple[int, ...], method: str | None, part: str | None, readable: bool, folder: Path,
    places: tuple[Path, ...], python: Path, file: Path | None, as_markdown: bool,
) -> None:  # fmt: skip
    """Measure the share of the names in an agent's next calls that its prompt still has.

    Cases are recorded histories, cut before those calls. Without recorded cases there is nothing to measure.
    """
    chosen = choose(source, windows, part, folder, places)
    if not chosen:
        click.echo("No recorded cases, so there is nothing to measure. Fix: --data FOLDER or --repository PATH.")
        return
    rows, versions = compare(chosen, METHODS[method] if method else sum(METHODS.values(), ()), python, readable)
    if as_markdown:
        click.echo(markdown(rows))
    else:
        show(rows, versions, Console(width=max(160, Console().width)))
    write_json(file, raw(rows))


def choose(
    source: str | None, windows: tuple[int, ...], part: str | None, folder: Path, places: Sequence[Path]
) -> dict[str, Chosen]:
    """Return the cases and the windows of each source that has any cases."""
    found = {}
    for name, one in SOURCES.items():
        cases = half(one.read(folder, places), part) if source in (None, name) else []
        if cases:
            found[name] = Chosen(cases, windows or one.windows)
    return found


def compare(
    chosen: Mapping[str, Chosen], methods: Sequence[str], python: Path, readable: bool
) -> tuple[list[Row], dict[str, str]]:
    """Return all rows, and the versions of LangChain's packages if it was started."""
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        wanted = set(methods) & set(METHODS["langchain"])
        other = stack.enter_context(langchain(python)) if wanted else None
        rows = asyncio.run(measure(chosen, methods, store, other, Scorer(readable=readable)))
        return rows, other.versions if other else {}


if __name__ == "__main__":
    main()
