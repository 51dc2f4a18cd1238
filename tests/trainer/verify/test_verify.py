"""The command: one line a check, a card for a reader or a program, exit codes, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.printed import printed
from tests.trainer.support.training import call, write_config, write_stores
from trainer.cli import main
from trainer.verify.faults.named import FAULTS

Capture = pytest.CaptureFixture[str]
TINY = "examples/tiny.toml"


def test_a_small_run_is_verified(tmp_path: Path, capsys: Capture) -> None:
    card, page = tmp_path / "card.json", tmp_path / "card.html"
    words = ["verify", TINY, "--layout", "tp2", "--seconds", "300", "--json", str(card), "--html", str(page)]
    code, out, err = printed(main, words, capsys)
    assert code == 0, out
    known = json.loads(card.read_text())
    assert (known["verdict"], known["layout"], known["layout_of_run"]) == ("ok", "tp2", "tp2")
    assert {check["state"] for check in known["checks"]} == {"ok", "not needed"}
    assert len(out.splitlines()) == len(known["checks"])
    assert known["config"]["model"]["hidden_size"] == 128
    assert "model.hidden_size 128 -> 16" in err
    assert "losses, norms, evaluation" in page.read_text()


def test_stores_behind_urls_are_not_asked_for_and_passwords_stay_out(tmp_path: Path, capsys: Capture) -> None:
    card, page = tmp_path / "card.json", tmp_path / "card.html"
    words = ["--data.stores", "s3://me:secret@host/store", "--data.cache", "/nothing", "--seconds", "1e-6"]
    code, out, err = printed(main, ["verify", TINY, *words, "--json", str(card), "--html", str(page)], capsys)
    assert code == 1, err
    assert "secret" not in out + err + card.read_text() + page.read_text()


def test_what_is_not_run_is_not_sound(capsys: Capture) -> None:
    words = ["verify", TINY, "--seconds", "1e-6"]
    code, out, err = printed(main, words, capsys)
    assert (code, out.count("not run")) == (1, len(out.splitlines()))
    assert "checks: partial" in err
    assert printed(main, [*words, "--allow-partial"], capsys)[0] == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nothing.toml"], "no configuration file nothing.toml"),
        ([TINY, "--layout", "tp3"], "model.num_heads 4 is not a multiple of parallel.tp 3"),
        ([TINY, "--layout", "tp2,pp2"], "is not a parallel layout"),
        ([TINY, "--layout", "tp2", "--tp", "4"], "--layout tp2 names all axes, and --tp one of them"),
        ([TINY, "--html", "{}/nowhere/card.html"], "the folder"),
        ([TINY, "--json", "."], "is a folder"),
        ([TINY, "other.toml"], "is verified"),
        (["--list"], "--list is of named faults"),
        (["--faults", "clip-by-ranks"], "no fault is named clip-by-ranks, did you mean clip-by-rank?"),
        (["--faults", "--layout", "tp2"], "--layout has no effect on --faults"),
        (["--faults", "--dp", "2"], "--dp has no effect on --faults"),
    ],
)
def test_what_cannot_be_verified_is_refused(words: list[str], text: str, tmp_path: Path, capsys: Capture) -> None:
    code, out, err = printed(main, ["verify", *(word.format(tmp_path) for word in words)], capsys)
    assert (code, out) == (2, "")
    assert text in err


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in Path("examples").glob("*.toml")))
def test_each_example_is_verified(name: str, capsys: Capture) -> None:
    code, out, _ = printed(main, ["verify", f"examples/{name}.toml", "--seconds", "300"], capsys)
    assert code == 0, out


@pytest.mark.slow
@pytest.mark.ci
def test_the_newest_step_of_a_run_is_restored_under_both_layouts(tmp_path: Path, capsys: Capture) -> None:
    write_stores(tmp_path)
    assert call("train", write_config(tmp_path), "--save", tmp_path / "run", "--train-steps", 2) == 0
    capsys.readouterr()
    words = ["verify", str(tmp_path / "run"), "--layout", "tp2-pp2", "--seconds", "300"]
    code, out, err = printed(main, words, capsys)
    assert code == 0, out
    assert "ok          the run's newest step" in out
    assert "verifying step 2 of" in err


def test_a_command_of_megatron_is_verified(capsys: Capture) -> None:
    command = "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128"
    words = ["verify", "--from-megatron", f"{command} --vocab-size 100 --train-iters 4 --tensor-model-parallel-size 2"]
    code, _, err = printed(main, [*words, "--seconds", "1e-6"], capsys)
    assert code == 1
    assert "as tp2, 2 layers" in err
    code, _, err = printed(main, ["verify", TINY, *words[1:]], capsys)
    assert (code, "is verified" in err) == (2, True)


def test_named_faults_are_listed_and_found(tmp_path: Path, capsys: Capture) -> None:
    listed = printed(main, ["verify", "--faults", "--list"], capsys)[1].splitlines()
    assert len(listed) >= 90
    [line] = [line for line in listed if line.startswith("gradients-doubled")]
    assert "one process, plain torch" in line
    assert "NVIDIA/Megatron-LM#6660" in line
    report = tmp_path / "faults.json"
    code, out, err = printed(main, ["verify", "--faults", "clip-by-rank", "--json", str(report)], capsys)
    assert (code, out.split()[:2]) == (0, ["found", "clip-by-rank"])
    assert "1 of 1 faults are found" in err
    [known] = json.loads(report.read_text())
    assert (known["layout"], known["check"], known["state"]) == ("dp2", "losses, norms, evaluation", "found")
    code, out, _ = printed(main, ["verify", "--faults", "clip-by-rank", "--seconds", "1e-9"], capsys)
    assert (code, out.split()[:2]) == (1, ["not", "run"])


def test_a_fault_that_is_not_found_is_an_error(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(FAULTS["clip-by-rank"], plant=lambda patch: None)
    monkeypatch.setitem(FAULTS, "clip-by-rank", harmless)
    code, out, _ = printed(main, ["verify", "--faults", "clip-by-rank"], capsys)
    assert (code, out.startswith("NOT FOUND")) == (1, True)
