"""``python -m bench.overflow``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console

from bench.overflow import litellm_side
from bench.overflow.lines import CATALOGUE, Line, lines
from bench.overflow.scores import Score, leaving_out, ours, score
from bench.overflow.table import raw, show


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--catalogue",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=CATALOGUE,
    help="Labelled answers, one JSON object per line.",
)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all scores to FILE.")
def main(catalogue: Path, file: Path | None) -> None:
    """Recognise a catalogue of error answers, ambiguous ones apart, and print who recognises how much.

    The last two rows leave one provider out in turn: its answers are read without the rows and codes that only it has,
    and without all that it has, shared or not.
    """
    scores = measure(lines(catalogue))
    show(scores, Console(width=max(160, Console().width)))
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(raw(scores))) + b"\n")


def measure(of: list[Line]) -> list[Score]:
    """One score for each recogniser, ours first."""
    return [
        score("compaction-proxy", of, ours),
        score("LiteLLM, its exceptions", of, litellm_side.by_exception, reads_figures=False),
        score("LiteLLM, its words", of, litellm_side.by_words, reads_figures=False),
        score("ours, provider left out", of, partial(leaving_out, shared=False)),
        score("ours, and all it shares", of, partial(leaving_out, shared=True)),
    ]


if __name__ == "__main__":
    main()
