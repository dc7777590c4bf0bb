"""``python -m bench.instructions``: instructions of fixed requests, counted by callgrind, and their layers.

Both servers run below callgrind. It counts the instructions of all threads, so other programs don't change the figures.
It sees C code, but not Python functions. So the interpreter's instructions are divided among the layers by the
bytecodes that each layer executes for the same request, counted in another process.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path

import click
import uvloop
from rich.console import Console
from rich.table import Table

from bench import bodies, calls, compactions, servers
from bench.client import Caller, concurrent, request
from bench.servers import Server
from bench.table import write_json

PROGRAM, CONTROL = "valgrind", "callgrind_control"
MISSING = "valgrind isn't installed. On Debian: apt-get install valgrind"
AT_ONCE = 64
REST_SECONDS, REST_CPU = 1.0, 0.1
"""A server that uses less CPU in this time has written records and the archive, and loaded its tokenizer."""

INTERPRETER = "interpreter"
REGEX = "regular expressions"
OTHERS = "others"
LIMIT = 0.005
"""Layers with a smaller share of each request are added up."""

Report = Callable[[str], None]
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/.]+)")


@dataclass(frozen=True, slots=True)
class Case:
    """Requests, of which ``times`` are sent over ``at_once`` connections after ``warm_up`` others."""

    requests: Callable[[], Iterator[bytes]]
    times: int
    at_once: int = 1
    warm_up: int = 100


@dataclass(slots=True)
class Figures:
    """The instructions of a request by part of the C code, for each server."""

    proxy: Counter[str] = field(default_factory=Counter)
    passthrough: Counter[str] = field(default_factory=Counter)


def cases(times: int) -> dict[str, Case]:
    """Return the fixed requests. ``times`` is the number of small ones."""
    made = {
        f"{name}, small, {AT_ONCE} at once": Case(
            partial(repeat, request(api.small(), api.path)), times, AT_ONCE, warm_up=2 * AT_ONCE
        )
        for name, api in bodies.APIS.items()
    }
    made["chat, 100 KB with a new last message"] = Case(
        lambda: map(request, bodies.CHAT.turns("bench-1m", 100_000, bodies.SHORT_MESSAGES)), times // 4, warm_up=10
    )
    made[calls.COMPACTION] = Case(lambda: map(compactions.SIZES[0].conversation, range(1, 100)), 1, warm_up=1)
    return made


def measure(times: int, report: Report) -> dict[str, Figures]:
    """Return the instructions of a request for each case. ``report`` gets the name of each measurement."""
    found = {name: Figures() for name in cases(times)}
    with tempfile.TemporaryDirectory(prefix="bench-") as name, servers.upstream(None) as upstream:
        folder = Path(name)
        before = [
            PROGRAM, "--tool=callgrind", "--instr-atstart=no", "--compress-strings=no", "--compress-pos=no",
            f"--callgrind-out-file={folder / 'counted'}",
        ]  # fmt: skip
        starts: dict[str, Callable[[], contextlib.AbstractContextManager[Server]]] = {
            "pass-through": partial(servers.passthrough, None, upstream, before=before),
            "proxy": partial(servers.proxy, None, upstream, folder, compactions.configuration, before=before),
        }
        for side, start in starts.items():
            with start() as server:
                for case_name, case in cases(times).items():
                    report(f"{side}: {case_name}")
                    counted = _count(server, case, folder)
                    (found[case_name].proxy if side == "proxy" else found[case_name].passthrough).update(counted)
    return found


def _count(server: Server, case: Case, folder: Path) -> Counter[str]:
    """Return the instructions of a request by part."""
    requests = case.requests()
    # The first request may load the tokenizer, which goes on after its response.
    for times in (1, case.warm_up):
        _send(server, requests, times, case.at_once)
    _control("--instr=on", server)
    _control("--zero", server)
    _send(server, requests, case.times, case.at_once)
    _control("--dump", server)
    _control("--instr=off", server)
    newest = max(folder.glob("counted.*"), key=lambda file: file.stat().st_mtime_ns)
    total = parts(newest.read_text(errors="replace").splitlines())
    newest.unlink()
    return Counter({part: round(cost / case.times) for part, cost in total.items()})


def _send(server: Server, requests: Iterator[bytes], times: int, at_once: int) -> None:
    Caller(server).close()
    uvloop.run(concurrent(server, requests, times, at_once))
    before = -REST_SECONDS
    while (now := server.cpu) - before > REST_CPU:
        before = now
        time.sleep(REST_SECONDS)


def _control(action: str, server: Server) -> None:
    subprocess.run([CONTROL, action, str(server.pid)], check=True, capture_output=True)


def parts(lines: Sequence[str]) -> Counter[str]:
    """Return the instructions in a file of callgrind by part, without those of called functions."""
    found: Counter[str] = Counter()
    library = source = ""
    after_call = False
    for line in lines:
        if line[:1].isdigit():
            if not after_call:  # After a line with ``calls=`` come the instructions of the called function.
                found[part(library, source)] += int(line.split()[1])
            after_call = False
        elif line.startswith("ob="):
            library = line[3:]
        elif line.startswith(("fl=", "fi=", "fe=")):
            source = line[3:]
        elif line.startswith("calls="):
            after_call = True
    return found


def part(library: str, source: str) -> str:
    """Return the name of a part of the C code, by its library and its source file."""
    if (package := _PACKAGE.search(library)) is not None:
        return package[1]
    name = library.rsplit("/", 1)[-1].split(".")[0]
    if "/lib-dynload/" in library:
        return "asyncio" if name == "_asyncio" else "standard library"
    if name.startswith(("libpython", "python")):
        return REGEX if "/_sre" in source else INTERPRETER
    return name.split("-")[0] if name.startswith("lib") else OTHERS


def divided(found: Mapping[str, Figures], report: Report) -> dict[str, Counter[str]]:
    """Return the proxy's instructions by layer. Those of the interpreter are divided by the bytecodes of each layer."""
    report("bytecodes")
    executed = calls.count_all(bytecodes=True)
    layers = {}
    for name, figures in found.items():
        counted = Counter(figures.proxy)
        left = counted.pop(INTERPRETER)
        bytecodes = calls.by_layer(executed[name.removesuffix(f", {AT_ONCE} at once")][1])
        for layer, number in bytecodes.items():
            counted[layer] += round(left * number / bytecodes.total())
        layers[name] = counted
    return layers


