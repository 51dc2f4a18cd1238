"""A command line of Megatron-LM as the TOML file that says the same."""

import dataclasses
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from threefold.cli import Parser
from threefold.errors import UserError
from threefold.flags import add_settings, settings_of
from threefold.options import Fault, FlagText, leaves, merge, raise_faults, walk
from threefold.rewording import NEEDS_VALUE, Rewording
from trainer.config import Config
from trainer.config.foreign.derived import MARK, complete
from trainer.config.foreign.script import Script
from trainer.config.foreign.table import read
from trainer.config.foreign.translate import Translator
from trainer.config.resolve import ranks_a_sample

PROCESSES, NODES = ("--nproc-per-node", "--nproc_per_node"), ("--nnodes",)
NEEDS = {"--num-query-groups": "--group-query-attention"}  # without the second Megatron-LM ignores the first
FALL = "--lr-wsd-decay-style exponential"
IMPLIED = {  # where the flag of the second is not named
    "--group-query-attention": "--num-query-groups 1",
    "--lr-wsd-decay-iters": FALL,
    "--lr-wsd-decay-samples": FALL,
    "--fp16": "--initial-loss-scale 4294967296",
}
MOVING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")  # of a loss scale
DEFAULT = "the default of Megatron-LM"
CORRECT, FILL_IN = (
    "correct it: trainer train --help says what each key takes",
    "put values in place of what only the shell knows",
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A command line that was read: its settings in words of ours, and what it says beyond."""

    launch: Mapping[str, int]  # processes a node, and nodes, as far as it says so
    settings: Mapping[str, FlagText]
    explicit: frozenset[str]  # the settings that it names itself; others are defaults
    left: Sequence[tuple[str, str]]
    missing: Sequence[str]
    tables: Mapping[str, Any]

    @property
    def open(self) -> list[str]:
        """The settings that hold what only the shell knows, as `$1`."""
        texts = {name: " ".join([text.text, *text.more]) for name, text in self.settings.items()}
        return [f"{name} = {text}" for name, text in texts.items() if "$" in text or "`" in text]

    @classmethod
    def of(cls, text: str) -> "Conversion":
        """Read a command line, or the script that runs it; UserError that lists values that do not fit."""
        words, launch = command_of(text)
        parser = Parser(prog="trainer train")
        add_settings(parser, Config)
        translator = Translator()
        both = Rewording(parser._option_string_actions, translator.take, is_flags_alone=True)
        named = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
        implied = " ".join(text for flag, text in IMPLIED.items() if flag in named)
        for flag, *values in groups(f"{read('megatron')['defaults']} {implied}".split()):
            if flag not in named and (flag != "--split" or "--data-path" in named):
                before = len(both.faults)
                both.read([flag, *values])
                both.faults[before:] = [f"{fault} ({DEFAULT})" for fault in both.faults[before:]]
        alone = Rewording(parser._option_string_actions, Translator().take, is_flags_alone=True)
        for flag, *values in groups(words):
            needed = NEEDS.get(flag.replace("_", "-"))
            if needed and needed not in named:
                translator.left.append((flag, f"Megatron-LM ignores it without {needed}"))
                continue
            both.read([flag, *values])
            alone.read([flag, *values])
        raise_faults(
            "the command line", [(set(), text) for text in both.faults if text.endswith(NEEDS_VALUE)], hint=CORRECT
        )
        faults: list[Fault] = []
        num_ranks = launch.get("processes", 0) * launch.get("nodes", 1)
        settings = complete({}, with_batch(read_by(parser, both), launch), faults, num_ranks)
        given = frozenset(complete({}, read_by(parser, alone), [], num_ranks))
        settings = without_idle(with_width(settings), given, both.faults)
        both.faults += [text for names, text in faults if names]  # of what is there, and is to be converted
        faults = [fault for fault in faults if not fault[0]]
        raise_faults("the command line", faults, hint=CORRECT)
        return cls(launch, settings, given, translator.left, both.faults, typed(settings))

    def lines(self, source: str) -> Iterator[str]:
        """Yield the lines of the TOML file, with what was left out as comments."""
        yield f"# Made of {source}."
        per_node, nodes = self.launch.get("processes"), self.launch.get("nodes", 1)
        if per_node:
            several = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500" if nodes > 1 else ""
            yield f"# To start it: trainer launch --nproc-per-node {per_node}{several} train FILE.toml"
        table = ""
        for leaf in leaves(Config):
            if leaf.name not in self.settings or leaf.name == "data.mixture":
                continue
            place, _, key = leaf.name.rpartition(".")
            if place != table:
                yield ""
                yield f"[{place}]"
                table = place
            value = reduce(getitem, leaf.name.split("."), self.tables)
            flag = self.settings[leaf.name].flag if leaf.name in self.explicit else DEFAULT
            yield f"{key} = {toml(value)}  # {flag}"
        for title, texts in (
            ("What does not exist here, and was left out:", self.missing),
            ("What only the shell knows, and is to be filled in:", self.open),
            ("What needs no setting here:", [f"{shown}: {why}" for shown, why in self.left]),
        ):
            if texts:
                yield ""
                yield f"# {title}"
                yield from (f"#   {text}" for text in texts)


def command_of(text: str) -> tuple[list[str], dict[str, int]]:
    """Return the flags of the training command in a text or a script, and how many processes it starts."""
    if text.lstrip().startswith("--"):
        return flags_of(Script(f"train.py {text}").commands[0][1:]), {}
    script = Script(text)
    inner = [word for command in script.commands for word in command if ".py " in word]  # as of `bash -c "..."`
    commands = [*script.commands, *(command for word in inner for command in Script(word).commands)]
    candidates = [command for command in commands if any(word.startswith("--") for word in program_flags(command))]
    if not candidates and any(word.startswith("--") for word in script.words):
        return flags_of(script.words), {}
    if not candidates:
        raise UserError(
            "the text runs no program with flags",
            hint="trainer train --from-megatron 'pretrain_gpt.py --num-layers 2 ...'",
        )
    command = max(candidates, key=lambda words: (any(word.endswith(".py") for word in words), len(words)))
    flags = program_flags(command)
    before = command[: len(command) - len(flags)]
    launch = {}
    for name, spellings in (("processes", PROCESSES), ("nodes", NODES)):
        for word, value in zip(before, [*before[1:], ""]):
            flag, sign, text = word.partition("=")
            if flag in spellings and (text if sign else value).isdecimal():
                launch[name] = int(text if sign else value)
    return flags_of(flags), launch


def program_flags(command: Sequence[str]) -> list[str]:
    """Return the words behind the Python program, else from the first flag on."""
    places = [at + 1 for at, word in enumerate(command) if word.endswith(".py")]
    flags = [at for at, word in enumerate(command) if word.startswith("--")]
    return list(command[places[-1] :] if places else command[flags[0] :] if flags else [])


def flags_of(words: Sequence[str]) -> list[str]:
    """Return flags with their values, without the quotes that a list of words kept."""
    return [word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word for word in words]


def groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag with the words behind it; words before the first flag are left out."""
    group: list[str] = []
    for word in words:
        if word.startswith("--"):
            if group:
                yield group
            group = [word]
        elif group:
            group.append(word)
    if group:
        yield group


def read_by(parser: Parser, words: Rewording) -> dict[str, FlagText]:
    """Return the settings of words that were read."""
    parsed = parser.parse_args(words.arguments)
    words.put(parsed)
    return settings_of(parsed)


def with_batch(settings: Mapping[str, FlagText], launch: Mapping[str, int]) -> dict[str, FlagText]:
    """Return settings with Megatron-LM's global batch where none is named: a micro-batch of each data-parallel rank."""
    if "train.global_batch_size" in settings:
        return dict(settings)
    draft = walk(Config, merge({}, {name: text for name, text in settings.items() if not name.startswith(MARK)}), [])
    ranks = launch.get("processes", 1) * launch.get("nodes", 1)
    size = draft.train.micro_batch_size * max(ranks // ranks_a_sample(draft), 1)
    return {**settings, "train.global_batch_size": FlagText(str(size), DEFAULT)}


def with_width(settings: Mapping[str, FlagText]) -> dict[str, FlagText]:
    """Return settings with Megatron-LM's width of an MLP of swiglu where none is named: two thirds, in whole 64s."""
    draft = walk(Config, merge({}, settings), [])
    if "model.ffn_hidden_size" in settings or draft.model.activation != "swiglu":
        return dict(settings)
    size = 4 * draft.model.hidden_size * 2 // 3 // 64 * 64
    return {**settings, "model.ffn_hidden_size": FlagText(str(size), DEFAULT)}


def without_idle(settings: Mapping[str, FlagText], named: Collection[str], missing: list[str]) -> dict[str, FlagText]:
    """Return settings without those that Megatron-LM ignores, as what they are of is not named; note those given."""
    draft = walk(Config, merge({}, settings), [])
    idle = {}
    if draft.train.eval_interval and not draft.data.validates:
        idle["train.eval_interval"] = "nothing is named that validates: --data.valid.stores STORE"
    if draft.checkpoint.save_interval and not draft.checkpoint.save:
        idle["checkpoint.save_interval"] = "no place is named to save to: --save URL"
    if draft.train.precision != "fp16":
        idle |= {f"train.{name}": "only --fp16 scales the loss" for name in ("loss_scale", *MOVING)}
    elif draft.train.loss_scale is not None:
        idle |= {f"train.{name}": "--loss-scale is the scale, and stays" for name in MOVING}
    missing += [f"{settings[name].flag}: {why}" for name, why in idle.items() if name in named]
    return {name: text for name, text in settings.items() if name not in idle}


def typed(settings: Mapping[str, FlagText]) -> dict[str, Any]:
    """Return the tables of settings; UserError that lists all that do not fit."""
    faults: list[Fault] = []
    config = walk(Config, merge({}, settings), faults)
    is_open = any("$" in text or "`" in text for _, text in faults)
    raise_faults("the command line", faults, hint=FILL_IN if is_open else CORRECT)
    return dataclasses.asdict(config)


def toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)


def source_of(text: str) -> tuple[str, str]:
    """Return what a text is called, and the text itself, or that of the file that it names."""
    if "\n" not in text and len(text) < 4096 and os.path.isfile(text):
        return text, Path(text).read_text(encoding="utf-8", errors="replace")
    if text.split() == [text] and not text.startswith("--"):
        raise UserError(f"no such script: {text}", hint="trainer train --from-megatron 'pretrain_gpt.py ...'")
    return "a command line of Megatron-LM", text
