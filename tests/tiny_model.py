"""A tiny random Llama with a byte-level tokenizer that vLLM can serve on a CPU. Built by the tests, never fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 384
"""256 bytes, the special tokens, and padding up to a multiple of 64."""

END_TOKEN_ID = 257


def build_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    num_layers: int = 2,
    max_positions: int = 2048,
) -> Path:
    """Write a model and its tokenizer below `directory` and return it. About 0.5 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=256,
        eos_token_id=END_TOKEN_ID,
        pad_token_id=END_TOKEN_ID,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory


def write_byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose token i is byte i, with begin (256), end (257) and two chat markers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(0x21, 0x7F)] + [chr(code) for code in range(0xA1, 0xAD)]
    letters += [chr(code) for code in range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    alphabet = {}
    for byte in range(256):
        letter = chr(byte)
        alphabet[letter if letter in letters else chr(next(spare))] = byte
    vocabulary = {**alphabet, "<s>": 256, "</s>": 257, "<|user|>": 258, "<|assistant|>": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    wrapped.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    wrapped.save_pretrained(directory)


def state_of(directory: Path) -> dict[str, Any]:
    """Return name -> tensor of the model in a directory, as its checkpoint has them."""
    from safetensors.torch import load_file

    return dict(load_file(directory / "model.safetensors"))


def config_of(directory: Path) -> dict[str, Any]:
    """Return the model's configuration."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config
