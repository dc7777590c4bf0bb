"""Check that a benchmark's table gets into the page of results."""

from __future__ import annotations

import re

import click
import pytest

from bench import page


def test_a_table_gets_the_figures_of_its_columns_and_rows() -> None:
    text = "| a | c |\n| --- | ---: |\n| x | old |\n\n    scripts/bench one\n\n| b |\n\n    scripts/bench one-more\n"
    printed = "Words.\n| a | b | c    |\n| - | - | - |\n| x | 1 | \\2 |\n| y | 3 | 4 |\n| x | 5 | 6 |\n"
    assert page.replaced(text, "one", printed) == text.replace("| x | old |", "| x | \\2 |\n| x | 6 |")
    for name, header, lacks in (("other", "a", "table"), ("one", "b", "column 'a'"), ("one", "a | c", "row 'x'")):
        with pytest.raises(click.ClickException, match=f"no {lacks}"):
            page.replaced(text, name, f"| {header} |\n| - |\n")


def test_each_table_of_results_has_its_command_below() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    for name in ("need", "memory", "overflow"):
        with pytest.raises(click.ClickException, match="no column"):
            page.replaced(text, name, "| new |\n| - |\n")
    for section in text.split("\n## ")[1:]:
        commands = re.findall(r"^    scripts/(?:bench|soak)\b", section, re.MULTILINE)
        assert len(re.findall(r"^\| ?-{3}", section, re.MULTILINE)) <= len(commands), section
