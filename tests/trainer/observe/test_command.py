"""A command hears of what somebody should know, and of nothing else; its first fault is said, and it has an end."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.observe.sinks.command import Command, is_heard


@pytest.mark.parametrize(
    ("line", "heard"),
    [
        ({"step": 1, "loss": 2.0}, False),
        ({"event": "save", "step": 1, "ok": True}, False),
        ({"event": "save", "step": 1, "ok": False, "error": "no room"}, True),
        ({"event": "save", "step": 1, "ok": False, "error": "skipped: a save before it still runs"}, False),
        ({"event": "copy", "step": 1, "ok": False, "error": "gone"}, True),
        ({"event": "stall", "step": 1}, True),
        ({"event": "spike", "step": 1}, True),
        ({"event": "end", "step": 1}, True),
        ({"event": "eval", "step": 1}, False),
    ],
)
def test_what_is_heard(line: dict[str, Any], heard: bool) -> None:
    assert is_heard(line) is heard


def test_a_command_gets_the_event_and_an_end(tmp_path: Path) -> None:
    end = {"event": "end", "step": 7, "complete": True}
    texts: list[str] = []
    Command(f"tee {tmp_path}/heard", texts.append).write(end)
    assert json.loads((tmp_path / "heard").read_text()) == end
    Command("sleep 100", texts.append, ends_within_s=0.05).write(end)
    Command("sh -c 'echo bad >&2; exit 4'", texts.append).write(end)
    Command(f"{tmp_path}/heard", texts.append).write(end)
    assert texts == [
        "sleep, for the event end of step 7, was ended after 0.05 s",
        "sh, for the event end of step 7, ended with 4: bad",
        f"{tmp_path}/heard, for the event end of step 7, did not start: Permission denied",
    ]
