"""A plan as a configuration that runs: the tables that the run came from, with the plan's layout and settings."""

from collections.abc import Mapping
from typing import Any

from threefold.flags import Settings
from threefold.page import write_page
from trainer.config import Config
from trainer.config.foreign.conversion import Conversion, source_of, toml
from trainer.config.walk import read_toml
from trainer.plan.search import Planned

Tables = dict[str, Any]


def write_config(path: str, config: str, megatron: str, flags: Settings, run: Config, plan: Planned) -> None:
    """Write the tables of a file, or of a command line of Megatron-LM, with flags and a plan over them."""
    tables = read_toml(config) if config else Conversion.of(source_of(megatron)[1]).tables
    tables = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    given = {name: value_of(run, name) for name in flags if name.count(".") == 1}
    default = Config()
    for name, value in {**given, **plan.candidate.settings}.items():
        table, _, key = name.partition(".")
        if value == value_of(default, name):
            tables.get(table, {}).pop(key, None)
        else:
            tables.setdefault(table, {})[key] = value
    tables.get("train", {}).pop("gradient_accumulation_steps", None)
    write_page("\n".join(lines_of(tables)) + "\n", path)


def value_of(config: Config, name: str) -> Any:
    """Return the value of an option by its dotted name."""
    table, _, key = name.partition(".")
    return getattr(getattr(config, table), key)


def lines_of(tables: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return tables as lines of TOML: values first, then tables in them, then lists of tables."""
    plain = {key: value for key, value in tables.items() if not is_table(value)}
    lines = [f"{key} = {toml(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            lines += [f"[{name}]", *lines_of(value, f"{name}.")]
        elif is_table(value):
            for part in value:
                lines += [f"[[{name}]]", *lines_of(part, f"{name}.")]
    return lines


def is_table(value: object) -> bool:
    """Return whether a value is a table, or a list of them."""
    return isinstance(value, Mapping) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))
