"""``python -m bench.overflow``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
from rich.console import Console

from bench.overflow import litellm_side
from bench.overflow.forms import FORMS, in_forms_of
from bench.overflow.lines import CATALOGUE, Line, lines
from bench.overflow.scores import Score, leaving_out, ours, score
from bench.overflow.table import raw, show
from bench.table import write_json


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--catalogue",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=CATALOGUE,
    help="Labeled responses, one JSON object per line.",
)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all scores to FILE.")
def main(catalogue: Path, file: Path | None) -> None:
    """Compare recognizers of overflow errors on a catalogue of responses, and print the table.

    Ambiguous responses are skipped. Two rows test responses of providers without rules: each response is read
    without the rows and codes of its own provider. The second of them also leaves out the ones shared with other
    providers. The rows of the APIs test each error message in all error forms of that API, without its status and code.
    """
    scores = measure(lines(catalogue))
    show(scores, Console(width=max(160, Console().width)))
    write_json(file, raw(scores))


def measure(of: list[Line]) -> list[Score]:
    """Return a score for each recognizer. The first one is the proxy's."""
    return [
        score("compaction-proxy", of, ours),
        score("LiteLLM, exception classes", of, litellm_side.by_exception, reads_figures=False),
        score("LiteLLM, phrases", of, litellm_side.by_words, reads_figures=False),
        score("without the provider's rules", of, partial(leaving_out, shared=False)),
        score("… and without shared rules", of, partial(leaving_out, shared=True)),
        *(score(f"in the error forms of {api}", in_forms_of(api, of), ours) for api in FORMS),
    ]


if __name__ == "__main__":
    main()
