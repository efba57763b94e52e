"""Chat templates, compared with the renderer of transformers, for which models publish them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from cbatch.demo import demo_paths
from cbatch.text import ChatTemplate, ChatTemplateError, load_chat_template
from cbatch.text.gguf_tokenizer import gguf_tokenizer_config

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "Be brief. <b>&\"'"},
    {"role": "user", "content": "{{ 7 * 7 }} {% raise %}"},
    {"role": "assistant", "content": "é日本😀"},
    {"role": "user", "content": "again\n"},
]
MARKED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
PAIRED = """{{ bos_token }}{% set ns = namespace(system='') %}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% set ns.system = message['content'] ~ '\\n\\n' %}
        {% continue %}
    {% endif %}
    {% if message['role'] == 'user' %}
[INST] {{ ns.system + message['content'] | trim }} [/INST]
        {% set ns.system = '' %}
    {% else %}
        {% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}

    {% endif %}
{% endfor %}"""
LISTED = """{{ messages | tojson(indent=2) }}{{ messages[0] | tojson }}
{{ messages[0] | tojson(sort_keys=true) }}{{ messages | tojson(separators=(',', ':')) }}
{{ messages | tojson(ensure_ascii=True, indent='--', separators=(',', '='), sort_keys=True) }}
{{ messages | tojson(true, 1, (',', ':'), true) }}{{ {'b': 1, 'a': [none, true]} | tojson }}"""
HELPED = """{{ strftime_now(format='%Y') }}{{ documents is none }}{% for m in messages %}
{% if loop.index == 2 %}{% continue %}{% endif %}{% if loop.last %}{% break %}{% endif %}
{% generation %}{{ m.content }}{% endgeneration %}{{ dict(a=1) | items | list }}
{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}"""


@pytest.mark.parametrize("template", [MARKED, PAIRED, LISTED, HELPED])
@pytest.mark.parametrize("prompted", [True, False])
def test_rendering_agrees_with_transformers(template: str, prompted: bool) -> None:
    mine = ChatTemplate(template, TOKENS, "here").render(MESSAGES, add_generation_prompt=prompted)
    (reference,), _ = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=prompted, **TOKENS
    )
    assert mine == reference
    assert "49" not in mine, "a message was rendered as a template"


def test_variables_and_the_date() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}{{ mood }}{{ tools is none }}", {}, "here")
    assert template.render(MESSAGES, variables={"mood": "!"}) == f"{datetime.now().year}!True"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange"),
    ],
)
def test_conversations_that_a_template_rejects(template: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(template, {}, "here").render(MESSAGES)


@pytest.mark.parametrize("messages", ["hi", 5, [5], [{"content": "no role"}], [["a"]], None])
def test_invalid_conversations(messages: Any) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages[0].content }}", {}, "here").render(messages)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append({}) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].pop('role') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__code__.co_filename }}",
    ],
)
def test_a_template_cannot_access_or_change_python_objects(attack: str) -> None:
    before = json.dumps(MESSAGES)
    with pytest.raises(ChatTemplateError):
        ChatTemplate(attack, {}, "here").render(MESSAGES)
    assert json.dumps(MESSAGES) == before


def folder_with(tmp_path: Path, config: Any = None, template: str | None = None) -> Path:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def rendered(folder: Path, file: Path | None = None) -> str | None:
    template = load_chat_template(folder, file)
    return None if template is None else template.render(MESSAGES)


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert rendered(tmp_path) is None
    assert rendered(folder_with(tmp_path, TOKENS)) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "n"}]
    assert rendered(folder_with(tmp_path, {"chat_template": named})) == "n"
    long_token = {"content": "<s>", "special": True}
    config = {"chat_template": "c{{ bos_token }}", "bos_token": long_token}
    assert rendered(folder_with(tmp_path, config)) == "c<s>"
    assert rendered(folder_with(tmp_path, template="f{{ bos_token }}")) == "f<s>"
    file = tmp_path / "other"
    file.write_text("o")
    assert rendered(tmp_path, file) == "o"


TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"default": "plain", "tool_use": "tools{{ bos_token }}", "rag": "rag"}


def stored(tmp_path: Path, form: str) -> tuple[Path, dict[str, Any] | None]:
    """Store the templates `NAMED` in a model's folder, or in the metadata of a GGUF file."""
    listed = [{"name": name, "template": text} for name, text in NAMED.items()]
    if form == "GGUF":
        metadata = {f"tokenizer.chat_template.{name}": text for name, text in NAMED.items()}
        metadata["tokenizer.chat_template"] = metadata.pop("tokenizer.chat_template.default")
        tokens = {"tokenizer.ggml.tokens": ["<s>", "a"], "tokenizer.ggml.bos_token_id": 0}
        names = {"tokenizer.chat_templates": ["tool_use", "rag"]}
        file = tmp_path / "x.gguf"
        file.touch()
        return file, gguf_tokenizer_config(metadata | tokens | names, "x")
    if form in ("list", "dict"):
        config = TOKENS | {"chat_template": listed if form == "list" else NAMED}
        return folder_with(tmp_path, config), None
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    for name in ("tool_use", "rag"):
        (extra / f"{name}.jinja").write_text(NAMED[name])
    if form == "folder":
        hidden = {"chat_template": [{"name": "tool_use", "template": "hidden"}]}
        return folder_with(tmp_path, TOKENS | hidden, NAMED["default"]), None
    return folder_with(tmp_path, TOKENS | {"chat_template": NAMED["default"]}), None


