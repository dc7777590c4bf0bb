"""``python -m bench.quality.compressors PYTHON``: the proxy and Headroom on the histories of ``bench.quality.need``.

``PYTHON`` is the interpreter of an environment with ``headroom-ai``. Headroom runs without its local models. The method
"rows" is the answer to a gateway's ``/v1/compress``, which keeps the number, the order, and the roles of messages.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median_high

import click

from bench import DATA, ROOT
from bench.quality.child import Ask, child
from bench.quality.conversations import Conversation, tool_loop
from bench.quality.engine import Adapt, Engine, running
from bench.quality.need.case import Case, Score, cells, scored, tokens
from bench.quality.need.sources import SOURCES, WINDOWS
from bench.quality.text import OURS
from bench.table import table
from proxy.endpoints.compress import in_rows

ROWS, HEADROOM = f"{OURS}, rows", "Headroom"

COLUMNS = ("source", "cases", "window", "method", "tokens before", "tokens", "too long", "files", "files of the rest",
           "identifiers", "identifiers of the rest", "CPU")  # fmt: skip

ADAPTED: Mapping[str, Adapt] = {
    OURS: lambda case: case,
    ROWS: partial(in_rows, archive=True),
}

Measured = tuple[Score, float]
"""The score of a prompt, and the CPU seconds that it took."""

_FOLDER = click.Path(file_okay=False, path_type=Path)


@contextmanager
def headroom(python: Path) -> Iterator[tuple[str, Ask]]:
    """Yield Headroom's version, and a function that compresses messages for a window, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        environment = dict.fromkeys(("HEADROOM_WORKSPACE_DIR", "HEADROOM_CONFIG_DIR"), folder)
        environment |= {"HEADROOM_TELEMETRY": "off", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        with child([python, ROOT / "bench" / "quality" / "headroom_side.py"], environment) as started:
            yield started


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("python", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--data", "folder", type=_FOLDER, default=DATA, show_default=False, help="The folder with cases.")
@click.option("--repository", "places", type=_FOLDER, multiple=True, help="A folder with conversations, as for `need`.")
def main(python: Path, folder: Path, places: tuple[Path, ...]) -> None:
    """Compare the proxy with the Headroom of another environment, whose interpreter is PYTHON."""
    found = {name: read(folder, places) for name, read in SOURCES.items()}
    with headroom(python) as (version, compress):
        rows = asyncio.run(measure({name: cases for name, cases in found.items() if cases}, compress))
    click.echo(table(COLUMNS, rows, left={"window", "method"}))
    click.echo(f"Headroom {version} without its local models. Sizes and CPU are medians.")


async def measure(chosen: Mapping[str, Sequence[Case]], compress: Ask) -> list[list[str]]:
    """Return the table's rows. Each method has its own engine, because engines remember what they counted."""
    rows = []
    async with running() as full, running() as for_gateways:
        engines = {OURS: full, ROWS: for_gateways}
        # Load the encoding, and compile what the first use compiles.
        await _measured(engines, compress, Case("first", tool_loop(1, 40_000).messages, [], []), 16_384)
        for source, cases in chosen.items():
            before = f"{median_high(tokens(case.messages) for case in cases):,}"
            for window in WINDOWS[source]:
                used = [int(window * case.scale) for case in cases]
                found = [await _measured(engines, compress, *one) for one in zip(cases, used, strict=True)]
                for method in found[0]:
                    scores, seconds = zip(*(one[method] for one in found), strict=True)
                    cpu = f"{median_high(seconds) * 1000:.0f} ms"
                    rows.append([source, str(len(cases)), f"{max(used):,}", method, before, *cells(scores, used), cpu])
    return rows


async def _measured(engines: Mapping[str, Engine], compress: Ask, case: Case, window: int) -> dict[str, Measured]:
    found = {}
    for method, engine in engines.items():
        begun = time.process_time()
        prompt = await engine.last_prompt(Conversation(case.id, case.messages), window, ADAPTED[method])
        seconds = time.process_time() - begun
        found[method] = scored(case, prompt), seconds
    made = compress({"messages": case.messages, "window": window})
    return {**found, HEADROOM: (scored(case, made["messages"]), made["cpu"])}


if __name__ == "__main__":
    main()
