"""Refusals from public reports. Each case names its project and issue, and the edits that the refusal asks for."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.upstream.refusals import read
from proxy.upstream.traits import (
    ALTERNATING,
    LABELLED_MEDIA,
    SHORT_IDS,
    STREAMS,
    WITH_REASONING,
    WITHOUT_EMPTY,
    WITHOUT_REASONING,
    WITHOUT_SYSTEM,
    Edit,
    apply,
    known,
)

_CALL = {"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}

CHAT: dict[str, Any] = {
    "model": "prod-thinker",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "look"}, _IMAGE]},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "Well.", "reasoning_content": "Hm."},
        {"role": "user", "content": "and"},
        {"role": "user", "content": "now"},
    ],
    "max_tokens": 64_000,
    "temperature": 0.2,
    "top_p": 0.9,
    "user": "someone",
    "stop": ["a", "b", "c", "d", "e"],
    "tools": [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning_effort": "minimal",
    "stream": True,
    "stream_options": {"include_usage": True},
    "service_tier": "flex",
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "input": [{"role": "user", "content": "hi"}],
    "max_output_tokens": 10,
    "reasoning": {"effort": "minimal"},
    "text": {"verbosity": "low"},
    "store": False,
}


def _error(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", **fields}}


def _without(path: str) -> tuple[Edit, ...]:
    return (Edit("without", path),)


def _google(*names: str) -> list[Any]:
    said = [f'Invalid JSON payload received. Unknown name "{name}": Cannot find field.' for name in names]
    violations = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": []}
    violations["fieldViolations"] = [{"description": one} for one in said]  # type: ignore[assignment]
    return [{"error": {"code": 400, "message": "\n".join(said), "status": "INVALID_ARGUMENT", "details": [violations]}}]


CASES: Mapping[str, tuple[Any, dict[str, Any], tuple[Edit, ...]]] = {
    # Users' ids
    "looplj/axonhub #1669, a shorter limit": (
        _error("Invalid 'user': string too long. Expected a string with maximum length 4, but got 7.", param="user"),
        CHAT,
        (Edit("shortened", "user", 4),),
    ),
    "aattaran/deepclaude #17": (
        _error("Invalid 'user': string does not match pattern. Expected a string that matches '^[a-zA-Z0-9_-]+$'."),
        CHAT,
        _without("user"),
    ),
    "ujisati/claude-code-provider-proxy #11": (
        {"detail": [{"loc": ["body", "user"], "msg": "String should have at most 6 characters", "input": "someone"}]},
        CHAT,
        (Edit("shortened", "user", 6),),
    ),
    # Reasoning in the history
    "janhq/jan #8136, Groq": (
        _error(
            "'messages.5' : for 'role:assistant' the following must be satisfied[('messages.5' : "
            "property 'reasoning_content' is unsupported)]"
        ),
        CHAT,
        (WITHOUT_REASONING,),
    ),
    "vercel/ai #8057, Groq": (
        _error("messages[5].reasoning: reasoning is not supported with this model"),
        CHAT,
        (WITHOUT_REASONING,),
    ),
    "vllm-project/vllm #10463": (
        {
            "object": "error",
            "message": "[{'type': 'extra_forbidden', 'loc': ('body', 'messages', 5, 'typed-dict', "
            "'reasoning_content'), 'msg': 'Extra inputs are not permitted', 'input': 'Hm.'}]",
        },
        CHAT,
        (WITHOUT_REASONING,),
    ),
    "mastra-ai/mastra #12592, Moonshot": (
        _error("thinking is enabled but reasoning_content is missing in assistant tool call message at index 2"),
        CHAT,
        (WITH_REASONING,),
    ),
    "OnesoftQwQ/opencode-go-copilot #1, Moonshot behind a gateway": (
        {
            "error": {
                "message": "Error from provider: Provider returned error",
                "metadata": {"raw": json.dumps(_error("thinking is enabled but reasoning_content is missing"))},
            }
        },
        CHAT,
        (WITH_REASONING,),
    ),
    "edison7009/EchoBird #38, DeepSeek": (
        _error("The reasoning_content in the thinking mode must be passed back to the API."),
        CHAT,
        (WITH_REASONING,),
    ),
    "gptme/gptme #918, DeepSeek": (
        _error("Missing `reasoning_content` field in the assistant message at message index 2."),
        CHAT,
        (WITH_REASONING,),
    ),
    # The output's field
    "anomalyco/opencode #37964, Azure": (
        _error(
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'.",
            param="max_tokens",
        ),
        CHAT,
        (Edit("renamed", "max_tokens", "max_completion_tokens"),),
    ),
    "openai/openai-python #1724, Azure": (
        _error("Unrecognized request argument supplied: max_completion_tokens", param=None),
        {"max_completion_tokens": 100},
        (Edit("renamed", "max_completion_tokens", "max_tokens"),),
    ),
    "owndev/Open-WebUI-Functions #136, Azure": (
        {"error": {"message": "Unsupported parameter: 'max_tokens'.", "param": "max_tokens"}},
        CHAT,
        (Edit("renamed", "max_tokens", "max_completion_tokens"),),
    ),
    # The usage of a stream
    "modelscope/ms-agent #489, vLLM": (
        {
            "object": "error",
            "message": "[{'type': 'extra_forbidden', 'loc': ('body', 'stream_options'), 'msg': 'Extra inputs are not "
            "permitted', 'input': {}}]",
        },
        CHAT,
        _without("stream_options"),
    ),
    "gpustack/gpustack #429": (
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options", "include_usage"], "msg": "Extra"}]},
        CHAT,
        _without("stream_options.include_usage"),
    ),
    "openai/openai-agents-python #442": (
        _error("Unknown parameter: 'stream_options'.", param="stream_options", code="unknown_parameter"),
        CHAT,
        _without("stream_options"),
    ),
    # Roles
    "charmbracelet/crush #279, Mistral behind OpenRouter": (
        {"message": "Provider returned error", "metadata": {"raw": "Unexpected role 'user' after role 'tool'"}},
        CHAT,
        (ALTERNATING,),
    ),
    "vllm-project/vllm #6862": (
        {
            "object": "error",
            "message": "After the optional system message, conversation roles must alternate user/assistant/user/",
        },
        CHAT,
        (ALTERNATING,),
    ),
    "huggingface/smolagents #757, Mistral": (
        {"object": "error", "message": "Expected last role User or Tool (or Assistant with prefix True) for serving"},
        CHAT,
        (ALTERNATING,),
    ),
    "microsoft/autogen #1037, a template without system messages": (
        {"error": "System role not supported"},
        CHAT,
        (WITHOUT_SYSTEM,),
    ),
    "BerriAI/litellm #5671, OpenAI": (
        _error(
            "Unsupported value: 'messages[0].role' does not support 'system' with this model.",
            param="messages[0].role",
        ),
        CHAT,
        (WITHOUT_SYSTEM,),
    ),
    # Efforts
    "anomalyco/opencode #4451": (
        _error(
            "Unsupported value: 'minimal' is not supported with the 'gpt-5.1' model. Supported values are: 'none', "
            "'low', 'medium', and 'high'.",
            param="reasoning.effort",
        ),
        RESPONSES,
        (Edit("nearest", "reasoning.effort", ("none", "low", "medium", "high")),),
    ),
    "the same of a gateway for chat completions": (
        _error("Unsupported value: 'minimal'. Supported values are: 'low' and 'high'.", param="reasoning.effort"),
        CHAT,
        (Edit("nearest", "reasoning_effort", ("low", "high")),),
    ),
    "Kilo-Org/cloud #3807, Moonshot": (
        _error(
            "Unsupported value: 'reasoning_effort' does not support 'none' with this model. Supported values are: "
            "'minimal', 'low', 'medium', and 'high'."
        ),
        {"reasoning_effort": "none"},
        (Edit("nearest", "reasoning_effort", ("minimal", "low", "medium", "high")),),
    ),
    "earendil-works/pi #1745, Groq": (
        _error("`reasoning_effort` must be one of `none` or `default`"),
        CHAT,
        (Edit("nearest", "reasoning_effort", ("none", "default")),),
    ),
    "ollama/ollama #12561": (
        {"error": {"message": 'think value "medium" is not supported for this model', "type": "api_error"}},
        CHAT,
        _without("reasoning_effort"),
    ),
    "Gitlawb/openclaude #1371, Ollama": (
        _error('"llama3.1:8b" does not support thinking', param=None),
        CHAT,
        _without("reasoning_effort"),
    ),
    # Sampling
    "microsoft/vscode #274315, Azure": (
        _error(
            "Unsupported value: 'temperature' does not support 0.2 with this model. Only the default (1) value is "
            "supported.",
            param="temperature",
        ),
        CHAT,
        _without("temperature"),
    ),
    "HKUDS/nanobot #202, Moonshot": (
        _error("invalid temperature: only 1 is allowed for this model"),
        CHAT,
        _without("temperature"),
    ),
    "BerriAI/litellm #15070, Bedrock": (
        {"message": "The model returned the following errors: `temperature` and `top_p` cannot both be specified."},
        CHAT,
        _without("temperature"),
    ),
    "evalstate/fast-agent #279": (
        _error("Unsupported parameter: 'parallel_tool_calls' is not supported with this model."),
        CHAT,
        _without("parallel_tool_calls"),
    ),
    "pingcap/autoflow #574, Bedrock": (
        {
            "message": 'Malformed input request: #: subject must not be valid against schema {"required":["messages"]}'
            "#: extraneous key [top_p] is not permitted, please reformat your input and try again."
        },
        CHAT,
        _without("top_p"),
    ),
    "MinLL/SkyrimNet-GamePlugin #77, Gemini": (
        _google("service_tier", "top_k", "frequency_penalty"),
        CHAT,
        _without("service_tier"),
    ),
    "miaoxworld/NativeTavern #83, xAI": (
        {"code": "invalid-argument", "error": "Model grok-4.6 does not support parameter reasoningEffort."},
        CHAT,
        _without("reasoning_effort"),
    ),
    "NousResearch/hermes-agent #23435, xAI": (
        {"code": "invalid-argument", "error": "Model grok-4-0709 does not support parameter reasoningEffort."},
        RESPONSES,
        _without("reasoning.effort"),
    ),
    "n8n-io/n8n #14581, xAI": (
        {"code": "Client specified an invalid argument", "error": "Argument not supported on this model: topP"},
        CHAT,
        _without("top_p"),
    ),
    "agentscope-ai/QwenPaw #5065": (
        _error("field MaxTokens invalid, should be in [1, 8192]", param="max_tokens", code="3"),
        CHAT,
        (Edit("lowered", "max_tokens", 8192),),
    ),
    "QuantumNous/new-api #353, Baidu": (
        {"error_msg": "parameter check failed, max_output_tokens range is [2, 2048]"},
        {"max_output_tokens": 4096},
        (Edit("lowered", "max_output_tokens", 2048),),
    ),
    "AQBot-Desktop/AQBot #93, a sentence as the parameter": (
        _error("Param Incorrect", param="max_tokens is too large: 64000. This model supports at most 1024 tokens."),
        CHAT,
        (Edit("lowered", "max_tokens", 1024),),
    ),
    "MetaGLM/glm-cookbook #24, Zhipu": (
        {"error": {"code": "1210", "message": "max_tokens参数非法。取值范围是 [1, 1024]。请检查文档"}},
        CHAT,
        (Edit("lowered", "max_tokens", 1024),),
    ),
    "vercel/ai #5171, ids of another provider": (
        _error(
            "Invalid 'messages[2].tool_calls[0].id': string too long. Expected a string with maximum length 40.",
            param="messages[2].tool_calls[0].id",
        ),
        CHAT,
        (SHORT_IDS,),
    ),
    "a list of fields that has tool_choice": (
        _error("messages[5]: unknown field `reasoning_content`, expected one of `role`, `content`, `tool_choice`"),
        CHAT,
        (WITHOUT_REASONING,),
    ),
    "forced calls that thinking excludes, Alibaba": (
        _error("The tool_choice parameter does not support being set to required or object in thinking mode"),
        {**CHAT, "tool_choice": "required"},
        _without("reasoning_effort"),
    ),
    # Stop sequences
    "QwenLM/Qwen-Agent #228, Azure": (
        _error(
            "Invalid 'stop': array too long. Expected an array with maximum length 4, but got an array with length 5 "
            "instead.",
            param="stop",
            code="array_above_max_length",
        ),
        CHAT,
        (Edit("shortened", "stop", 4),),
    ),
    "langchain-ai/langchain #20234, Azure": (
        _error("'$.stop' is invalid. Please check the API reference: https://example.com.", param=None),
        CHAT,
        _without("stop"),
    ),
    "FlowiseAI/Flowise #5046": (
        _error("Unsupported parameter: 'stop' is not supported with this model."),
        CHAT,
        _without("stop"),
    ),
    # Outputs
    "vectorize-io/hindsight #58, Azure behind OpenRouter": (
        {
            "error": {
                "message": "Provider returned error",
                "metadata": {
                    "raw": json.dumps(
                        _error(
                            "Invalid 'max_output_tokens': integer below minimum value. Expected a value >= 16, but got "
                            "10 instead.",
                            param="max_output_tokens",
                        )
                    )
                },
            }
        },
        {"max_tokens": 10},
        (Edit("raised", "max_tokens", 16),),
    ),
    "wm94i/Work-Review #41": (
        _error("Invalid 'max_output_tokens': integer below minimum value. Expected a value >=16, but got 5 instead."),
        RESPONSES,
        (Edit("raised", "max_output_tokens", 16),),
    ),
    "nickscamara/open-deep-research #19, DeepSeek": (
        _error("Invalid max_tokens value, the valid range of max_tokens is [1, 8192]"),
        CHAT,
        (Edit("lowered", "max_tokens", 8192),),
    ),
    "Groq": (
        _error("`max_tokens` must be less than or equal to `8192`, the maximum value for `max_tokens`"),
        CHAT,
        (Edit("lowered", "max_tokens", 8192),),
    ),
    "Anthropic's compatible endpoint": (
        _error("max_tokens: 64000 > 32000, which is the maximum allowed number of output tokens for claude-3-7"),
        CHAT,
        (Edit("lowered", "max_tokens", 32000),),
    ),
    "Wei-Shaw/sub2api #3954": ({"detail": "Unsupported parameter: max_output_tokens"}, RESPONSES, ()),
    # Budgets of thinking
    "themaximalist/llm.js #30, Anthropic": (
        _error("thinking.enabled.budget_tokens: Input should be greater than or equal to 1024"),
        CHAT,
        _without("reasoning_effort"),
    ),
    "BerriAI/litellm #27051, Anthropic": (
        _error("`max_tokens` must be greater than `thinking.budget_tokens`."),
        CHAT,
        _without("reasoning_effort"),
    ),
    "ENTERPILOT/GoModel #45, Anthropic": (
        _error("`temperature` may only be set to 1 when thinking is enabled."),
        CHAT,
        _without("temperature"),
    ),
    # Empty messages
    "BerriAI/litellm #42186, Moonshot": (_error("Invalid request: text content is empty"), CHAT, (WITHOUT_EMPTY,)),
    "NousResearch/hermes-agent #9486, Bedrock": (
        {"message": "ValidationException: messages: text content blocks must be non-empty"},
        CHAT,
        (WITHOUT_EMPTY,),
    ),
    "anomalyco/opencode #38778, DeepSeek": (
        _error("messages.2: all messages must have non-empty content except for the optional final assistant message"),
        CHAT,
        (WITHOUT_EMPTY,),
    ),
    "carlrobertoh/ProxyAI #834, DeepSeek": (
        _error("Invalid assistant message: content or tool_calls must be set"),
        CHAT,
        (WITHOUT_EMPTY,),
    ),
    # Media
    "Mangi-11/Eta #62, DeepSeek": (
        _error(
            "Failed to deserialize the JSON body into the target type: messages[1]: unknown variant `image_url`, "
            "expected `text` at line 1 column 802043",
            code="invalid_request_error",
        ),
        CHAT,
        (LABELLED_MEDIA,),
    ),
    "OpenCoworkAI/open-cowork #251, Ollama": (
        {"error": "this model does not support image input"},
        CHAT,
        (LABELLED_MEDIA,),
    ),
    "ggml-org/llama.cpp #15377": (
        {"error": {"code": 500, "message": "image input is not supported - hint: you may need to provide the mmproj"}},
        CHAT,
        (LABELLED_MEDIA,),
    ),
    "ggml-org/llama.cpp #12947": (
        {
            "error": {
                "code": 500,
                "message": 'Failed to parse messages: Unsupported content part type: "image_url"; messages = '
                + json.dumps(CHAT["messages"], indent=2),
            }
        },
        CHAT,
        (LABELLED_MEDIA,),
    ),
    "BerriAI/litellm #9905, DeepSeek": (
        _error("Failed to deserialize the JSON body: messages[1]: invalid type: sequence, expected a string"),
        CHAT,
        (LABELLED_MEDIA,),
    ),
    # Streams
    "infiniflow/ragflow #5912, Alibaba": (
        _error("This model only support stream mode, please enable the stream parameter to access the model. "),
        {**CHAT, "stream": False},
        (STREAMS,),
    ),
    "leookun/cursor-byok #14": ({"detail": "Stream must be set to true"}, {**CHAT, "stream": False}, (STREAMS,)),
    "langgenius/dify #8615": (
        _error("Unsupported value: 'stream' does not support true with this model.", param="stream"),
        CHAT,
        (),
    ),
    # What must stay
    "Ollama, a model without tools": (_error('"gemma3" does not support tools'), CHAT, ()),
    "musistudio/claude-code-router #187, Gemini": (
        _error(
            'Invalid JSON payload received. Unknown name "additionalProperties" at \'tools[0].function_declarations'
            "[3].parameters': Cannot find field."
        ),
        CHAT,
        (),
    ),
}


@pytest.mark.parametrize("source", CASES)
def test_a_public_refusal_is_understood(source: str) -> None:
    refusal, sent, edits = CASES[source]
    raw = json.dumps(sent, separators=(",", ":")).encode()
    assert read(json.dumps(refusal).encode(), sent, raw) == edits
    body = json.loads(raw)
    assert len(apply(body, edits)) == len(edits)


@pytest.mark.parametrize("source", CASES)
def test_the_same_words_as_a_text_ask_for_the_same(source: str) -> None:
    """Gateways put the original error into their own message."""
    refusal, sent, edits = CASES[source]
    raw = json.dumps(sent, separators=(",", ":")).encode()
    wrapped = json.dumps(_error(f"Error from provider: {json.dumps(refusal)}", param=None)).encode()
    assert read(wrapped, sent, raw) == edits


def test_an_effort_becomes_the_nearest_one_and_some_thinking_stays() -> None:
    for value, allowed, made in (
        ("minimal", ("none", "low", "high"), "low"),
        ("minimal", ("none", "default"), "default"),
        ("xhigh", ("low", "medium", "high"), "high"),
        ("none", ("minimal", "low"), "minimal"),
        ("low", ("none",), "none"),
    ):
        body = {"reasoning_effort": value}
        apply(body, [Edit("nearest", "reasoning_effort", allowed)])
        assert body["reasoning_effort"] == made


HABITS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "maximhq/bifrost #1000": ("gpt-5", {"user": "x" * 180}, "shortened user"),
    "looplj/axonhub #1669": ("glm-5", {"user": "x" * 180}, "shortened user"),
    "QuantumNous/new-api #2438": ("gpt-5", {"max_output_tokens": 10}, "raised max_output_tokens"),
    "NousResearch/hermes-agent #20154": ("mistralai/mistral-small-4-119b", CHAT, "alternating, short_ids"),
    "aliou/pi-neuralwatt #12": ("Devstral-Small-2-24B-Instruct-2512", CHAT, "alternating, short_ids"),
}
"""Public habits: a model's name, a request, and the edit that it needs from the first request on."""


@pytest.mark.parametrize("source", HABITS)
def test_a_public_habit_of_a_family_is_known(source: str) -> None:
    family, sent, edit = HABITS[source]
    assert apply(json.loads(json.dumps(sent)), known(family)) == tuple(edit.split(", "))
