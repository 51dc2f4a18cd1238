"""`trainer generate`: continue prompts with a checkpoint, or chat with it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threefold.errors import EXIT_OK, UserError
from threefold.needs import GIVEN, unmet
from threefold.options import option, raise_faults
from trainer.commands.shared import OfCheckpoint, before_ranks, world_size
from trainer.job.failure import recorded

SAMPLE = 'a line is such as {"prompt": "Once upon a time"}'
WARM, CHAT = {"temperature": GIVEN}, {"chat": True}


@dataclass(frozen=True, kw_only=True)
class Options(OfCheckpoint):
    """Options of `trainer generate`."""

    prompt: tuple[str, ...] = option(
        (),
        "text to continue, or with --chat to answer; may be repeated; without any it is lines of stdin",
        metavar="TEXT",
        repeats=True,
    )
    prompts: str = option(
        "",
        "a file with a prompt a line; of .jsonl a text each, or an object with `prompt` or `messages`",
        metavar="FILE",
    )
    tokens: int = option(64, "tokens to add, at most", minimum=1, metavar="N")
    temperature: float = option(
        0.0, "0 always takes the likeliest, else --seed N seeds the choice", minimum=0, metavar="X"
    )
    top_k: int = option(0, "choose among so many likeliest tokens; 0 means all", minimum=0, needs=WARM, metavar="N")
    top_p: float = option(
        1.0,
        "choose among the likeliest tokens that have this probability together",
        above=0,
        maximum=1,
        needs=WARM,
        metavar="X",
    )
    min_p: float = option(
        0.0,
        "choose among tokens of at least this times the probability of the likeliest",
        minimum=0,
        maximum=1,
        needs=WARM,
        metavar="X",
    )
    samples: int = option(1, "continuations of each prompt", minimum=1, needs=WARM, metavar="N")
    stop: tuple[str, ...] = option((), "end before this text; may be repeated", metavar="TEXT", repeats=True)
    stop_token: tuple[str, ...] = option(
        (), "end before this token, by its text or number; may be repeated", metavar="TOKEN", repeats=True
    )
    ignore_end: bool = option(False, "go on behind a token that ends documents")
    chat: bool = option(False, "put prompts into the template of the tokenizer, as messages of a user")
    chat_template: str = option("", "another template: a Jinja file", needs=CHAT, metavar="FILE")
    system: str = option("", "a message of the system before those of a user", needs=CHAT, metavar="TEXT")
    batch_size: int = option(16, "rows that are continued at once", minimum=1, metavar="N")
    json: bool = option(False, "print one JSON document: texts, tokens, and why each ended")


@recorded
def run(options: Options) -> int:
    """Continue prompts with a checkpoint of any layout, in one process or, with --tp and --pp, on the ranks that
    `trainer launch` starts. Without --prompt and --prompts it continues lines of stdin, or with --chat answers them."""
    prompts = before_ranks(lambda: prompts_of(options))
    from trainer.run.chat import ChatTemplate
    from trainer.run.continuation import Until
    from trainer.run.environment import ranks_of
    from trainer.run.generate import Generation
    from trainer.run.inference import open_checkpoint
    from trainer.run.sampling import Sampling
    from trainer.run.session import Session
    from trainer.run.tokenizer import end_tokens, prompt_tokenizer, token_numbers

    checkpoint = before_ranks(
        lambda: open_checkpoint(options.checkpoint, options.config, options.flags, world_size=world_size())
    )
    config = checkpoint.config

    def opened() -> Any:
        tokenizer = prompt_tokenizer(checkpoint)
        ends = token_numbers(tokenizer, options.stop_token, config.model.vocab_size)
        ends |= frozenset() if options.ignore_end else end_tokens(checkpoint, tokenizer)
        template = ChatTemplate.of(checkpoint, options.chat_template) if options.chat else None
        return tokenizer, Until(options.tokens, ends, options.stop), template

    tokenizer, until, template = before_ranks(opened)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p, config.train.seed)
    with ranks_of(config) as ranks:
        generation = Generation(checkpoint, ranks, tokenizer)
        session = Session(
            generation, ranks, until, sampling, template, options.system, options.samples, options.batch_size
        )
        if prompts:
            session.answer(prompts, as_json=options.json)
        else:
            session.converse()
    return EXIT_OK


def prompts_of(options: Options) -> list[Any]:
    """Return the prompts that are given, texts or lists of messages; none if they are to come from stdin."""
    raise_faults("trainer generate", unmet(options), hint="--temperature 0.8 samples, --chat takes messages")
    if "" in options.stop:
        raise UserError("--stop is an empty text, which every text holds", hint="--stop 'END'")
    prompts: list[Any] = list(options.prompt)
    if options.prompts:
        prompts += read_prompts(Path(options.prompts), chat=options.chat)
    elif not prompts and options.json:
        raise UserError("--json is for prompts that are given", hint="--prompt 'Once upon a time'")
    return prompts


def read_prompts(path: Path, *, chat: bool) -> list[Any]:
    """Return the prompts of a file's lines that are not empty; UserError names the line that is not one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read prompts: {error}", hint="--prompts FILE, of a prompt a line") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"{path} holds no prompt", hint="a prompt a line")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [prompt_of(line, f"line {number} of {path}", chat=chat) for number, line in numbered]


def prompt_of(line: str, place: str, *, chat: bool) -> Any:
    """Return the prompt of a line of JSON."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place} is not JSON: {error}", hint=SAMPLE) from error
    if isinstance(value, dict):
        value = value.get("messages" if "messages" in value else "prompt")
    if isinstance(value, str) and value:
        return value
    is_messages = isinstance(value, list) and value and all(isinstance(part, dict) and "role" in part for part in value)
    if is_messages and chat:
        return value
    why = "messages, which need --chat" if is_messages else "neither a text nor an object with `prompt` or `messages`"
    raise UserError(f"{place} has {why}", hint=SAMPLE)