def table(found: Mapping[str, Figures], layers: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Return the rows of the table in thousands of instructions, the layers with the largest shares first."""
    totals = {name: figures.proxy.total() for name, figures in found.items()}
    rows = [
        ["pass-through", *(_thousands(figures.passthrough.total()) for figures in found.values())],
        ["proxy", *(_thousands(total) for total in totals.values())],
    ]
    names = {layer for counted in layers.values() for layer in counted}
    large = [
        each
        for each in names - {OTHERS}
        if any(counted[each] > LIMIT * totals[name] for name, counted in layers.items())
    ]
    order = sorted(large, key=lambda each: -max(layers[name][each] / totals[name] for name in layers))
    rows += [[layer, *(_thousands(counted[layer]) for counted in layers.values())] for layer in order]
    rest = (sum(counted[each] for each in names - set(large)) for counted in layers.values())
    return [*rows, [OTHERS, *(_thousands(number) for number in rest)]]


def _thousands(number: int) -> str:
    return f"{number / 1e3:,.0f}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Few requests of each kind.")
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures to FILE.")
def main(quick: bool, markdown: bool, file: Path | None) -> None:
    """Count the instructions of fixed requests for the proxy and the pass-through, and print the proxy's by layer.

    This takes minutes, because callgrind makes programs 50 times slower.
    """
    if shutil.which(PROGRAM) is None or shutil.which(CONTROL) is None:
        raise click.ClickException(MISSING)
    console = Console(width=max(150, Console().width))
    progress = Console(stderr=True)
    found = measure(AT_ONCE if quick else 8 * AT_ONCE, progress.print)
    layers = divided(found, progress.print)
    rows = table(found, layers)
    if markdown:
        print("| layer |" + "".join(f" {name} |" for name in found))
        print("| --- |" + " ---: |" * len(found))
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    else:
        shown = Table("layer", title="Thousands of instructions of a request")
        for name in found:
            shown.add_column(name, justify="right")
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
    sides = {name: {"proxy": each.proxy, "passthrough": each.passthrough} for name, each in found.items()}
    write_json(file, {name: {**side, "layers": layers[name]} for name, side in sides.items()})


if __name__ == "__main__":
    main()
