"""The tables of foreign names: every option that they name exists, and each name that maps is our own spelling."""

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checks import require
from tests.test_words import ANY_OUT, MAX_WORDS
from threefold.flags import add_settings, settings_of
from threefold.options import Leaf, leaves, merge, walk
from threefold.rewording import Rewording
from trainer.commands.train import Options
from trainer.config import Config
from trainer.config.foreign.derived import FUNCTIONS, complete
from trainer.config.foreign.table import PROGRAMS, Entry, Meaning, entries, entry_of, flags, key_of
from trainer.config.foreign.translate import translated

LEAVES = {leaf.name: leaf for leaf in leaves(Config)}
ELSEWHERE = {"--dry-run", "--from-megatron", "--from", "--to", "--stats", "--max-restarts"}  # of a verb, or torchrun's


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_settings(made, Config)
    return made


PARSER = parser()
OWN = PARSER._option_string_actions


def config_of(*arguments: str) -> tuple[Config, list[str]]:
    """The configuration of a command line of any words, unresolved, and its faults."""
    words = Rewording(OWN, translated)
    words.read(arguments)
    parsed = PARSER.parse_args(words.arguments)
    words.put(parsed)
    faults: list = []
    tables = merge({}, complete({}, settings_of(parsed), faults))
    return walk(Config, tables, faults), [*words.faults, *(text for _, text in faults)]


def sample(leaf: Leaf) -> str:
    """A text that fits an option and is not its default."""
    low = leaf.option.minimum if leaf.option.minimum is not None else leaf.option.above or 0
    texts = {int: str(int(low) + 3), float: str(low + 0.25), str: "x", bool: "true"}
    return texts.get(leaf.kind, "x" if leaf.option.repeats else "0.25")


def mapped() -> Iterator[tuple[Entry, list[str], Meaning]]:
    """Each entry of a flag that sets options, with a value it takes for each of its meanings."""
    for entry in flags():
        pairs = [("", entry.answer)] if isinstance(entry.answer, str) else list(entry.answer.items())
        for word, text in pairs:
            meaning = Meaning.of(text)
            if meaning.kind == "sets":
                free = [
                    option.partition("*")[0].partition("[")[0] for option in meaning.text.split() if "=" not in option
                ]
                number = sample(LEAVES[free[0]]) if free else ""
                value = number if word in ("", "*") else word.replace("*", "name")
                yield entry, [value] if entry.metavar else [], meaning


def test_every_option_that_is_set_exists() -> None:
    checked = 0
    for program in PROGRAMS:
        for entry in entries(program):
            for meaning in entry.meanings:
                if meaning.kind == "sets":
                    for option, _ in meaning.assignments(["1", "1"]):
                        assert option in LEAVES, f"{entry.name}: {option}"
                        checked += 1
                elif meaning.kind == "by":
                    assert meaning.text in FUNCTIONS, entry.name
    assert checked > 150


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_sentence_is_short_and_names_flags_that_exist(program: str) -> None:
    for entry in entries(program):
        for text in [meaning.text for meaning in entry.meanings if meaning.kind in ("so", "no")]:
            assert len(text.split()) <= MAX_WORDS, f"{entry.name}: {text}"
            assert not ANY_OUT.search(text), f"{entry.name}: {text}"
            for flag in re.findall(r"--[a-z0-9][a-z0-9.-]*[a-z0-9]", text):
                assert flag in OWN or flag in ELSEWHERE, f"{entry.name}: {flag}"


def test_a_name_of_a_table_is_not_one_of_our_flags_and_is_there_once() -> None:
    names = [entry.name for entry in flags()]
    assert not [name for name in names if name in OWN]
    assert not [entry.name for entry in entries("megatron") if names.count(entry.name) > 1]


def test_what_maps_is_the_same_configuration_as_our_own_spelling() -> None:
    default, checked = Config(), 0
    for entry, values, meaning in mapped():
        name = entry.name.replace("*", "x")
        own = [f"--{option.replace('_', '-')}={text}" for option, text in meaning.assignments(values)]
        ours, theirs = config_of(*own), config_of(name, *values)
        assert ours == theirs, f"{name} {values}"
        assert not ours[1], f"{name} {values}: {ours[1]}"
        checked += ours[0] != default
    assert checked > 90  # others set what is the default, and are there to undo another value


def test_a_switch_may_have_its_value_or_be_turned_off() -> None:
    for bare in (["--qk-layernorm"], ["--qk-layernorm", "true"], ["--qk-layernorm=True"], ["--qk_layernorm"]):
        assert config_of(*bare)[0].model.qk_norm is True
    for off in (["--no-qk-layernorm"], ["--qk-layernorm", "false"], ["--qk-layernorm=false"]):
        assert config_of("--model.qk-norm", "true", *off)[0].model.qk_norm is False
    assert config_of("--tf32", "false") == (Config(), [])
    assert "it is so all the same" in config_of("--no-swiglu")[1][0]


@pytest.mark.parametrize("line", ["megatron_flags.txt"])
def test_every_flag_of_megatron_is_known(line: str) -> None:
    text = (Path(__file__).parent / line).read_text()
    words = [word for part in text.splitlines() if not part.startswith("#") for word in part.split()]
    assert len(words) > 850
    for word in words:
        name, _, takes = word.partition("=")
        own, entry = OWN.get(f"--{name}"), entry_of(f"--{name}")
        assert own is not None or entry is not None, f"--{name}"
        if own is None and entry is not None and not entry.is_family:
            wanted = ("..." if takes else "X") if "=" in word else ""
            found = entry.metavar and ("..." if entry.metavar.endswith("...") else "X")
            assert found == wanted, f"--{name} takes {wanted or 'nothing'}, the table says {entry.metavar or 'nothing'}"


def test_every_argument_of_hugging_faces_trainer_is_known() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    for each in dataclasses.fields(arguments):
        if each.init and not each.name.startswith("_"):
            name = "--" + each.name.replace("_", "-")
            assert name in OWN or entry_of(name), each.name


def test_an_exact_name_comes_before_a_family() -> None:
    require((found := entry_of("--moe-deepep-num-sms")) is not None and found.is_family, "it is one of a family")
    require(
        (found := entry_of("--eval_steps")) is not None and found.meanings[0].text == "train.eval_interval", "exact"
    )
    require((found := key_of("zero_optimization.stage")) is not None and not found.is_family, "exact")
    assert entry_of("--frobnicate") is None


def test_the_help_of_a_verb_reads_no_table() -> None:
    foreign = next(each.metadata["foreign"] for each in dataclasses.fields(Options) if "settings" in each.metadata)
    assert foreign is translated
