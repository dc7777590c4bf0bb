"""Read a file of callgrind, and check the parts of the C code. No server runs below callgrind here."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import instructions
from bench.instructions import INTERPRETER, REGEX, Figures, Report, parts, table

PYTHON = "/opt/python/lib/libpython3.11.so.1.0"
FILE = f"""\
events: Ir
ob={PYTHON}
fl=Python/ceval.c
fn=_PyEval_EvalFrameDefault
100 7
101 5
cob=/venv/lib/python3.11/site-packages/msgspec/_core.cpython-311-x86_64-linux-gnu.so
cfi=msgspec/_core.c
cfn=decode
calls=3 10
101 900
102 1
fi=./Modules/_sre/sre_lib.h
20 40
fe=Python/ceval.c
103 2
ob=/venv/lib/python3.11/site-packages/msgspec/_core.cpython-311-x86_64-linux-gnu.so
fl=msgspec/_core.c
fn=decode
10 900
ob=/usr/lib/x86_64-linux-gnu/libc.so.6
fl=malloc.c
fn=malloc
1 30
totals: 985
"""


def test_instructions_of_called_functions_are_counted_once() -> None:
    found = parts(FILE.splitlines())
    assert found == {INTERPRETER: 15, REGEX: 40, "msgspec": 900, "libc": 30}
    assert found.total() == 985


def test_small_layers_are_added_up() -> None:
    figures = Figures()
    figures.proxy.update({"a": 900_000, "b": 99_000, "c": 1_000})
    figures.passthrough.update({"a": 500_000})
    rows = table({"chat": figures}, {"chat": figures.proxy})
    assert rows == [["pass-through", "500"], ["proxy", "1,000"], ["a", "900"], ["b", "99"], ["others", "1"]]


def test_without_valgrind_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    def measured(times: int, report: Report) -> None:
        raise AssertionError

    monkeypatch.setattr(instructions, "measure", measured)
    run = CliRunner().invoke(instructions.main)
    assert run.exit_code == 1
    assert run.output == f"Error: {instructions.MISSING}\n"
