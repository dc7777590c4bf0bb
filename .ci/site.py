"""Hooks of MkDocs: links that leave docs lead to the repository, and the site serves the JSON Schema."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "proxy" / "config" / "schema.json"
_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Take the addresses from pyproject.toml."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    config["site_url"] = urls["Documentation"]
    config["repo_url"] = urls["Repository"]
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Lead links to files outside docs to the repository. A missing file stays a dead link, which fails the build."""
    docs = Path(config["docs_dir"])

    def leading(found: re.Match[str]) -> str:
        target = (docs / page.file.src_uri).parent.joinpath(found[1]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            return found[0]
        return f"]({config['repo_url']}/blob/main/{target.relative_to(ROOT)}{found[2] or ''})"

    return _LINK.sub(leading, markdown)


def on_post_build(*, config: Any) -> None:
    """Copy the schema for editors."""
    Path(config["site_dir"], SCHEMA.name).write_bytes(SCHEMA.read_bytes())
