"""Chat: messages to the text that a model was trained to answer, by the Jinja template that comes with a tokenizer.

Templates are those of `transformers`: in `chat_template.jinja` or in `tokenizer_config.json`, in a sandbox that reads
no file and changes nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from threefold.errors import UserError
from threefold.packages import needed_for
from trainer.run.inference import Checkpoint
from trainer.run.tokenizer import json_beside, special_tokens, text_beside

Message = Mapping[str, Any]  # a `role`, such as user, and its `content`
OWN = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template's source, where it comes from, and the special tokens that it may name."""

    source: str
    place: str
    tokens: Mapping[str, str]

    @classmethod
    def of(cls, checkpoint: Checkpoint, file: str = "") -> "ChatTemplate":
        """Return the template in a file, or the tokenizer's own; UserError if it has none."""
        config = json_beside(checkpoint, OWN)
        if file:
            try:
                return cls(Path(file).read_text(encoding="utf-8"), file, special_tokens(config))
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"cannot read the chat template: {error}", hint="--chat-template FILE") from error
        source, place = text_beside(checkpoint, "chat_template.jinja"), "chat_template.jinja"
        if source is None:
            source, place = _default(config.get("chat_template")), OWN
        if source is None:
            raise UserError(
                "the tokenizer has no chat template: neither chat_template.jinja nor one in tokenizer_config.json is "
                "beside it",
                hint="without --chat the text is continued as it is; --chat-template FILE takes another template",
            )
        return cls(source, place, special_tokens(config))

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text that a model answers; UserError if the template does not take these messages."""
        with needed_for("--chat"):
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _as_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            template = environment.from_string(self.source)
            return template.render(messages=list(messages), add_generation_prompt=True, **self.tokens)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(
                f"the chat template in {self.place} does not take these messages: {error}",
                hint="--chat-template FILE takes another one",
            ) from error


def _default(templates: Any) -> str | None:
    """Return a template, or of several by name the one that is called `default`."""
    if isinstance(templates, list):
        by_name = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        templates = by_name.get("default")
    return templates if isinstance(templates, str) else None


def _as_json(value: Any, **how: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **how)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
