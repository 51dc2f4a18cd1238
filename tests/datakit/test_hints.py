"""Hints can be pasted into a shell: a path with blanks is one word of their commands."""

import re
import shlex
from pathlib import Path

import pytest

from datakit import write_store
from tests.datakit.conftest import Cli

RUN = '[data]\nstores = ["{store}"]\n[train]\nseq_length = 2\ntrain_steps = 3\nglobal_batch_size = 1\n'
STORE, OTHER, EMPTY, CONFIG = "a store", "no store", "empty's file.jsonl", "my run.toml"
PASTED = {
    f"inspect '{OTHER}'": ["ls", "."],
    f"inspect '{STORE}' --document 9": ["datakit", "inspect", STORE, "--document", "2"],
    f"inspect '{STORE}' --packing pad --sample 0 --seq-length 4": [
        "datakit", "pack", STORE, "--seq-length", "4", "--packing", "pad",
    ],
    f"blame '{CONFIG}'": ["datakit", "blame", CONFIG, "--step", "1"],
    f"where '{CONFIG}' --document 3": ["--document", f"{STORE}:0"],
    f"where '{CONFIG}' --document '{STORE}:9'": ["--document", f"{STORE}:2"],
    f"preprocess \"{EMPTY}\" --output b --tokenizer '{STORE}/../tok.json'": ["ls", "-l", EMPTY],
    f"stats '{STORE}' --report '{STORE}'": [f"{STORE}/page.html"],
}  # fmt: skip


@pytest.mark.parametrize("command", PASTED)
def test_a_path_with_blanks_is_one_word(
    tmp_path: Path, tokenizer_path: str, cli: Cli, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], command: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / STORE, [[1, 2, 3]] * 3, vocab_size=9)
    Path(CONFIG).write_text(RUN.format(store=STORE))
    Path(EMPTY).touch()
    Path("tok.json").symlink_to(tokenizer_path)
    assert cli(*shlex.split(command))
    [hint] = re.findall("^hint: (.*)$", capsys.readouterr().err, re.MULTILINE)
    assert shlex.split(hint) == PASTED[command]
