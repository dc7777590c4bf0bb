"""The section `summary` of a policy, and its checks together with other settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

from pydantic import field_validator

from proxy.config.checks import Finding, overlap, policies_of
from proxy.config.document import shown
from proxy.config.fields import Count, Seconds, Section, Text, wrong
from proxy.config.patterns import Pattern
from proxy.config.policy import Policy
from proxy.config.sections import PolicySection
from proxy.config.settings import Settings, WrittenSettings
from proxy.summary.writers import Method


class SummarySettings(Section):
    """The call to the summary model."""

    main: ClassVar[str | None] = "model"

    method: Method = "transcript"
    model: Text | None = None
    """The model that writes summaries: a name that `models` routes. Default: the conversation's own model."""
    fallback_model: Text | None = None
    """The model to try once if the first one fails. Default: none."""
    prompt: Text | None = None
    """The instruction to the model. The conversation replaces `{messages}`. Default: the built-in instruction."""
    trim_tokens_to_summarize: Count | None = None
    """Summarize only this many of the newest tokens. Default: everything, in chunks that fit the model."""
    max_tokens: Count = 4000
    """Maximum tokens of a summary."""
    timeout: Seconds = 45
    """Seconds that a request waits for one model, all chunks together. Then the fallback, then a digest. The last
    model's call continues in the background."""
    role: Literal["user", "assistant", "system", "developer"] = "user"
    """The role of the message that contains the summary."""
    redact_secrets: bool = False
    """Remove keys, tokens, and passwords from the text that the summary model receives."""
    redact: tuple[Pattern, ...] = ()
    """Regular expressions for more text to remove."""

    @field_validator("prompt")
    @classmethod
    def _has_place_for_messages(cls, prompt: str | None) -> str | None:
        if prompt is not None and "{messages}" not in prompt:
            raise wrong(
                "must hold {messages}, the place of the conversation",
                fix="add a line {messages} to the prompt",
                shows=False,
            )
        return prompt

    @property
    def redacts(self) -> bool:
        """Return whether the summary model gets less than the whole text."""
        return self.redact_secrets or bool(self.redact)


def _models(summary: SummarySettings) -> Iterable[str | None]:
    return summary.model, summary.fallback_model


def _redaction(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    for path, policy, _ in policies_of(written, settings):
        summary = policy.section(SummarySettings)
        if summary.method == "continue" and summary.redacts:
            problem = "continue sends the conversation as it is, so redact and redact_secrets have no effect"
            yield (*path, "summary", "method"), problem, "method: transcript, or no redaction"


def _warnings(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    if settings.models:
        yield from _unrouted(written, settings)
    yield from _forbidden(settings)


def _unrouted(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    for path, _, stated in policies_of(written, settings):
        for key, model in zip(("model", "fallback_model"), _models(stated.section(SummarySettings)), strict=True):
            if model is not None and settings.route(model) is None:
                problem = f"no route of 'models' matches '{shown(model)}', so it makes no summary"
                fix = f'correct the name, or add a route: {{match: "{shown(model)}", upstream: NAME}}'
                yield (*path, "summary", key), problem, fix


def _forbidden(settings: Settings) -> Iterator[Finding]:
    """Find teams whose policy names a model for summaries that they may not use."""
    for name, team in settings.teams.items():
        for model in forbidden_summary_models(settings, name):
            if (route := settings.route(model)) is None:
                continue
            problem = (
                f"policy '{team.policy}' names '{shown(model)}' at upstream '{route.upstream}' for summaries, which "
                f"team '{name}' may not use, so the proxy doesn't send this model the team's conversations"
            )
            yield (
                ("teams", name, "models"),
                problem,
                f'add "{shown(model)}", or give the team a policy with another one',
            )


def forbidden_summary_models(settings: Settings, team: str, policy: Policy | None = None) -> list[str]:
    """Return the models that a team's policy names for summaries and that the team may not use.

    ``policy`` is the one for a model; without it, all that may apply to the team's models count.
    """
    globs = settings.teams[team].models
    if not globs:
        return []
    whole = settings.policies[settings.teams[team].policy]
    overrides = [own.policy for own in whole.models if any(overlap(own.match, glob) for glob in globs)]
    policies = [whole, *overrides] if policy is None else [policy]
    named = [model for one in policies for model in _models(one.section(SummarySettings)) if model]
    return [model for model in dict.fromkeys(named) if not any(fnmatchcase(model, glob) for glob in globs)]


SECTION = PolicySection(
    "summary",
    SummarySettings,
    "The call to the summary model.",
    apart=frozenset({"method"}),
    errors=_redaction,
    warnings=_warnings,
    models=_models,
)
