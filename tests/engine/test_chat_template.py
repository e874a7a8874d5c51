"""Chat templates: the dialect of transformers, the sandbox, and clear errors."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from hamburger.engine.text import chat_template
from hamburger.engine.text.chat_template import ChatTemplate
from hamburger.engine.types.errors import TokenizerError

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
SIMPLE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
TRIMS = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"


def render(
    source: str,
    messages: list[dict[str, Any]] = HI,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    **variables: Any,
) -> str:
    return ChatTemplate(source).render(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        variables=variables,
    )


def test_generation_prompt() -> None:
    assert render(SIMPLE) == "[user]Hi</s>"
    assert render(SIMPLE, add_generation_prompt=True) == "[user]Hi</s>[a]"


def test_variables_do_not_shadow_the_arguments() -> None:
    assert render("{{ messages[0].content }}{{ mood }}", mood="!") == "Hi!"
    template = ChatTemplate("{{ messages[0].content }}{{ tools }}")
    options = {"add_generation_prompt": False, "continue_final_message": False, "tools": None}
    assert template.render(HI, variables={"messages": [], "tools": 1}, **options) == "HiNone"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\n  {% set x = 1 %}\n{{ x }}\n{% endif %}", "1\n"),  # trim_blocks and lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': '<ü>', 'a': 1} | tojson }}", '{"b": "<ü>", "a": 1}'),
        ("{{ {'b': 2, 'a': 1} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1,\n "b": 2\n}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ documents is none and tools is none }}", "True"),
        ("{{ nothing }}", ""),
    ],
)
def test_dialect(source: str, expected: str) -> None:
    assert render(source) == expected


def test_the_turns_of_gemma() -> None:
    """A system message goes before the first user's; the assistant is called model; turns alternate, or it is said."""
    source = (
        "{{ bos_token }}{% set first = '' %}{% set turns = messages %}"
        "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
        "{% set turns = messages[1:] %}{% endif %}"
        "{% for m in turns %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
        "{{ (first if loop.first else '') + m['content'] | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    asked = [{"role": "system", "content": "Be brief."}, *HI]
    expected = "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert render(source, asked, add_generation_prompt=True, bos_token="<bos>") == expected
    answered = [*HI, {"role": "assistant", "content": "Hello "}]
    assert render(source, answered, continue_final_message=True, bos_token="").endswith("model\nHello")
    with pytest.raises(TokenizerError, match="turns must alternate"):
        render(source, [*HI, *HI], bos_token="")


def test_dialect_equals_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = [{"type": "function", "function": {"name": "f", "description": "<a & b> 'ü'"}}]
    chat = [*HI, {"role": "assistant", "content": " Once upon "}]
    for source in (SIMPLE, TRIMS, "{{ tools | tojson(indent=2) }}{{ messages[-1].content }}"):
        for options in ({"add_generation_prompt": True}, {"continue_final_message": True}):
            (expected,), _ = utils.render_jinja_template([chat], tools=tools, chat_template=source, **options)
            assert render(source, chat, tools=tools, **options) == expected


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (SIMPLE, "Once upon ", "[user]Once upon "),
        (TRIMS, "Once upon ", "[user] Once upon"),
        (TRIMS, "Once upon", "[user] Once upon"),
        ("{% for m in messages %}{{ m.content[-1].text }}.{% endfor %}", [{"type": "text", "text": "Once"}], "Once"),
    ],
)
def test_continue_final_message(source: str, content: Any, expected: str) -> None:
    messages = [{"role": "user", "content": content}]
    assert render(source, messages, continue_final_message=True) == expected
    assert messages == [{"role": "user", "content": content}]


def test_continue_final_message_leaves_the_message_alone() -> None:
    part = {"type": "text", "text": "Once"}
    render("{{ messages[0].content[0].text }}", [{"role": "user", "content": [part]}], continue_final_message=True)
    assert part == {"type": "text", "text": "Once"}


@pytest.mark.parametrize(
    ("source", "messages", "match"),
    [
        (SIMPLE, [], "text content"),
        (SIMPLE, [{"role": "assistant", "content": None}], "text content"),
        (SIMPLE, [{"role": "user", "content": [{"type": "image_url"}]}], "text content"),
        ("constant", HI, "leaves out"),
    ],
)
def test_continue_final_message_errors(source: str, messages: list[dict[str, Any]], match: str) -> None:
    with pytest.raises(TokenizerError, match=match):
        render(source, messages, continue_final_message=True)


def test_continue_excludes_generation_prompt() -> None:
    with pytest.raises(TokenizerError, match="exclude each other"):
        render(SIMPLE, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ 'a' + messages[0].missing }}", "refuses these messages: .*missing"),
        ("{{ 'a' + messages[0] }}", "cannot render these messages"),
        ("{{ messages[0].content | int / 0 }}", "cannot render these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: .*unsafe"),
        ("{{ messages.append(1) }}", "refuses these messages: .*unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "cannot render these messages"),
    ],
)
def test_errors_while_rendering(source: str, match: str) -> None:
    with pytest.raises(TokenizerError, match=match):
        render(source)


def test_invalid_source() -> None:
    template = ChatTemplate("{% for %}")  # whoever asks for no chat is served
    with pytest.raises(TokenizerError, match="not valid jinja"):
        template.compile()
    with pytest.raises(TokenizerError, match="not valid jinja"):
        render("{% do x %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% macro f(n) %}{% if n %}{% call f(n - 1) %}{% endcall %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% for m in [[], []] recursive %}{{ loop([[], []]) }}{% endfor %}",
        "{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** 12 * [0] }}",
        "{{ 7 ** 99999999 }}",
        "{% set text = 'ab' * 1000000 %}{% for i in range(9999) %}{{ text }}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_TURNS", 20_000)
    with pytest.raises(TokenizerError, match=r"chat template (refuses|cannot render) these messages"):
        render(source, [{"role": "user", "content": "a"}])


def test_turns_change_nothing_that_a_template_writes() -> None:
    source = (
        "{% macro wrap(m) %}<{{ m.content }}>{% endmacro %}"
        "{% for m in messages if m.content != 'c' %}{{ loop.index }}/{{ loop.length }}{{ wrap(m) }}"
        "{% if loop.last %}.{% else %},{% endif %}{% else %}none{% endfor %}"
        "{{ '-' * 3 }}{{ 2 ** 10 }}{{ 6 * 7 }}"
    )
    messages = [{"role": "user", "content": text} for text in "abc"]
    assert render(source, messages) == "1/2<a>,2/2<b>.---102442"
    assert render(source, messages[2:]) == "none---102442"
