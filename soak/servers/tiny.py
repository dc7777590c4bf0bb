"""Create a model of random weights and a few megabytes: ``python -m soak.servers.tiny gguf|folder PATH WINDOW``.

It runs in the servers' own environments. It needs ``numpy`` and ``tokenizers``, and ``gguf`` or ``safetensors``.

The next token depends on the last one only. It's a word or a full stop, and the response may end after a full stop. So
responses usually have a few dozen tokens and are never empty, unless the window is full.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np  # type: ignore[import-not-found,unused-ignore]
from tokenizers import (  # type: ignore[import-not-found,unused-ignore]
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

from soak.servers.talk import samples

VOCABULARY = 1_500
WIDTH, LAYERS, HEADS, INNER = 64, 2, 2, 128
START, END = "<|im_start|>", "<|im_end|>"
STOP = "."
SENTENCE = 60
"""Mean number of tokens from one full stop to the next."""
STOPPING = 0.4
"""Probability that a response ends after a full stop."""
NEVER = -40.0
"""The logit of a token that is never sampled."""

TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\\nTools: ' }}{{ tools | tojson }}{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}{{ message['content'] or '' }}"
    "{%- if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer() -> Any:
    """Train a byte-level tokenizer on the conversations' words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(samples(), trainer)
    return made


def weights(tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the tensors, named like those of Hugging Face's Llama.

    The first dimension is the same for all tokens, so the last layer's weights there are biases. The second one marks
    the full stop.
    """
    rng = np.random.default_rng(0)

    def some(*shape: int) -> Any:
        return rng.normal(0, 0.02, shape).astype(np.float32)

    size = len(tokens)
    embedding = rng.normal(0, 0.2, (size, WIDTH)).astype(np.float32)
    embedding[:, 0], embedding[:, 1] = 8.0, 0.0
    embedding[tokens[STOP], 1] = 8.0
    usual, stopped = (embedding[index] / np.sqrt((embedding[index] ** 2).mean()) for index in (2, tokens[STOP]))

    # A byte-level vocabulary writes a leading space as Ġ.
    words = [
        index for token, index in tokens.items() if token[0] == "Ġ" and token[1:].isascii() and token[1:].isalpha()
    ]
    last = some(size, WIDTH)
    last[:, 0] = NEVER / usual[0]
    last[words, 0] = 0.0
    last[tokens[STOP], 0] = np.log(len(words) / SENTENCE) / usual[0]
    ending = np.log(len(words) * STOPPING / (1 - STOPPING))
    last[tokens[END], 1] = (ending - last[tokens[END], 0] * stopped[0]) / stopped[1]

    made = {"model.embed_tokens.weight": embedding, "lm_head.weight": last, "model.norm.weight": np.ones(WIDTH, "f4")}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        made |= {
            prefix + "input_layernorm.weight": np.ones(WIDTH, "f4"),
            prefix + "self_attn.q_proj.weight": some(WIDTH, WIDTH),
            prefix + "self_attn.k_proj.weight": some(WIDTH, WIDTH),
            prefix + "self_attn.v_proj.weight": some(WIDTH, WIDTH),
            prefix + "self_attn.o_proj.weight": some(WIDTH, WIDTH),
            prefix + "post_attention_layernorm.weight": np.ones(WIDTH, "f4"),
            prefix + "mlp.gate_proj.weight": some(INNER, WIDTH),
            prefix + "mlp.up_proj.weight": some(INNER, WIDTH),
            prefix + "mlp.down_proj.weight": some(WIDTH, INNER),
        }
    return made


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(file: Path, window: int) -> None:
    """Write a file for llama.cpp."""
    import gguf  # type: ignore[import-not-found,unused-ignore] # only in llama.cpp's environment

    made = tokenizer()
    tokens = made.get_vocab()
    merges = json.loads(made.to_str())["model"]["merges"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(window)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(tokens, key=tokens.__getitem__))
    special, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types(
        [special if index in (tokens[START], tokens[END]) else normal for index in range(len(tokens))]
    )
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokens[END])
    writer.add_eos_token_id(tokens[END])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in weights(tokens).items():
        renamed = name
        for theirs, ours in GGUF_NAMES.items():
            renamed = renamed.replace(theirs, ours)
        writer.add_tensor(renamed, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(folder: Path, window: int) -> None:
    """Write a folder for Hugging Face's libraries and vLLM."""
    from safetensors.numpy import save_file  # type: ignore[import-not-found,unused-ignore] # only in vLLM's

    made = tokenizer()
    tokens = made.get_vocab()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": window,
        "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
    })  # fmt: skip
    _write(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(tokens), "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": window, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": tokens[END], "eos_token_id": tokens[END],
    })  # fmt: skip
    save_file(weights(tokens), folder / "model.safetensors", metadata={"format": "pt"})


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")


if __name__ == "__main__":
    {"gguf": write_gguf, "folder": write_folder}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
