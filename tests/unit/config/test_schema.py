"""Test that the JSON Schema and the example file match the settings."""

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from proxy.config import load
from proxy.config.document import Node, parse
from proxy.config.policy import ModelOverride
from proxy.config.settings import WrittenSettings
from tests.docs.config_schema import SCHEMA_FILE, schema_text
from tests.kit.configurations import check

EXAMPLE = Path(__file__).parents[3] / "config.example.yaml"


def paths(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return the paths of all settings. ``*`` means any name or index."""
    for name, field in model.model_fields.items():
        here = (*above, name)
        yield here
        for section, inside in sections(field.annotation):
            if issubclass(section, ModelOverride):  # the settings of a policy once more
                yield (*here, "*", "match")
                continue
            yield from paths(section, (*here, "*") if inside else here)


def sections(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yield the sections in an annotation, and whether they're in a mapping or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
    for argument in get_args(annotation):
        for section, inside in sections(argument):
            yield section, inside or get_origin(annotation) not in (Union, types.UnionType)


def stated(node: Node, path: tuple[str, ...]) -> bool:
    if not path:
        return True
    if path[0] == "*":
        return any(stated(value, path[1:]) for value in [*node.settings.values(), *node.items])
    return path[0] in node.settings and stated(node.settings[path[0]], path[1:])


def test_the_example_shows_every_setting() -> None:
    example = parse(EXAMPLE.read_bytes())
    assert [".".join(path) for path in paths(WrittenSettings) if not stated(example, path)] == []


def test_the_example_loads_with_nothing_but_a_key() -> None:
    found = load(EXAMPLE, {"OPENAI_API_KEY": "sk-test"})
    assert set(found.upstreams) == {"main", "local"}
    assert found.policies["careful"].keep != found.policies["default"].keep


def test_what_the_example_states_as_defaults_are_the_defaults() -> None:
    example = load(EXAMPLE, {"OPENAI_API_KEY": "sk-test"})
    defaults = load(None, {})
    assert example.server == defaults.server
    ours = example.policies["default"]
    assert ours.summary.model == "gpt-4o-mini"
    same = ours.model_copy(update={"summary": ours.summary.model_copy(update={"model": None})})
    assert same.model_dump() == defaults.policies["default"].model_dump()


@pytest.mark.long
def test_the_schema_is_the_one_that_is_published() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "run: python -m tests.docs.reference"


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_schema_takes_the_example(validator: Any) -> None:
    assert list(validator.iter_errors(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("policies: {a: {trigger: [[tokens, 4000], {messages: 3}]}}", False),
        ("policies: {a: {trigger: [fraction, 0.5]}}", False),
        ("policies: {a: {trigger: null}}", True),
        ("policies: {a: {trigger: {fraction: 1.5}}}", False),
        ("policies: {a: {keep: {tokens: 1, messages: 1}}}", False),
        ("policies: {a: {reserve_output: 5}}", True),
        ("policies: {a: {reserve_output: {messages: 5}}}", False),
        ("server: {port: '${PORT}'}", True),
        ("server: {port: http}", False),
        ("sevrer: {}", False),
        ("models: [{match: a}]", False),
    ],
)
def test_the_schema_agrees_with_the_loader(validator: Any, text: str, valid: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert (list(validator.iter_errors(yaml.safe_load(text))) == []) is valid
    assert (check(file, {"PORT": "1"}) == []) is valid


def test_every_setting_explains_itself() -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    sections = schema["$defs"]

    def explained(stated: Any) -> bool:
        return "description" in stated or explained(sections[stated["$ref"].rsplit("/", 1)[-1]])

    listed = [one for section in (schema, *sections.values()) for one in section.get("properties", {}).items()]
    assert len(listed) > 100
    assert [name for name, stated in listed if not explained(stated)] == []
