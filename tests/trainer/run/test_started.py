"""Void steps of a run: what is logged, saved and read afterwards."""

from pathlib import Path

import pytest

from tests.trainer.support.training import Job, curve, lines
from tests.trainer.support.void_faults import compare_repeated, make_void, metadata, train
from trainer.verdict import Outcome


@pytest.mark.parametrize("late", [pytest.param(False, marks=[pytest.mark.ci, pytest.mark.slow]), True])
def test_a_step_that_is_repeated_leaves_no_trace_but_an_event(
    job_config: Path, tmp_path: Path, request: pytest.FixtureRequest, *, late: bool
) -> None:
    assert train(job_config, tmp_path, "plain") == 0
    with pytest.MonkeyPatch.context() as patch:
        if late:
            request.getfixturevalue("reads_late")
        make_void(patch, Outcome.REPEATED, 1, 4, 5)
        assert train(job_config, tmp_path, "void") == 0
    compare_repeated(tmp_path)
    found = [(line["step"], line["repeats"]) for line in lines(tmp_path / "void.jsonl", "void")]
    assert found[0] == (1, True)
    assert {repeats for _, repeats in found} == {True}


def test_the_last_step_is_repeated_too(job_config: Path, tmp_path: Path, reads_late: None) -> None:
    assert train(job_config, tmp_path, "plain", "--save-interval", 0) == 0
    with pytest.MonkeyPatch.context() as patch:
        make_void(patch, Outcome.REPEATED, 5)
        assert train(job_config, tmp_path, "void", "--save-interval", 0) == 0
    assert curve(tmp_path / "void.jsonl", "loss") == curve(tmp_path / "plain.jsonl", "loss")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("late", [False, True])
def test_a_run_goes_on_after_a_void_step_and_resumes_with_its_updates(
    job_config: Path, tmp_path: Path, request: pytest.FixtureRequest, *, late: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if late:
            request.getfixturevalue("reads_late")
        make_void(patch, Outcome.SKIPPED, 2)
        assert train(job_config, tmp_path, "whole") == 0
    with pytest.MonkeyPatch.context() as patch:
        make_void(patch, Outcome.SKIPPED, 2)
        assert train(job_config, tmp_path, "parts", "--train-steps", 3) == 0
    assert train(job_config, tmp_path, "parts") == 0
    for run in ("whole", "parts"):
        assert [metadata(tmp_path / run, step)["updates"] for step in range(1, 6)] == [1, 1, 2, 3, 4]
        events = lines(tmp_path / f"{run}.jsonl", "void")
        assert [(line["step"], line["repeats"]) for line in events] == [(2, False)]
        assert [*curve(tmp_path / f"{run}.jsonl", "loss")] == [1, 2, 3, 4, 5]
    for name in ("loss", "grad_norm", "tokens"):
        assert curve(tmp_path / "whole.jsonl", name) == curve(tmp_path / "parts.jsonl", name)
    assert metadata(tmp_path / "whole", 5)["cursor"] == metadata(tmp_path / "parts", 5)["cursor"]


def test_a_step_that_is_void_again_and_again_ends_the_run(
    job_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_void(monkeypatch, Outcome.REPEATED, *range(2, 99))
    assert train(job_config, tmp_path, "void") == 2
    assert "step 2 was void 8 times" in capsys.readouterr().err
    assert metadata(tmp_path / "void", 1)["updates"] == 1


@pytest.mark.slow
@pytest.mark.ci
def test_each_document_of_every_rank_counts_its_own_attention(job_config: Path, tmp_path: Path) -> None:
    flags = [job_config, "--train-steps", 2, "--save-interval", 0, "--model.window", 8, "--model.window-every", 3]

    def flops(run: str, num_ranks: int, *more: object) -> list[float]:
        path = tmp_path / f"{run}.jsonl"
        Job(num_ranks, *flags, *more, metrics=path).run()
        return [line["tflops_per_gpu"] / line["tokens_per_s_per_gpu"] for line in lines(path)]

    rows, masked = flops("rows", 1), flops("masked", 1, "--data.document-mask", "true")
    assert rows == pytest.approx(rows[:1] * 2, rel=1e-12)
    assert max(masked) < 0.995 * rows[0], "every document ends before its row"
    assert masked[0] != pytest.approx(masked[1], rel=1e-6), "other documents"
    assert flops("ranks", 2, "--data.document-mask", "true") == pytest.approx(masked, rel=1e-12)
