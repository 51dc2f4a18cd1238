"""Runs in drawn orders have the bits of the plain one, hangs are named, and parts of a night add up."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.printed import printed
from tests.trainer.verify.test_shrink import run_of
from threefold.errors import UserError
from trainer import engine
from trainer.cli import main
from trainer.config import Config
from trainer.mesh.group import Group
from trainer.verify.bench import Bench
from trainer.verify.faults.named import FAULTS
from trainer.verify.faults.planting import wrapping
from trainer.verify.seeds import SeedPlan, situations, try_seed
from trainer.verify.shrink import shrunk
from trainer.verify.tally import Tally, range_of

FLAGS = {"parallel__pp": "2", "parallel__dp": "2", "train__micro_batch_size": "2"}
WORDS = ["verify", "examples/tiny.toml", "--layout", "pp2-dp2", "--micro-batch-size", "8"]
Capture = pytest.CaptureFixture[str]


def run_in(folder: Path, **flags: str) -> tuple[Config, Bench]:
    run = run_of("examples/tiny.toml", **FLAGS | flags)
    small = shrunk(run)
    return small.config, Bench(small, run, folder)


def test_seeds_have_equal_bits_and_replay(tmp_path: Path) -> None:
    config, bench = run_in(tmp_path)
    results = [try_seed(bench, seed) for seed in (1, 2, 1)]
    assert [result.text for result in results] == ["", "", ""]
    assert results[0] == results[2]
    assert results[0].trace != results[1].trace
    whole = Tally.of(config).added(results[:2])
    parts = Tally.of(config).added(results[:1]).added(results[1:2])
    assert (parts.situations, parts.num_seeds, parts.failed) == (whole.situations, 2, {})


@pytest.mark.slow
@pytest.mark.ci
def test_many_seeds_come_to_all_situations(tmp_path: Path) -> None:
    config, bench = run_in(tmp_path)
    tally = Tally.of(config).added([try_seed(bench, seed) for seed in range(1, 61)])
    assert tally.failed == {}
    assert tally.never == []


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    "flags",
    [
        {"parallel__zero_stage": "3", "parallel__tp": "2"},
        {"parallel__schedule": "zb-h1", "parallel__virtual_stages": "2", "model__num_layers": "4"},
        {"parallel__cp": "2", "parallel__pp": "1", "train__recompute": "full"},
    ],
    ids=["zero 3", "zero-bubble", "cp"],
)
def test_other_runs_have_equal_bits_in_all_orders(flags: dict[str, str], tmp_path: Path) -> None:
    _, bench = run_in(tmp_path, **flags)
    assert [text for seed in range(10) if (text := try_seed(bench, seed).text)] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hundreds_of_seeds_have_equal_bits(tmp_path: Path) -> None:
    _, bench = run_in(tmp_path)
    assert [text for seed in range(1000, 1500) if (text := try_seed(bench, seed).text)] == []


def left_out(real: Any, self: Group, called: str, *args: Any, **options: Any) -> Any:
    is_left_out = (called, self.name, self.ranks, self.index) == ("reduce_scatter", "dp", (2, 3), 1)
    return None if is_left_out else real(self, called, *args, **options)


def forwards_first(real: Any, name: str, pp: int, number: int, virtual: int, rank: int) -> Any:
    """Let the last stage receive for all forward passes before the first backward one."""
    return real("gpipe" if name == "1f1b" and rank == pp - 1 else name, pp, number, virtual, rank)


@pytest.mark.parametrize(
    ("plant", "texts"),
    [
        (wrapping(Group, "_call", left_out), ["(the update)", " of dp (2, 3), which places [0] joined"]),
        (
            wrapping(engine, "rank_actions", forwards_first),
            [
                "rank 2 (F, stage 1, micro-batch 2) waits for a receive from rank 0 by activations",
                "rank 0 (B, stage 0, micro-batch 0) waits for a receive from rank 2 by gradients",
            ],
        ),
    ],
    ids=["a sum", "a receive"],
)
def test_a_planted_hang_is_named(plant: Any, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, bench = run_in(tmp_path)
    seeds = [seed for seed in range(30) if not SeedPlan.drawn(bench, Random(f"plan {seed}")).death][:4]
    plant(monkeypatch)
    for seed in seeds:
        text = try_seed(bench, seed).text
        assert text.startswith("no rank can go on: rank ")
        assert [part for part in texts if part not in text] == [], text


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", ["sums-read-early", "parameters-read-early", "activations-read-early"])
def test_what_is_read_early_is_found_by_seeds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, bench = run_in(tmp_path)
    bench.layout  # noqa: B018
    FAULTS[name].plant(monkeypatch)
    assert any(try_seed(bench, seed).text for seed in range(1, 11))


def test_situations_are_those_that_the_run_can_come_to(tmp_path: Path) -> None:
    config, _ = run_in(tmp_path)
    without = shrunk(run_of("examples/tiny.toml")).config
    assert set(situations(config)) - set(situations(without)) == {
        "a receive was begun before its send",
        "a send waited",
    }


def test_parts_of_a_night_add_up_in_their_report(tmp_path: Path, capsys: Capture) -> None:
    report = tmp_path / "seeds.json"
    words = [*WORDS, "--json", str(report), "--seeds"]
    code, out, err = printed(main, [*words, "1-1"], capsys)
    assert (code, "1 seeds, 0 with other bits" in err) == (1, True)  # too few for all that is rare
    assert "a receive was begun before its send" in out
    assert printed(main, [*words, "2-2", "--allow-partial"], capsys)[0] == 0
    known = json.loads(report.read_text())
    assert (known["ranges"], known["num_seeds"], known["failed"]) == ([[1, 1], [2, 2]], 2, {})
    code, _, err = printed(main, [*words, "2-4"], capsys)
    assert (code, "seeds 2-2 are counted already" in err, "--seeds 3-5" in err) == (2, True, True)
    code, _, err = printed(main, [*words, "5-5", "--layout", "dp2"], capsys)
    assert (code, "is not a report of seeds of this run" in err) == (2, True)


def test_ranges_are_read() -> None:
    assert range_of("3-17") == (3, 17)
    for text in ("5", "7-6", "a-b", "-1-2", ""):
        with pytest.raises(UserError, match="is not a range"):
            range_of(text)
