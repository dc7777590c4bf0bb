"""Test that the sections of a policy have the engine's fields and defaults."""

from dataclasses import asdict
from typing import Any

import pytest

from proxy.compaction.settings import IndexRules, UserMessageRules
from proxy.compaction.stages import STAGES
from proxy.config import Policy, Settings
from proxy.config.fields import Section


@pytest.mark.parametrize(
    ("section", "kind"),
    [*((stage.SECTION, stage) for stage in STAGES), ("index", IndexRules), ("user_messages", UserMessageRules)],
)
def test_the_engine_has_the_defaults_of_its_section(section: str, kind: Any) -> None:
    assert dict(getattr(Policy.build("p", {}), section)) == {name: getattr(kind(), name) for name in asdict(kind())}


def test_no_section_is_lost_when_settings_are_dumped() -> None:
    dumped = Settings().model_dump()["policies"]["default"]
    assert dumped["summary"]["max_tokens"] == Policy().summary.max_tokens
    assert dumped["duplicates"]["min_length"] == 200


def test_the_setting_that_a_plain_value_means_exists() -> None:
    sections = [one.default for one in Policy.model_fields.values() if isinstance(one.default, Section)]
    assert [one for one in sections if one.main is not None and one.main not in type(one).model_fields] == []
    assert len(sections) > 10
