"""``python -m bench.quality.need``: the names in an agent's next calls that its prompt still has.

Cases are recorded histories, cut before those calls. LangChain's summary model is a stand-in that extracts identifiers.
The proxy's engine has no model. It extracts by its own rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from bench import DATA
from bench.quality.conversations import Conversation
from bench.quality.engine import Engine, running
from bench.quality.langchain import MIDDLEWARE, TUNED, LangChain, langchain
from bench.quality.need.case import Case, Score, cells, details, scored
from bench.quality.need.sources import SOURCES, WINDOWS
from bench.quality.text import LANGCHAIN, NEWEST, OURS, newest
from bench.table import percent, table

COLUMNS = ("source", "cases", "window", "method", "tokens", "too long", "files", "files of the rest", "identifiers",
           "identifiers of the rest", "with a file", "ordinary words")  # fmt: skip

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--window", "windows", type=int, multiple=True, help="A window in tokens, instead of the source's own.")
@click.option("--data", "folder", type=_FOLDER, default=DATA, show_default=False,
              help="The folder with prepared cases.")  # fmt: skip
@click.option("--repository", "places", type=click.Path(exists=True, file_okay=False, path_type=Path), multiple=True,
              help="A folder with sessions of Codex or with tau-bench's conversations.")  # fmt: skip
def main(windows: tuple[int, ...], folder: Path, places: tuple[Path, ...]) -> None:
    """Measure the share of the names in an agent's next calls that its prompt still has.

    Without recorded cases there is nothing to measure.
    """
    found = {name: read(folder, places) for name, read in SOURCES.items()}
    chosen = {name: cases for name, cases in found.items() if cases}
    if not chosen:
        click.echo("No recorded cases, so there is nothing to measure. Fix: --data FOLDER or --repository PATH.")
        return
    click.echo(table(COLUMNS, asyncio.run(measure(chosen, windows)), left={"method"}))


async def measure(chosen: Mapping[str, Sequence[Case]], windows: Sequence[int]) -> list[list[str]]:
    """Return the rows of each source in each window."""
    rows = []
    with langchain() as other:
        async with running() as engine:
            for source, cases in chosen.items():
                for window in windows or WINDOWS[source]:
                    used = [int(window * case.scale) for case in cases]
                    found = [await _scores(engine, other, *one) for one in zip(cases, used, strict=True)]
                    named = f"{'up to ' if min(used) < max(used) else ''}{max(used):,}"
                    for method in found[0]:
                        scores = [one[method] for one in found]
                        owned, words = details(scores)
                        ends = percent(owned, 0), percent(words)
                        rows.append([source, str(len(cases)), named, method, *cells(scores, used), *ends])
    return rows


async def _scores(engine: Engine, other: LangChain | None, case: Case, window: int) -> dict[str, Score]:
    """Return the score of each method. LangChain gets every request, because its state depends on the earlier ones."""
    conversation = Conversation(case.id, case.messages)
    found = {OURS: scored(case, await engine.last_prompt(conversation, window))}
    if other is not None:
        for name, method in ((LANGCHAIN, MIDDLEWARE), (f"{LANGCHAIN}, tuned", TUNED)):
            found[name] = scored(case, other.last_prompt(conversation, window, method))
    control = newest(case.messages, found[OURS].tokens)
    found[NEWEST] = scored(case, [{"role": "user", "content": control}])
    return found


if __name__ == "__main__":
    main()
