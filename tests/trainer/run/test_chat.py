"""Chat: messages go through the template that comes with a tokenizer, and answers end where it says."""

import io
import json
from pathlib import Path

import pytest

from tests.trainer.support.training import call
from threefold.errors import UserError
from trainer.run.chat import ChatTemplate

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {%- if message.role == 'tool' %}{{ raise_exception('no ' + message.role) }}{% endif %}\n"
    "{{ ' ' + message.role + ' ' + message.content + ' w60' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' assistant' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(job_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, and a tokenizer with a template whose special tokens are among the model's."""
    folder = tmp_path_factory.mktemp("chat")
    assert call("train", job_config, "--train-steps", 2, "--save", folder / "run") == 0
    names = {0: "<s>", 1: "user", 2: "assistant", 3: "system"}
    vocabulary = {names.get(number, f"w{number}"): number for number in range(61)}
    special = {"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content = {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w5"},
        "added_tokens": [special | {"special": True}],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
    }
    (folder / "tok").mkdir()
    (folder / "tok" / "tokenizer.json").write_text(json.dumps(content))
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "eos_token": "w60"}
    (folder / "tok" / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def rendered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What templates are rendered to from now on."""
    texts, real = [], ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda self, messages: texts.append(real(self, messages)) or texts[-1])
    return texts


def test_a_prompt_is_a_message_of_the_user(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = rendered(monkeypatch)
    words = ["generate", folder / "run", "--data.tokenizer", folder / "tok", "--chat", "--tokens", 5, "--json"]
    assert call(*words, "--prompt", "w7 w8", "--system", "w9") == 0
    assert texts == ["<s> system w9 w60 user w7 w8 w60 assistant"]
    [answer] = json.loads(capsys.readouterr().out)["answers"]
    assert answer["num_prompt_tokens"] == 9  # one <s>, which the tokenizer would put before any other text
    chat = {"messages": [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w6"}]}
    (folder / "chats.jsonl").write_text(json.dumps(chat) + "\n" + json.dumps("w8") + "\n")
    assert call(*words, "--prompts", folder / "chats.jsonl") == 0
    assert texts[1:] == ["<s> user w4 w60 assistant w6 w60 assistant", "<s> user w8 w60 assistant"]
    capsys.readouterr()
    assert call(*words[:-1], "--prompt", "w7 w8", "--system", "w9") == 0
    assert capsys.readouterr().out == answer["text"] + "\n"


def test_lines_are_one_conversation_until_it_is_forgotten(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = rendered(monkeypatch)
    monkeypatch.setattr("sys.stdin", io.StringIO("w7\nw8\n/forget\nw9\n"))
    words = ["generate", folder / "run", "--data.tokenizer", folder / "tok", "--chat", "--tokens", 2]
    assert call(*words, "--chat-template", _file(folder, TEMPLATE)) == 0
    answers = capsys.readouterr().out.splitlines()
    assert texts == [
        "<s> user w7 w60 assistant",
        f"<s> user w7 w60 assistant {answers[0]} w60 user w8 w60 assistant",
        "<s> user w9 w60 assistant",
    ]


def _file(folder: Path, template: str) -> Path:
    (folder / "own.jinja").write_text(template)
    return folder / "own.jinja"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('roles must alternate') }}", "does not take these messages: roles must alternate"),
        ("{% for message in %}", "does not take these messages"),
        ("{{ messages.append(1) }}", "does not take these messages"),
        ("{{ messages.__class__.__mro__ }}", "does not take these messages"),
        ("{{ nothing.there }}", "does not take these messages: 'nothing' is undefined"),
    ],
)
def test_a_template_that_fails_is_one_line(template: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        ChatTemplate(template, "own.jinja", {}).render([{"role": "user", "content": "w1"}])
    assert expected in error.value.message
    assert error.value.hint


def test_templates_may_be_several_or_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", folder / "run", "--data.tokenizer", folder / "two", "--chat", "--prompt", "w7"]
    (folder / "two").mkdir()
    (folder / "two" / "tokenizer.json").write_bytes((folder / "tok" / "tokenizer.json").read_bytes())
    config = folder / "two" / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "tools", "template": "w1"}]}))
    assert call(*words) == 2
    assert "the tokenizer has no chat template" in capsys.readouterr().err
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "w1 w2 {{ messages | tojson }}"}]}))
    assert call(*words) == 0
    (folder / "two" / "chat_template.jinja").write_text("{{ wrong(")
    assert call(*words) == 2
    assert "the chat template in chat_template.jinja" in capsys.readouterr().err
    assert call(*words, "--chat-template", folder / "none.jinja") == 2
    assert "cannot read the chat template" in capsys.readouterr().err
    config.write_text("{")
    (folder / "two" / "chat_template.jinja").unlink()
    assert call(*words) == 2
    assert "tokenizer_config.json beside the tokenizer is not JSON" in capsys.readouterr().err
