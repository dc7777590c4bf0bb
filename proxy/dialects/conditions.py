"""The conditions of a client's request that hold for each call with its conversation, too.

This is the one place that says which fields and headers go with a summary call. A summary call carries the whole
conversation, so it needs everything that bounds where data may go, says who pays, or says how to ask the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from proxy.constants import UNDECODABLE
from proxy.http.headers import Headers


class Reach(Enum):
    """How far a field or a header goes. The value is the reason."""

    EVERYWHERE = "bounds where the conversation may go and how long it's kept: also at another upstream"
    UPSTREAM = "says who pays, for whom, and how the upstream serves the call: its other models, too"
    API = "as UPSTREAM, but Anthropic's API gives the field another meaning than OpenAI's two APIs"
    MODEL = "says how to ask this model"
    CALM = "says how much to think: only if it says less than usual, because thinking costs output"
    PROMPT = "doesn't go: it's a part of the prompt, and the transcript replaces the prompt"
    ANSWER = "doesn't go: it shapes one answer, its form, its length, or its transport"


def _table(**names: str) -> dict[str, Reach]:
    return {name: Reach[reach] for reach, listed in names.items() for name in listed.split()}


FIELDS: Mapping[str, Reach] = _table(
    EVERYWHERE="store provider inference_geo prompt_cache_retention data_collection zdr",
    UPSTREAM="user safety_identifier user_profile_id workspace_id billing_policy moderation prompt_cache_options",
    API="metadata service_tier speed",
    MODEL="chat_template_kwargs chat_template fallbacks models route",
    CALM="reasoning_effort reasoning thinking enable_thinking thinking_budget",
    PROMPT="model messages input instructions system tools tool_choice functions function_call parallel_tool_calls "
    "max_tool_calls mcp_servers conversation previous_response_id prompt thread container context_management "
    "compaction truncation web_search_options prediction cache_control prompt_cache_key diagnostics "
    "fallback_credit_token betas plugins documents transforms",
    ANSWER="stream stream_options background n best_of stop stop_sequences stop_token_ids ignore_eos min_tokens "
    "max_tokens max_completion_tokens max_output_tokens response_format output_format output_config text verbosity "
    "modalities audio include logprobs top_logprobs prompt_logprobs logit_bias echo seed temperature top_p top_k min_p "
    "top_a typical_p frequency_penalty presence_penalty repetition_penalty length_penalty use_beam_search guided_json "
    "guided_regex guided_choice guided_grammar structured_outputs regex ebnf grammar json_schema "
    "add_generation_prompt continue_final_message",
)
"""The fields of the APIs and of common servers. Any other field goes as ``UPSTREAM``: it may be a condition, and the
upstream accepts it in the same API."""

HEADERS: Mapping[str, Reach] = _table(
    EVERYWHERE="cf-aig-collect-log cf-aig-skip-cache helicone-omit-request helicone-omit-response",
    MODEL="anthropic-beta",
    ANSWER="accept accept-encoding content-type idempotency-key x-client-request-id x-request-id "
    "x-stainless-helper-method x-stainless-retry-count x-stainless-read-timeout x-stainless-timeout",
)
"""Headers that clients and gateways use. Any other header goes as ``UPSTREAM``, because it may select an account."""

_CALM = (False, 0, "none", "minimal", "low", "disabled", "off")


@dataclass(frozen=True, slots=True)
class Conditions:
    """The fields and headers of a client's request, which used an API and a model of an upstream."""

    api: str
    fields: Mapping[str, msgspec.Raw]
    headers: Headers
    query: str = ""

    @property
    def need_own_api(self) -> bool:
        """Return whether only the request's own API is sure to understand the fields. OpenAI's two APIs share most."""
        return bool(self.fields) if self.api == "messages" else not self.fields.keys() <= FIELDS.keys()

    @classmethod
    def of(cls, api: str, fields: Mapping[str, msgspec.Raw], headers: Headers, query: str) -> Conditions:
        """Return those of a request. They keep no other bytes of its body in memory."""
        kept = {name: value.copy() for name, value in fields.items() if goes(name) or FIELDS[name] is Reach.CALM}
        if bytes(kept.get("store", b"")) == b"true":
            del kept["store"]  # it permits something, and nothing needs the stored notes
        return cls(api, kept, headers, query)

    def for_call(self, api: str, *, upstream: bool, model: bool) -> Conditions:
        """Return those that hold for a call. ``upstream`` and ``model`` say if it goes to the same ones."""
        reaches = {Reach.EVERYWHERE}
        if upstream:
            reaches |= {Reach.UPSTREAM, *([Reach.API] if (api == "messages") == (self.api == "messages") else [])}
            reaches |= {Reach.MODEL, Reach.CALM} if model else set()
        fields = {
            name: value
            for name, value in self.fields.items()
            if (reach := FIELDS.get(name, Reach.UPSTREAM)) in reaches and (reach is not Reach.CALM or _is_calm(value))
        }
        headers = [pair for pair in self.headers if HEADERS.get(pair[0], Reach.UPSTREAM) in reaches]
        return Conditions(api, fields, headers, self.query if upstream and api == self.api else "")


def goes(name: str) -> bool:
    """Return whether a field is a condition for each call, whatever its value."""
    return FIELDS.get(name, Reach.UPSTREAM) not in (Reach.PROMPT, Reach.ANSWER, Reach.CALM)


NO_CONDITIONS = Conditions("", {}, [])


def _is_calm(value: msgspec.Raw) -> bool:
    """Return whether a value, or one inside of it, turns thinking off or down."""
    try:
        decoded: Any = msgspec.json.decode(value)
    except UNDECODABLE:
        return False
    stated = [decoded.get(name) for name in ("type", "effort", "enabled")] if isinstance(decoded, dict) else [decoded]
    return any(one in _CALM for one in stated)
