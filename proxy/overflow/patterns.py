"""The wordings of overflow errors: one row for each family of messages.

Each pattern matches a message in lower case, on one line, without embedded JSON and quoted values. The first matching
row counts, so exact rows come before general ones. Placeholders in a pattern:

    <limit> <counted> <output>   the token counts that ``OverflowReading`` has under the same names
    <over>                       the tokens by which the prompt exceeds the limit
    <n>                          a number without a role
    (?P<least>...)               matches if the counted size is only a lower bound
    (?P<parts>...)               a list of sizes with their purposes

Numbers match possessively and gaps are bounded, so a search takes linear time in the length of the message.
``source`` names the servers with this wording. "general" rows cover other servers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from proxy.overflow.matching import Row, row

CODES: Mapping[str, str] = {
    "context_length_exceeded": "OpenAI, Azure, Groq, Cerebras, llama-cpp-python, LiteLLM",
    "context_window_exceeded": "general",
    "contextwindowexceedederror": "LiteLLM",
    "exceed_context_size_error": "llama.cpp",
    "model_max_prompt_tokens_exceeded": "GitHub Copilot",
    "tokens_limit_reached": "GitHub Models, Azure",
    "too_many_prompt_tokens": "Perplexity",
    "outofcontexterror": "Volcengine",
    "context_exceeded": "DS4",
    "tokens_too_long": "Qianfan, Modelverse",
    "characters_too_long": "Qianfan",
    "content_length_exceeds_threshold": "Amazon Q",
    "message_length_exceeds_limit": "ChatGPT",
    "user_message_too_long": "Poe",
    "prompt_too_long": "Aleph Alpha",
    "prompt_limit": "Claude relay",
    "input_too_long": "general",
    "context_too_long": "general",
    "max_context_length_exceeded": "general",
    "model_context_window_exceeded": "Anthropic",
    "context_length_error": "general",
    "context_overflow": "general",
    "prompt_tokens_exceeded": "general",
    "input_tokens_exceeded": "general",
}
"""Codes of overflow errors, in lower case, and the servers that send them. Mistral's 3051 and MiniMax's 2013 aren't
listed because these servers also send them for other errors."""

CODE_SHAPE = re.compile(
    r"^(?!.*(?:rate|quota|output|completion|minute|day|image|file|audio|video|usage|budget|credit|deadline|batch|"
    r"string|array|tool|name|key|schema|stop|body|upload|retr|timeout))"
    r".*(?:(?:context|prompt|input|conversation)(?:_[a-z]+){0,3}_(?:exceed\w*|overflow\w*|too_(?:long|large|big|many\w*))"
    r"|(?:context|prompt|input)_?(?:length|window|tokens?|size)_(?:error|limit(?:_reached)?)$"
    r"|exceed(?:s|ed)?(?:_[a-z]+){0,2}_(?:context|prompt|input)"
    r"|too_(?:many|long)(?:_[a-z]+){0,2}_(?:context|prompt|input)"
    r"|(?:tokens?|characters?|messages?)_too_long"
    r"|(?:content|message)_length_exceed)"
)
"""The form of unlisted codes of overflow errors, in lower case with underscores."""

ROWS: tuple[Row, ...] = (
    # OpenAI's sentence and its variants.
    row(
        "vLLM",
        r"<window>however, you requested <output> output tokens "
        r"and your prompt contains (?P<least>at least )?<counted> input",
        "input_plus_output",
    ),
    row(
        "vLLM",
        r"<window>however, you requested <output> output tokens and your prompt contains <n> characters",
        "input_plus_output",
    ),
    # vLLM doesn't tokenize such a long text. The next number repeats the limit.
    row("vLLM", r"<window>however, your (?:prompt|request|input) contains <n> characters"),
    row(
        "OpenAI, Azure, DeepSeek, llama-cpp-python, OpenRouter",
        r"<window>however,? you requested (?:about )?<n> tokens \((?P<parts>[^)]{1,300})\)",
        "input_plus_output",
    ),
    row("vLLM before 0.6", r"<window>however, you requested <counted> tokens in the (?:messages|input|prompt)"),
    row(
        "OpenAI, vLLM",
        r"<window>however, your (?:messages|prompt|request|input) (?:resulted in|has|contains|contain) "
        r"(?P<least>at least )?<counted>(?: input)? tokens",
    ),
    row("SambaNova", r"<window>however, answering your request will take <n>", "input_plus_output"),
    row(
        "SGLang",
        r"<window>you requested a total of <n> tokens: <counted> tokens from the input messages and <output> tokens",
        "input_plus_output",
    ),
    row(
        "Volcengine",
        r"requested token count exceeds the model's maximum context length of <limit>",
        "input_plus_output",
        figures=True,
    ),
    row(
        "vLLM",
        r"you passed (?P<least>at least )?<counted> input tokens and requested <output> output tokens\. however, "
        r"the model's context length is only <limit> tokens",
        "input_plus_output",
    ),
    # OpenAI's newer sentences.
    row(
        "OpenAI, Azure",
        r"exceed the configured limit of <limit> tokens\W{1,3}your messages resulted in <counted>",
        scope="input",
    ),
    row("GitHub Models", r"too large for [\w./:-]{1,80} model\W{1,3}max size: <limit> tokens", scope="input"),
    row("GitHub Copilot", r"prompt token count of <counted> exceeds the limit of <limit>", scope="input"),
    # Anthropic, also through Bedrock and gateways.
    row("Anthropic", r"prompt is too long: <counted> tokens > <limit> maximum"),
    row("Anthropic", r"exceed context limit: <counted> \+ <output> > <limit>", "input_plus_output"),
    row("Anthropic", r"max_tokens: <output> > context_window: <limit> - input_tokens: <counted>", "input_plus_output"),
    row("Anthropic", r"input and output tokens exceed your context limit", "input_plus_output"),
    row("Bedrock", r"max input tokens: <limit>, request input token count: <counted>", scope="input"),
    row("Bedrock", r"#/(?:inputtext|prompt|inputs?): expected maxlength: <n>"),
    # Google.
    row(
        "Gemini, Vertex",
        r"input token count (?:is )?\(?<counted>\)?,? (?:but (?:the )?model only supports up to"
        r"|exceeds the maximum number of(?: input)? tokens allowed|exceeds the maximum) \(?<limit>",
        scope="input",
    ),
    row(
        "Gemini",
        r"token count exceeds the maximum number of(?: input)? tokens allowed(?: of)? ?\(?<limit>",
        scope="input",
    ),
    row("Gemini", r"cannot truncate to <limit>, required <counted>", scope="input"),
    row(
        "Vertex",
        r"(?:request|prompt|input) contains <counted> tokens, which exceeds the (?:limit|maximum) of <limit>",
        scope="input",
    ),
    # Mistral.
    row(
        "Mistral",
        r"prompt contains <counted> tokens and max_tokens is <output>, too large for model with <limit>",
        "input_plus_output",
    ),
    row("Mistral", r"prompt contains <counted> tokens(?: and <n> draft tokens)?, too large for model with <limit>"),
    row("Mistral", r"prompt <counted> > <limit> maximum context length"),
    # Cohere.
    row("Cohere", r"size limit exceeded by <over> tokens.{1,120}limit for this model is <limit>"),
    row("Cohere", r"tokens in the prompt cannot exceed <limit> - received <counted>", scope="input"),
    # Text Generation Inference, which Together, Hugging Face, and Predibase use.
    row(
        "TGI",
        r"inputs` tokens \+ `max_new_tokens` must be <= <limit>\W{1,3}given: <counted> `?inputs`? tokens and <output>",
        "input_plus_output",
    ),
    row("TGI", r"inputs` must have less than <limit> tokens\W{1,3}given: <counted>", scope="input"),
    # Servers of open models.
    row(
        "vLLM",
        r"decoder prompt \(length <counted>\) plus the number of requested output tokens \(at least <output>\) "
        r"is longer than the maximum model length of <limit>",
        "input_plus_output",
    ),
    row(
        "vLLM",
        r"prompt \((?:total )?length <counted>\) is "
        r"(?:longer than the maximum model length of|too long to fit into the model \(context length) <limit>",
    ),
    row("vLLM", r"input prompt \(<counted> tokens\) is too long and exceeds (?:the )?(?:limit|capacity) of <limit>"),
    row("vLLM", r"input length \(<counted>\) exceeds (?:the )?model's maximum context length \(<limit>"),
    row("SGLang", r"input \(<counted> tokens\) is longer than the model's context length \(<limit>"),
    row("SGLang", r"input length \(<counted> tokens\) exceeds the maximum allowed length \(<limit>", scope="input"),
    row("SGLang", r"multimodal prompt is too long.{1,120}=> <counted> >= <limit>", scope="input"),
    row(
        "llama.cpp",
        r"(?:request|input|prompt) \(<counted> tokens\) (?:exceeds|is larger than) the "
        r"(?:available |max )?context size \(<limit>",
    ),
    row("LocalAI", r"request \(<counted> tokens\) exceeds (?:the )?context size \(<limit>"),
    row("llama.cpp", r"exceeds the available context size"),
    row("llama.cpp, LM Studio", r"context size has been exceeded", "input_plus_output", remedy="compact"),
    row("llama.cpp", r"input \(<counted> tokens\) is too large to process"),
    row("llama-cpp-python", r"requested tokens \(<counted>\) exceed context window of <limit>"),
    row("LM Studio", r"keep the (?P<least>first) <counted> tokens.{1,120}context length of only <limit> tokens"),
    row("LM Studio", r"n_(?P<least>keep): <counted> >= n_ctx: <limit>"),
    row("LM Studio", r"tokens to keep from the initial prompt is greater than the context length"),
    row(
        "TensorRT-LLM",
        r"prompt length \(<counted>\), query length \(<n>\) and max_tokens \(<output>\) "
        r"should not exceed \w{1,30} \(<limit>",
        "input_plus_output",
    ),
    row(
        "TensorRT-LLM",
        r"prompt length \(<counted>\), query length \(<n>\)[^(]{1,40}max_num_tokens \(<limit>",
        scope="input",
    ),
    row(
        "TensorRT-LLM, DeepInfra, Hugging Face",
        r"(?:prompt|input) length \(?<counted>\)? exceeds (?:the )?maximum input length \(?<limit>",
        scope="input",
    ),
    row(
        "SiliconFlow", r"length of prompt_tokens \(<counted>\) must be less than max_(?:seq_len|total_tokens) \(<limit>"
    ),
    row("TabbyAPI", r"prompt length <counted> is greater than (?:max_seq_len|the context length) <limit>"),
    row("Ollama", r"prompt too long; exceeded max context length by <n> tokens"),
    row(
        "MLC", r"prompt has <counted> tokens in total, larger than the model input length limit <limit>", scope="input"
    ),
    row("Xinference", r"token budget <n> exceeds context limit <limit>", "input_plus_output"),
    row(
        "Xinference", r"prompt has <counted> tokens, but (?:the )?(?:configured )?context[ _](?:size|length) is <limit>"
    ),
    row("Kronk", r"input tokens \[<counted>\] exceed context window \[<limit>"),
    row("Kronk", r"context window is full"),
    # Other providers.
    row("xAI", r"maximum prompt length is <limit> but the request contains <counted> tokens"),
    row(
        "Cerebras",
        r"reduce the length of the messages or completion\W{1,3}current length is <counted> while limit is <limit>",
    ),
    row("Fireworks", r"prompt is too long: <counted>, model maximum context length: <limit>"),
    row("watsonx", r"number of input tokens <counted> cannot exceed the total tokens limit <limit>"),
    row(
        "Cloudflare",
        r"input and maximum output tokens \(<n>\) exceeded this model context window limit \(<limit>",
        "input_plus_output",
    ),
    row("DeepSeek", r"prompt tokens \+ max_tokens exceeds? the model context limit", "input_plus_output"),
    row("Vercel", r"input too long: <counted> input tokens, limit is <limit>", scope="input"),
    row("Moonshot", r"exceeded model token limit ?: ?<limit> \(requested: <counted>"),
    row("Moonshot", r"exceeded model token limit ?: ?<limit>", "input_plus_output"),
    row("Moonshot", r"input token length too long"),
    row("Qwen", r"range of input length should be \[<n>, ?<limit>\]", scope="input"),
    row("Hunyuan", r"prompt tokens <counted> exceed max input tokens <limit>", scope="input"),
    row("Hunyuan", r"输入.{0,12}(?:过长|超).{0,30}限制 ?<limit> ?tokens?", scope="input"),
    row(
        "Chinese services",
        r"(?:输入|上下文|提示词?|对话|历史|会话|消息|文本|内容|请求长度|(?<![a-z_])prompt|(?<![a-z_])tokens?)[^。;，,]{0,16}"
        r"(?:过长|太长|超长|超出|超过|超限|大于)"
        r"|(?:超出|超过)[^。;，,]{0,10}(?:上下文|输入长度|最大长度|(?<![a-z_])tokens? ?限制)"
        r"|(?:压缩|缩短|精简|减少)(?:上下文|输入|对话|提示)",
        figures=True,
    ),
    row(
        "general, in other languages",
        r"(?:コンテキスト|プロンプト|入力|トークン)[^。]{0,16}(?:超え|超過|長すぎ)"
        r"|(?:컨텍스트|프롬프트|입력|토큰)[^.]{0,16}(?:초과|너무 (?:길|깁)|넘)"
        r"|слишком (?:много токенов|длинн\w{0,3} (?:запрос|промпт|контекст))"
        r"|(?:запрос|промпт|контекст|токенов)[^.]{0,30}(?:превыша|превышен|слишком длин)",
        figures=True,
    ),
    row("Volcengine", r"exceed max message tokens"),
    row("Z.ai", r"prompt exceeds max length|tokens? in (?:the )?request more than max tokens? allowed"),
    row("MiniMax", r"context window exceeds limit"),
    row("Replicate", r"max input length is <limit> tokens, but you supplied <counted>", scope="input"),
    row("AI21", r"too many tokens\W{1,3}total tokens: <counted>, maximum: <limit>"),
    row(
        "Aleph Alpha",
        r"request has <counted> tokens\W{1,3}this is longer than the model's maximum context length of <limit>",
    ),
    row("Perplexity", r"total length of all messages is too long"),
    row("LiteLLM", r"max input tokens=<limit>, got=<counted>", scope="input"),
    row("YandexGPT", r"number of input tokens must be no more than <limit>(?:, got <counted>)?", scope="input"),
    row("Anyscale", r"rec(?:ei|ie)ved <counted> tokens, but the maximum input length is <limit>", scope="input"),
    row(
        "SiliconFlow",
        r"number of input tokens \(<counted>\) has exceeded max_prompt_tokens \(<limit>",
        scope="input",
    ),
    row("Snowflake", r"^max tokens of <limit> exceeded"),
    row("Apple", r"provided <counted> tokens, but the maximum allowed is <limit>", scope="input"),
    row("Bedrock", r"^[^#]{0,60}expected maxlength: <n>, actual"),
    row("LM Studio", r"reached context length of <limit> tokens", "input_plus_output", remedy="compact"),
    row("Qianfan, YandexGPT", r"\binput characters?(?: limit)?(?: is|:)|\btext length is <n>, which is outside"),
    row("Qianfan", r"\binput token limit is <limit>", scope="input"),
    # General: the words of an overflow, and a number if its place shows its role.
    row("general", r"maximum context length (?:is|of) <limit>(?: tokens)?\W{0,3}(?:$|please reduce)", figures=True),
    row("general", r"^[^.;]{0,40}\bmodel's maximum context length is <limit>(?: tokens)?\b", figures=True),
    row(
        "Databricks, general",
        r"(?:prompt|input) tokens? count \(<counted>\) (?:cannot exceed|exceeds)[^\d.;]{1,40}<limit>",
        scope="input",
    ),
    row("general", r"tokens in the prompt exceeds? the model's maximum context length of <limit>"),
    row(
        "general",
        r"(?:combined length|sum|total) of (?:the )?(?:prompt|input)[^.;]{1,30} max_(?:new_)?tokens[^.;]{0,30}exceed",
        "input_plus_output",
        figures=True,
    ),
    row(
        "Together, general",
        r"(?:inputs?|prompt)`?(?: tokens?)?(?: count)?`? ?\+ ?`?max_(?:new_|completion_|output_)?tokens`?[^.;]{0,30}"
        r"(?:exceed|must be|larger than|greater than|longer than)",
        "input_plus_output",
        figures=True,
    ),
    row(
        "general",
        r"\b(?:input|prompt) (?:tokens? )?(?:count )?(?:limit )?exceed(?:s|ed)?\b|too many (?:input|prompt) tokens"
        r"|number of tokens in (?:the |your )?(?:prompt|input|request)[^.;]{0,30}exceed",
        scope="input",
        figures=True,
    ),
    row(
        "general",
        r"(?:exceed|larger than|longer than|greater than|overflow|surpass|too (?:long|large) for)[^.;]{0,50}"
        r"(?:<context>|max_model_len|n_ctx|max_seq_len|maximum input length|maximum number of (?:input )?tokens)",
        figures=True,
    ),
    row(
        "general",
        r"\b(?:context[ _-]?(?:length|window|size|limit)|n_ctx|max_model_len|max_seq_len)[^.;]{0,30}"
        r"(?:exceeded|overflow|too (?:small|long|large)|reached)|context[_ ]?(?:length|window)[_ ]?exceeded"
        r"|\bcontext[_ ]overflow"
        r"|\blength of (?:all |the |your )?(?:messages|prompt|input|conversation)[^.;]{0,20}exceed"
        r"|\b(?:not enough|insufficient) context\b(?! caching)|\bonly <n> (?:tokens )?(?:fit|are left|are available)\b"
        r"|\b(?:requires?|needs?) (?:a )?(?:larger|bigger|longer|more) context\b"
        r"|\bcontext (?:length|window|size|limit) (?:is|of) [^.;]{1,20}, (?:but )?you(?:r \w{1,12})? "
        r"(?:requested|sent|provided|passed|has|have|needs?)\b",
        figures=True,
    ),
    row(
        "general",
        r"\b(?:prompt|input|conversation|context|messages)(?: tokens| length)? (?:(?:is|are|was) )?too (?:long|large)\b"
        r"|\b(?:prompt|input)s?(?: tokens?)?[ _]?too[ _]?(?:long|large)\b|\b(?:query|text|message)s? too long\b"
        r"|\b(?:prompt|input|message|query|text|request)s?"
        r"(?: (?!(?:ids?|names?|titles?|arrays?|lists?|urls?|headers?|keys?|time\w*|roles?)\b)\w{1,12}){0,3} "
        r"(?:is|was|are|were) (?:much |far )?too long\b"
        r"|\btoo many tokens in (?:the |your )?(?:prompt|input|request|messages|conversation)\b|"
        r"\b(?:prompt|conversation|history|transcript|messages)(?: (?:history|you|sent|provided|is|are|was|has|have|"
        r"been|"
        r"become|grown|got|now|much|far)){0,5} too long\b|\b(?:prompt|input|request) (?:has|contains) too many tokens"
        r"|\brequest (?:is )?too long: <n> tokens|too many tokens: <n> > <n>",
        figures=True,
    ),
    row(
        "general",
        r"\b(?:reduce|shorten) (?:the )?(?:length of )?(?:the |your )?(?:prompt|messages|input|conversation)\b",
        figures=True,
    ),
)
