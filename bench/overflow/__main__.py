"""``python -m bench.overflow``: the recognition of overflow errors, compared with LiteLLM's."""

from __future__ import annotations

from pathlib import Path

import click

from bench.overflow import litellm_side
from bench.overflow.lines import CATALOGUE, Line, lines
from bench.overflow.scores import FIGURES, Score, leaving_out, ours, score
from bench.table import NOTHING, percent, table

COLUMNS = ("recognizer", "overflows", "recognized", "others", "false alarms", "traps", *FIGURES)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--catalogue",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=CATALOGUE,
    help="Labeled responses, one JSON object per line.",
)
def main(catalogue: Path) -> None:
    """Compare recognizers of overflow errors on a catalogue of responses, and print the table.

    Ambiguous responses are skipped. One row tests responses of providers without rules: each response is read without
    the rows and codes of its own provider. Figures are the share that was read correctly, of the recognized lines with
    the figure.
    """
    scores = measure(lines(catalogue))
    click.echo(table(COLUMNS, map(_cells, scores)))
    first = scores[0]
    wrong = {"missed": first.missed, "false alarm": first.alarms, "trap": first.trapped, **first.wrong}
    for name, ids in wrong.items():
        if ids:
            click.echo(f"{first.name}, {name}: {', '.join(ids)}")


def measure(of: list[Line]) -> list[Score]:
    """Return a score for each recognizer. The first one is the proxy's."""
    return [
        score("compaction-proxy", of, ours),
        score("LiteLLM", of, litellm_side.by_exception, reads_figures=False),
        score("without rules that name the provider", of, leaving_out),
    ]


def _cells(score: Score) -> list[str]:
    shares = [percent(score.right[figure].value) if score.reads_figures else NOTHING for figure in FIGURES]
    counts = (
        score.overflows,
        percent(score.recall),
        score.others,
        len(score.alarms),
        len(score.trapped),
    )
    return [score.name, *map(str, counts), *shares]


if __name__ == "__main__":
    main()
