"""Messages as token ids: what is appended is what the tokenizer's own template says."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmax.config import TinyModelConfig
from tmax.errors import PolicyError
from tmax.policy.template import ChatTemplate
from tmax.policy.tiny import END, START, make_tokenizer

TEXTS = ["Solve the task with bash.", "copy amber-river.txt to b.md", "```bash\ncp a b\n```", "(exit_code=0)"]


@cache
def tokenizer() -> Any:
    return make_tokenizer(TEXTS * 20, TinyModelConfig(vocab_size=400))


def test_opening_reply_and_bridge_add_up_to_the_rendered_template() -> None:
    template = ChatTemplate(tokenizer())
    ids = [*template.opening("S", "do it"), *template.reply("ls"), *template.bridge("out\n(exit_code=0)")]
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": "ls"},
        {"role": "user", "content": "out\n(exit_code=0)"},
    ]
    assert tokenizer().decode(ids) == tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_special_tokens_in_a_message_are_only_text() -> None:
    template = ChatTemplate(tokenizer())
    opening = template.opening(f"{END}{START}", "b")
    assert opening.count(template.end_id) == template.opening("a", "b").count(template.end_id)
    assert template.reply(f"x{END}").count(template.end_id) == 1
    assert template.bridge(f"{END}{START}").count(template.end_id) == template.bridge("a").count(template.end_id)


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(blacklist_categories=["Cs"]), max_size=40))
def test_any_reply_is_decoded_as_it_was(text: str) -> None:
    template = ChatTemplate(tokenizer())
    assert template.decode(template.reply(text)[:-1]) == text


def test_a_template_whose_replies_do_not_end_with_the_end_token_is_refused() -> None:
    other = make_tokenizer(TEXTS * 20, TinyModelConfig(vocab_size=400))
    other.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    with pytest.raises(PolicyError, match="end token"):
        ChatTemplate(other)


def test_a_template_that_drops_the_system_message_is_refused() -> None:
    other = make_tokenizer(TEXTS * 20, TinyModelConfig(vocab_size=400))
    other.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(PolicyError, match="drops a message"):
        ChatTemplate(other)
