"""A password in a run's URL, or in what a save records, is stored nowhere and shown by nobody."""

from pathlib import Path

import pytest

from ckptkit.cli import main
from ckptkit.saving.checkpointer import Checkpointer, CheckpointerOptions
from ckptkit.tiers.tier import Tier
from tests.ckptkit.support.saves import SMALL, save_one

RUN, SLOW = "local://me:hunter2@host/run", "local://me:hunter2@host/slow"  # folders of these names in the current one
CONFIG = {"checkpoint": {"save": RUN, "tiers": [f"{SLOW},every=10"]}, "endpoint": "http://me:hunter2@host:8333"}


def test_a_save_stores_and_shows_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = CheckpointerOptions(tiers=(Tier(SLOW),))
    with Checkpointer(RUN, attempt="a", options=options) as checkpointer:
        process = Path(f"/proc/{checkpointer.writer_pid}")
        seen = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        save_one(checkpointer, 1, SMALL, config=CONFIG, note="red\x1b[31m\nnext")
        seen += (process / "cmdline").read_bytes()
        reports = [*checkpointer.wait(), *checkpointer.close()]
        assert checkpointer.url == "local://***@host/run"
    assert [report.error for report in reports] == ["", ""]
    assert {report.url for report in reports} == {"local://***@host/run", "local://***@host/slow"}
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len([path for path in stored if path.name == "root.json"]) == 2
    for verb in ("ls", "inspect", "verify", "hash", "best", "prune"):
        main([verb, RUN])
        main([verb, RUN, "--json"])
    main(["copy", RUN, "local://me:hunter2@host/copied"])
    main(["reshard", RUN, "local://me:hunter2@host/reshard", "--dp", "2"])
    main(["inspect", "local://me:hunter2@host/nothing"])
    main(["diff", RUN, "local://me:hunter2@host/reshard"])
    main(["inspect", RUN, "--stats", "--json"])
    captured = capsys.readouterr()
    assert b"hunter2" not in seen + b"".join(path.read_bytes() for path in stored)
    assert "hunter2" not in captured.out + captured.err
    assert "local://***@host/run" in captured.out
    assert "local://***@host/nothing" in captured.err
    assert "red\\x1b[31m\\nnext" in captured.out
    assert "\x1b" not in captured.out