@pytest.mark.parametrize("form", ["list", "dict", "folder", "folder and one text", "GGUF"])
def test_named_templates(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = stored(tmp_path, form)
    template = load_chat_template(model, config=config)
    assert template is not None
    assert template.render(MESSAGES, tools=TOOLS) == "tools<s>"
    assert [template.render(MESSAGES, tools=tools) for tools in (None, [])] == ["plain"] * 2
    for name, text in NAMED.items():  # selected by name, with and without tools
        chosen = load_chat_template(model, name, config)
        assert chosen is not None
        expected = text.replace("{{ bos_token }}", "<s>")
        assert [chosen.render(MESSAGES, tools=t) for t in (None, TOOLS)] == [expected] * 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rag").write_text("a file")
    chosen = load_chat_template(model, "rag", config)
    assert chosen is not None and chosen.render(MESSAGES) == "a file"
    with pytest.raises(ChatTemplateError, match="nothing cannot be read"):
        load_chat_template(model, "nothing", config)


@pytest.mark.parametrize("names", [["tool_use"], ["rag"], ["rag", "tool_use"], []])
def test_only_the_default_template_is_the_default(tmp_path: Path, names: list[str]) -> None:
    templates = {name: "x" for name in names}
    folder = folder_with(tmp_path, {"chat_template": templates})
    assert load_chat_template(folder) is None
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    for name in names:
        (extra / f"{name}.jinja").write_text("x")
    assert load_chat_template(folder_with(tmp_path, {})) is None


def test_a_default_template_alone_renders_tools_as_well(tmp_path: Path) -> None:
    for config in ({"chat_template": "{{ tools | tojson }}"}, {"chat_template": {"default": "t"}}):
        template = load_chat_template(folder_with(tmp_path, config))
        assert template is not None
        assert template.render(MESSAGES, tools=TOOLS) in (json.dumps(TOOLS), "t")


def test_a_broken_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="chat_template.jinja does not parse"):
        load_chat_template(folder_with(tmp_path, template="{% for %}"))
    with pytest.raises(ChatTemplateError, match="nowhere cannot be read"):
        load_chat_template(tmp_path, tmp_path / "nowhere")
    for text in ("{", "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ChatTemplateError, match="tokenizer_config.json cannot be read"):
            load_chat_template(tmp_path)


DEEP = {
    "parentheses": "{{ " + "(" * 999 + "1" + ")" * 999 + " }}",
    "loops": "{% for a in b %}" * 25 + "{% endfor %}" * 25,
    "branches": "{% if a %}" * 105 + "{% endif %}" * 105,
    "digits": "{{ " + "1" * 9999 + " }}",
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_a_template_that_python_cannot_compile_is_named(text: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template: here does not parse"):
        ChatTemplate(text, {}, "here")


def test_a_template_that_is_too_long_is_not_compiled() -> None:
    with pytest.raises(ChatTemplateError, match="here has 400000 characters, at most 262144 are"):
        ChatTemplate("{% a %}x" * 50_000, {}, "here")


def test_an_odd_configuration_has_no_template(tmp_path: Path) -> None:
    odd = [1, [], "x", {"name": "default"}]
    config = {"chat_template": odd, "bos_token": {"text": "<s>"}}
    assert rendered(folder_with(tmp_path, config)) is None


def test_the_demo_pair_continues_the_last_message() -> None:
    template = load_chat_template(demo_paths()[0])
    assert template is not None
    messages = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def f(x"}]
    assert template.render(messages) == "import os\ndef f(x"
