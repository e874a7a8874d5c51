"""Conversations -> ids and response mask, with the real tokenizer of the embedded model and templates of every kind."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.model.checkpoints.sources import BUILTIN
from hamburger.training.corpus.conversation import (
    TokenizedConversation,
    answer_ids,
    end_token_id,
    prompt_ids,
    tokenize_conversation,
)
from hamburger.training.corpus.prompts import Message
from hamburger.training.errors import TrainingError

END = 2  # <|im_end|>
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
ENDLESS = CHATML.replace("<|im_end|>", "")
# As reasoning models do: only the last answer keeps all of its text.
REWRITING = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else m.content[:3] }}")
REAL = Tokenizer.load(BUILTIN)
BACKEND = tokenizers.Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))


def with_template(template: str) -> Tokenizer:
    return Tokenizer(BACKEND, special_tokens={"eos_token": "<|im_end|>"}, chat_templates={"default": template})


def chat(*contents: str) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def trained_texts(tokenizer: Tokenizer, conversation: TokenizedConversation) -> list[str]:
    """The text of each run of trained tokens."""
    texts, run = [], list[int]()
    for token_id, is_trained in [*zip(conversation.token_ids, conversation.response, strict=True), (0, False)]:
        if is_trained:
            run.append(token_id)
        elif run:
            texts.append(tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return texts


def test_one_turn_is_asked_as_the_server_asks() -> None:
    messages = chat("Hi!", "Hello.\n\nHow are you?")
    conversation = tokenize_conversation(REAL, messages, end_token_ids=[END])
    prompt = prompt_ids(REAL, messages[:1])
    assert conversation.token_ids[: len(prompt)] == prompt
    assert conversation.response.index(True) == len(prompt)
    assert trained_texts(REAL, conversation) == ["Hello.\n\nHow are you?<|im_end|>"]
    assert REAL.decode(conversation.token_ids[-2:], skip_special_tokens=False) == "<|im_end|>\n"
    assert conversation.response[-2:] == [True, False]  # the template's newline is never trained


def test_every_turn_or_the_last() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *chat("One?", "1", "Two?", "2", "Three?", "3")]
    whole = REAL.encode(REAL.apply_chat_template([dict(m) for m in messages], add_generation_prompt=False))
    everything = tokenize_conversation(REAL, messages, end_token_ids=[END], train_on="all")
    last = tokenize_conversation(REAL, messages, end_token_ids=[END])
    assert everything.token_ids == last.token_ids == whole
    assert trained_texts(REAL, everything) == ["1<|im_end|>", "2<|im_end|>", "3<|im_end|>"]
    assert trained_texts(REAL, last) == ["3<|im_end|>"]


def test_ids_that_the_model_wrote_are_taken_as_they_are() -> None:
    written = [REAL.encode(" Hel")[0], REAL.encode("lo")[0]]  # not how the tokenizer would write it
    conversation = tokenize_conversation(REAL, chat("Hi!"), end_token_ids=[END], answer=written)
    assert conversation.token_ids == prompt_ids(REAL, chat("Hi!")) + written
    asked = [5, 6, 7]
    conversation = tokenize_conversation(REAL, chat("Hi!"), end_token_ids=[END], answer=[8, END], prompt=asked)
    assert conversation == TokenizedConversation([5, 6, 7, 8, END], [False] * 3 + [True] * 2)


def test_an_answer_after_earlier_turns() -> None:
    turns = chat("One?", "1", "Two?")
    for train_on, texts in (("last", ["2<|im_end|>"]), ("all", ["1<|im_end|>", "2<|im_end|>"])):
        conversation = tokenize_conversation(
            REAL,
            turns,
            end_token_ids=[END],
            answer=answer_ids(REAL, "2", is_finished=True, end_token_ids=[END]),
            prompt=prompt_ids(REAL, turns),
            train_on="all" if train_on == "all" else "last",
        )
        assert trained_texts(REAL, conversation) == texts
        assert conversation.token_ids[: -len(REAL.encode("2")) - 1] == prompt_ids(REAL, turns)


# The embedded model's vocabulary lacks some bytes, those of control characters among them.
_TEXTS = st.text(
    st.characters(codec="utf-8", max_codepoint=0x17FF, exclude_categories=["C"]) | st.just("\n"), max_size=20
)


@given(st.lists(st.tuples(_TEXTS, _TEXTS), min_size=1, max_size=3))
def test_any_conversation_keeps_its_text_and_trains_its_answers(turns: list[tuple[str, str]]) -> None:
    messages = chat(*(content for turn in turns for content in turn))
    conversation = tokenize_conversation(REAL, messages, end_token_ids=[END], train_on="all")
    text = REAL.apply_chat_template([dict(m) for m in messages], add_generation_prompt=False)
    assert REAL.decode(conversation.token_ids, skip_special_tokens=False) == text
    assert trained_texts(REAL, conversation) == [answer + "<|im_end|>" for _, answer in turns]
    assert len(conversation.token_ids) == len(conversation.response)


def test_an_answer_that_would_grow_together_with_the_prompt_keeps_its_border() -> None:
    conversation = tokenize_conversation(REAL, chat("Hi!", "\n\nHello"), end_token_ids=[END])
    prompt = prompt_ids(REAL, chat("Hi!"))
    assert conversation.token_ids[: len(prompt)] == prompt
    assert trained_texts(REAL, conversation) == ["\n\nHello<|im_end|>"]


def test_an_end_token_written_out_in_an_answer_does_not_end_it() -> None:
    conversation = tokenize_conversation(REAL, chat("Hi!", "a<|im_end|>b"), end_token_ids=[END])
    assert trained_texts(REAL, conversation) == ["a<|im_end|>b<|im_end|>"]


def test_a_template_that_trims_is_followed() -> None:
    tokenizer = with_template(TRIMMED)
    conversation = tokenize_conversation(
        tokenizer, chat(" a ", " b ", "c", " d\n"), end_token_ids=[END], train_on="all"
    )
    assert trained_texts(tokenizer, conversation) == ["b<|im_end|>", "d<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = with_template(REWRITING)
    messages = chat("One?", "a long answer", "Two?", "another one")
    with pytest.raises(TrainingError, match="rewrites earlier turns when message 2 is added"):
        tokenize_conversation(tokenizer, messages, end_token_ids=[END], train_on="all")
    answer = tokenizer.encode("fine")
    conversation = tokenize_conversation(tokenizer, messages[:3], end_token_ids=[END], answer=answer)
    assert conversation.token_ids == prompt_ids(tokenizer, messages[:3]) + answer


def test_a_template_without_end_token_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"no end token of the model after an answer \(2\)"):
        tokenize_conversation(with_template(ENDLESS), chat("Hi!", "Hello"), end_token_ids=[END])


@pytest.mark.parametrize("messages", [[], chat("Hi!"), chat("Hi!", "Hello", "Bye")])
def test_a_conversation_without_answer_is_refused(messages: list[Message]) -> None:
    with pytest.raises(TrainingError, match="the last message must be the assistant's"):
        tokenize_conversation(REAL, messages, end_token_ids=[END])


def test_nothing_to_learn_is_refused() -> None:
    with pytest.raises(TrainingError, match="the answer has no token"):
        tokenize_conversation(REAL, chat("Hi!"), end_token_ids=[END], answer=[])
    with pytest.raises(TrainingError, match="no prompt"):
        tokenize_conversation(REAL, chat("Hi!"), end_token_ids=[END], answer=[5], prompt=[])


def test_which_token_ends_an_answer() -> None:
    assert end_token_id(REAL, [0, END]) == END  # the tokenizer's own, if the model knows it
    assert end_token_id(REAL, [7, 5]) == 5
    assert end_token_id(REAL, []) == END
    nameless = Tokenizer(BACKEND, special_tokens={}, chat_templates={})
    with pytest.raises(TrainingError, match="eos_token_id"):
        end_token_id(nameless, [])
    assert answer_ids(REAL, "cut", is_finished=False, end_token_ids=[END]) == REAL.encode("cut")
