"""Test that sections declared next to features are complete parts of a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
from pydantic import ValidationError

from proxy.compaction.settings import EngineSettings, IndexRules, UserMessageRules
from proxy.compaction.stages import STAGES, DuplicateRules
from proxy.config import Policy, Settings
from proxy.config.fields import Section
from proxy.config.policy import ArchiveSettings, UnknownModelSettings
from proxy.config.sections import engine_section, names, sections
from proxy.recall.tool import RecallSettings
from proxy.summary.settings import SummarySettings


@pytest.mark.parametrize("kind", [*STAGES, IndexRules, UserMessageRules])
def test_the_engine_reads_its_own_defaults(kind: type[EngineSettings]) -> None:
    assert Policy.build("p", {}).section(kind) == kind()


def test_a_section_is_read_by_its_class() -> None:
    policy = Policy.build("p", {"recall": {"max_rounds": 2}, "duplicates": {"min_length": 9, "keep": {"messages": 1}}})
    assert policy.section(RecallSettings).max_rounds == 2
    assert policy.section(DuplicateRules).min_length == 9
    assert policy.section(UnknownModelSettings) == UnknownModelSettings()


def test_a_section_that_is_off_is_none() -> None:
    policy = Policy.build("p", {"archive": None, "duplicates": None})
    assert policy.optional(ArchiveSettings) is None
    assert policy.optional(DuplicateRules) is None
    with pytest.raises(LookupError, match="no section 'archive'"):
        policy.section(ArchiveSettings)


def test_no_section_is_lost_when_settings_are_dumped() -> None:
    dumped = Settings().model_dump()["policies"]["default"]
    assert set(names().values()) <= dumped.keys()
    assert dumped["summary"]["max_tokens"] == SummarySettings().max_tokens


def test_the_setting_that_a_plain_value_means_exists() -> None:
    models = [section.checked_by for section in sections()]
    assert [model for model in models if model.main is not None and model.main not in model.model_fields] == []


def test_the_types_of_the_engine_are_checked() -> None:
    @dataclass(frozen=True, slots=True)
    class Probe(EngineSettings):
        """A section."""

        SECTION: ClassVar[str] = "probe_of_types"
        ABOUT: ClassVar[str] = "A section."

        number: Annotated[int, "A number."] = 3
        texts: Annotated[tuple[str, ...], "Texts."] = ()
        note: Annotated[str | None, "A text."] = None

    made = engine_section(Probe)
    model = made.checked_by
    assert (model.__name__, made.nullable, issubclass(model, Section)) == ("ProbeOfTypes", False, True)
    for wrong in ({"number": 0}, {"number": True}, {"texts": [""]}, {"note": ""}, {"other": 1}):
        with pytest.raises(ValidationError):
            model.model_validate(wrong)
    schema = model.model_json_schema()["properties"]
    assert schema["number"] == {
        "default": 3, "description": "A number.", "exclusiveMinimum": 0, "title": "Number", "type": "integer"
    }  # fmt: skip
