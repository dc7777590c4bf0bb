"""Create a software bill of materials in CycloneDX 1.6 from the lock file alone.

The same lock file gives the same bytes, because the list contains neither a time nor data from a package index.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = "requirements-runtime.lock"

_PINNED = re.compile(
    r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[\w,-]+\])?==(?P<version>[^\s;]+)"
    r"(?: ; (?P<marker>[^\\\n]+?))? \\$"
    r"(?P<hashes>(?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?$)+)\n?",
    re.MULTILINE,
)


def components(lock: str) -> list[dict[str, Any]]:
    """Return a component for each package of a lock file. Raises ``ValueError`` for an unknown kind of line."""
    rest = re.sub(r"^ *#.*\n?", "", _PINNED.sub("", lock), flags=re.MULTILINE).strip()
    if rest:
        raise ValueError(f"not a package with hashes: {rest.splitlines()[0]}")
    return [_component(found) for found in _PINNED.finditer(lock)]


def _component(found: re.Match[str]) -> dict[str, Any]:
    name = re.sub(r"[-_.]+", "-", found["name"]).lower()
    # The version of a purl must not contain + or !.
    version = found["version"].replace("+", "%2B").replace("!", "%21")
    purl = f"pkg:pypi/{name}@{version}"
    # The lock file has the hashes of all files of a package. pip installs one of them.
    hashes = re.findall(r"sha256:([0-9a-f]{64})", found["hashes"])
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": found["version"],
        "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": content} for content in hashes],
    }
    if found["marker"]:
        component |= {"scope": "optional", "properties": [{"name": "python:marker", "value": found["marker"].strip()}]}
    return component


def bill(lock: str, project: dict[str, Any]) -> dict[str, Any]:
    """Return the whole list. ``project`` is the table of that name in pyproject.toml, with the version."""
    digest = hashlib.sha256(lock.encode()).hexdigest()
    own = f"{project['name']}@{project['version']}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{own}#{digest}')}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
            },
            "properties": [{"name": "lock:sha256", "value": digest}],
        },
        "components": components(lock),
    }


def _version(module: str) -> str:
    """Return ``__version__`` without importing the package."""
    found = re.search(r'^__version__ = "(.+)"', module, re.MULTILINE)
    if found is None:
        raise ValueError("proxy/constants.py: __version__ is missing")
    return found[1]


def main(arguments: list[str]) -> None:
    """Write the list to the file given as argument, or to standard output."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    project["version"] = _version((ROOT / "proxy" / "constants.py").read_text(encoding="utf-8"))
    text = json.dumps(bill((ROOT / LOCK).read_text(encoding="utf-8"), project), indent=2) + "\n"
    if arguments:
        Path(arguments[0]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
