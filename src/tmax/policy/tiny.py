"""Makes a tiny policy from nothing: a byte-level BPE tokenizer trained on given texts and a small transformer.

The rule: the same texts, sizes and seed give the same tokenizer and the same weights.
"""

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tmax.config import TinyModelConfig

START, END = "<|im_start|>", "<|im_end|>"

_PIECES = r" ?[A-Za-z]+-?|[._/][A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s+"
"""Words with the space before and the hyphen after them, endings with their dot, digits, runs of signs, spaces."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(texts: Iterable[str], config: TinyModelConfig) -> Any:
    """Train a byte-level BPE tokenizer whose chat template keeps every message as it is."""
    tokenizer = Tokenizer(models.BPE())
    # A name such as ` amber-river.txt` falls into ` amber-`, `river` and `.txt`: few pieces, each followed by the
    # same next one wherever the name stands, which is what a small model needs to copy it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=config.max_context,
        clean_up_tokenization_spaces=False,
    )


def make_model(config: TinyModelConfig, tokenizer: Any, *, seed: int) -> Any:
    """A Qwen3-shaped transformer with tied embeddings and random weights drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=config.hidden_size,
                intermediate_size=3 * config.hidden_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_heads,
                head_dim=config.hidden_size // config.num_heads,
                max_position_embeddings=config.max_context,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=int(tokenizer.eos_token_id),
                pad_token_id=int(tokenizer.pad_token_id),
                use_cache=True,
                initializer_range=config.hidden_size**-0.5,
            )
        )
