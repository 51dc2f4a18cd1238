"""The pages of the commands: every verb with all its flags, out of the parsers that read them."""

import argparse
import inspect
import re
from importlib import import_module

from tools.site.markdown import block, code, plain, table

KITS = ("datakit", "ckptkit", "trainer")
SETTINGS = "settings:"  # how the destination of a configuration's flag begins


def command_pages() -> dict[str, str]:
    """Return the page of each kit's command, by its place in the site."""
    return {f"docs/commands/{kit}.md": command_page(kit) for kit in KITS}


def command_page(kit: str) -> str:
    """Return the page of a kit's command."""
    parser = import_module(f"{kit}.cli").build_parser()
    verbs = verbs_of(parser)
    sections = [verb_section(kit, name, verb) for name, verb in verbs.choices.items()]
    summaries = [
        (f"[`{kit} {verb.dest}`](#{kit}-{verb.dest})", plain(verb.help or "")) for verb in verbs._choices_actions
    ]
    return "\n".join(
        [
            f"# {kit} commands\n",
            f"{plain(parser.description)} Each verb shows this with `{kit} VERB --help`.\n",
            table(("verb", "what it does"), summaries),
            *sections,
        ]
    )


def verbs_of(parser: argparse.ArgumentParser) -> "argparse._SubParsersAction[argparse.ArgumentParser]":
    """Return the verbs of a command."""
    [verbs] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return verbs


def verb_section(kit: str, name: str, verb: argparse.ArgumentParser) -> str:
    """Return what a page says of a verb: what it does, its usage, its arguments and flags."""
    getattr(verb, "fill", lambda: None)()
    text = inspect.cleandoc(verb.description or "").split("\n\n")
    own = [action for action in verb._actions if is_shown(action) and not action.dest.startswith(SETTINGS)]
    settings = [action for action in verb._actions if action.dest.startswith(SETTINGS) and is_shown(action)]
    usage = "\n".join(["```text", usage_of(verb, own, has_settings=bool(verb.epilog or settings)), "```"])
    parts = [
        f"## `{kit} {name}`\n",
        *(plain(part) + "\n" for part in text),
        usage + "\n",
        options(own, f"{kit}-{name}"),
    ]
    if verb.epilog:
        parts += [plain(verb.epilog).replace("trainer train", "[trainer train](#trainer-train)", 1) + "\n"]
    for group in verb._action_groups:
        if of_group := [action for action in group._group_actions if action in settings]:
            title = (group.title or "").strip("[]")
            link = f"[`[{title}]`](../configuration.md#{title.replace('.', '')})"
            anchor = f"{{#{kit}-{name}-{title.replace('.', '-')}}}"
            parts += [f"### Flags of {link} {anchor}\n", options(of_group, f"{kit}-{name}")]
    return "\n".join(parts)


def is_shown(action: argparse.Action) -> bool:
    """Return whether the help of a verb has an argument, other than the help itself."""
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def usage_of(verb: argparse.ArgumentParser, actions: list[argparse.Action], *, has_settings: bool) -> str:
    """Return the usage of a verb: what is given by place, and the flags that must be given."""
    needed = [action for action in actions if not action.option_strings or action.required]
    words = [
        f"[{value_of(each)}]" if each.nargs in ("?", "*") else f"{each.option_strings[0]} {value_of(each)}"
        if each.option_strings else value_of(each)
        for each in needed
    ]  # fmt: skip
    return " ".join([verb.prog, *words, "[flags]" if has_settings or actions != needed else ""]).rstrip()


def options(actions: list[argparse.Action], verb: str) -> str:
    """Return arguments and flags, each under a heading of its own, which the search finds and links lead to."""
    entries = []
    for action in actions:
        name = max(action.option_strings, key=len, default=action.dest).strip("-").replace(".", "-").replace("_", "-")
        entries.append(f"#### {written(action)} {{#{verb}-{name}}}\n\n{described(action)}\n")
    return block("options", "\n".join(entries)) if entries else ""


def written(action: argparse.Action) -> str:
    """Return an argument or a flag as it is typed, with its other spellings."""
    value = value_of(action)
    if not action.option_strings:
        return code(value)
    main = max(action.option_strings, key=lambda flag: "." in flag)  # the dotted one of a configuration's key
    others = [flag for flag in action.option_strings if flag != main]
    return " ".join([code(f"{main} {value}".strip()), *map(code, others)])


def value_of(action: argparse.Action) -> str:
    """Return how the value of an argument is written; empty for a flag without one."""
    if action.nargs == 0:
        return ""
    if action.choices and not action.metavar:
        return "|".join(map(str, action.choices))
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    shown = action.metavar or action.dest.upper().replace("_", "-")
    return str(shown) + ("..." if action.nargs in ("+", "*") else "")


def described(action: argparse.Action) -> str:
    """Return the help of an argument, with its default set apart."""
    text = (action.help or "").replace("%%", "%")
    text, default = re.fullmatch(r"(.*?)(?: \(default: (.*)\))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
    notes = ["required"] if action.required and action.option_strings else []
    notes += [f"default {code(default)}"] if default else []
    notes += ["may be repeated"] if isinstance(action, argparse._AppendAction) else []
    return plain(text) + "".join(f" · {note}" for note in notes)
