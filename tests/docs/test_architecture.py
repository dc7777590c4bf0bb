"""docs/architecture.md and docs/design: short pages, all of them linked, with the rooms that the code has."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
DESIGN = ROOT / "docs" / "design"
MOST_WORDS = 1_500
PAGES = [ARCHITECTURE, *sorted(DESIGN.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_enough_to_read_at_once(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_architecture_links_each_page_of_the_design() -> None:
    linked = re.findall(r"\]\(design/([\w-]+\.md)\)", ARCHITECTURE.read_text(encoding="utf-8"))
    assert {*linked} == {page.name for page in DESIGN.glob("*.md")}


def layers() -> list[set[str]]:
    """Return the packages of each layer, from top to bottom."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (found,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["proxy"])
    return [{name.strip() for name in layer.split("|")} for layer in found]


def test_the_rooms_are_the_packages_in_the_order_of_their_layers() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    section = text[text.index("## Rooms") : text.index("## Rules")]
    rooms = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    place = {name: number for number, layer in enumerate(layers()) for name in layer}
    assert sorted(rooms) == sorted(place)
    assert [place[room] for room in rooms] == sorted(place.values())
