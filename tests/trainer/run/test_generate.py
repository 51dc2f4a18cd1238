"""Generation: prompts of any lengths together, sampled alike in any batch and layout; what the command prints."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.support.training import ROOT, call
from threefold.options import FlagText
from trainer.job.ranks import Ranks
from trainer.run.continuation import Until
from trainer.run.generate import Generation, Piece
from trainer.run.inference import TrainedModel, open_checkpoint
from trainer.run.sampling import Sampling
from trainer.verify import plain_model

PROMPTS = ["w1 w2 w3", "w4", "w7 w9 w11 w13 w15 w17 w19", "w4", "w30 w31"]
WARM = Sampling(1.5, top_k=40, top_p=0.98, min_p=0.001, seed=5)


@pytest.fixture(scope="module")
def run(job_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run with a tokenizer of its vocabulary's size beside it."""
    folder = tmp_path_factory.mktemp("generate")
    assert call("train", job_config, "--train-steps", 4, "--save", folder / "run") == 0
    vocabulary = {f"w{number}": number for number in range(61)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model, "added_tokens": []}
    (folder / "tok.json").write_text(json.dumps(tokenizer))
    model["vocab"] = vocabulary | {"w61": 61}
    (folder / "large.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def generation(run: Path) -> Iterator[Generation]:
    """The trained run, open."""
    with Ranks("cpu", timeout_s=60) as ranks:
        yield Generation(opened(run), ranks)


def opened(run: Path, **flags: object):
    """The checkpoint with its tokenizer, and with other flags, such as `parallel_tp`."""
    named = {"data.tokenizer": run / "tok.json"} | {key.replace("_", ".", 1): flag for key, flag in flags.items()}
    settings = {name: FlagText(str(flag), f"--{name}") for name, flag in named.items()}
    size = int(str(flags.get("parallel_tp", 1))) * int(str(flags.get("parallel_pp", 1)))
    return open_checkpoint(str(run / "run"), None, settings, world_size=size)


def texts_of(pieces: Iterator[Piece], num_samples: int = 1) -> list[list[str]]:
    """The whole texts, by prompt and sample; each has one end, which is its last piece."""
    texts, ended = [[""] * num_samples for _ in PROMPTS], set()
    for piece in pieces:
        place = piece.prompt, piece.sample
        assert place not in ended
        texts[piece.prompt][piece.sample] += piece.text
        if piece.finish:
            ended.add(place)
    assert len(ended) == len(PROMPTS) * num_samples
    return texts


def sampled(generation: Generation, prompts: list[str], **options: int) -> list[list[str]]:
    """What follows prompts, up to a word that some of them get early."""
    until = Until(9, texts=(" w2",))
    encoded = [generation.encode(prompt) for prompt in prompts]
    return texts_of(generation.stream(encoded, until, WARM, **options), options.get("num_samples", 1))


def test_a_prompt_is_continued_alike_in_any_batch(generation: Generation) -> None:
    expected = sampled(generation, PROMPTS, num_samples=3)
    assert sampled(generation, PROMPTS, num_samples=3, batch_size=4) == expected
    assert sampled(generation, PROMPTS, num_samples=3, batch_size=1) == expected
    assert sampled(generation, PROMPTS[::-1], num_samples=3)[::-1] == [
        *expected[:1],
        expected[3],
        expected[2],
        expected[1],
        expected[4],
    ]
    assert [row[0] for row in sampled(generation, PROMPTS)[:3]] == [row[0] for row in expected[:3]]
    of_equals = expected[1] + expected[3]
    assert len(set(of_equals)) > 4, "samples of equal prompts differ"
    assert len({len(text.split()) for row in expected for text in row}) > 2, "some rows end before others"


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        (["trainer", "launch"], ["--tp", 2, "--temperature", 1.5, "--top-p", 0.95, "--seed", 3, "--samples", 2]),
        (["torch.distributed.run"], ["--pp", 2]),
    ],
    ids=["launch-tp2", "torchrun-pp2"],
)
def test_several_processes_print_the_same(
    run: Path, launcher: list[str], flags: list, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", run / "run", "--data.tokenizer", run / "tok.json", "--json", "--ignore-end"]
    words += [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    assert call(*words, *flags[2:]) == 0
    expected = json.loads(capsys.readouterr().out)["answers"]
    module = ["-m", "trainer"] if launcher == ["torch.distributed.run"] else []
    command = [sys.executable, "-m", *launcher, "--nproc-per-node", 2, *module, *words, *flags]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answers"] == expected


@pytest.mark.slow
@pytest.mark.ci
def test_several_processes_answer_lines_of_stdin(run: Path) -> None:
    words = [
        "--nproc-per-node",
        "2",
        "generate",
        str(run / "run"),
        "--data.tokenizer",
        str(run / "tok.json"),
        "--tp",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "launch", *words],
        input="w1 w2\n" + "w1 " * 40 + "\nw3\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["w1", "w3"]
    assert done.stderr.count("the prompt has 40 tokens") == 1


def test_streams_may_take_turns(generation: Generation) -> None:
    prompts = [[generation.encode(text)] for text in PROMPTS[:2]]
    alone = [list(generation.stream(prompt, Until(6), WARM)) for prompt in prompts]
    turns = zip(*(generation.stream(prompt, Until(6), WARM) for prompt in prompts), strict=True)
    assert [list(pieces) for pieces in zip(*turns, strict=True)] == alone


def test_a_prompt_may_fill_the_window(generation: Generation) -> None:
    window = generation.window
    [piece] = generation.stream([generation.encode("w1 " * window)], Until(5))
    assert piece.finish == "window"
    pieces = list(generation.stream([generation.encode("w1 " * (window - 2))], Until(5)))
    assert [piece.finish for piece in pieces] == [None, None, "window"]


def test_the_command_prints_prompt_and_continuation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        run / "run",
        "--prompt",
        "w1 w2 w3",
        "--data.tokenizer",
        run / "tok.json",
        "--tokens",
        40,
        "--ignore-end",
    ]
    texts = []
    for flags in ([], ["--temperature", 1, "--seed", 5], ["--temperature", 1, "--seed", 5], []):
        assert call("generate", *arguments, *flags) == 0
        captured = capsys.readouterr()
        assert "the text ended at the model's window: it reads 32 tokens" in captured.err
        texts.append(captured.out)
    assert all(text.startswith("w1 w2 w3 ") and len(text.split()) == 33 for text in texts)
    assert texts[0] == texts[3] != texts[1] == texts[2]


def test_the_command_prints_several_as_text_or_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "prompts.txt").write_text("w5 w6\n\nw7\n")
    (run / "prompts.jsonl").write_text('{"prompt": "w5 w6"}\n"w7"\n')
    arguments = ["generate", run / "run", "--prompt", "w1", "--data.tokenizer", run / "tok.json", "--tokens", 3]
    assert call(*arguments, "--prompts", run / "prompts.txt", "--ignore-end") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["--- prompt 1", "--- prompt 2", "--- prompt 3"]
    assert [len(line.split()) for line in lines[1::2]] == [4, 5, 4]
    warm = ["--temperature", 2, "--samples", 2, "--batch-size", 4, "--json", "--ignore-end"]
    assert call(*arguments, "--prompts", run / "prompts.jsonl", *warm) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(each["prompt"], each["sample"]) for each in report["answers"]] == [
        (prompt, sample) for prompt in range(3) for sample in range(2)
    ]
    assert all(each["finish"] == "length" and len(each["tokens"]) == 3 for each in report["answers"])
    assert [each["num_prompt_tokens"] for each in report["answers"]] == [1, 1, 2, 2, 1, 1]
    assert report["tokens_per_s"] > 0


def test_rows_end_before_tokens_and_texts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", run / "run", "--prompt", "w1 w2 w3", "--data.tokenizer", run / "tok.json", "--json"]
    assert call(*arguments, "--tokens", 12, "--ignore-end") == 0
    [answer] = json.loads(capsys.readouterr().out)["answers"]
    words = answer["text"].split()
    assert answer["tokens"] == [int(word[1:]) for word in words]
    fifth = next(number for number in range(3, 12) if words[number] not in words[:number])
    for flags in (["--stop-token", words[fifth]], ["--stop-token", words[fifth][1:]], ["--stop", f" {words[fifth]}"]):
        assert call(*arguments, "--tokens", 12, "--ignore-end", *flags) == 0
        [cut] = json.loads(capsys.readouterr().out)["answers"]
        assert (cut["text"].split(), cut["finish"]) == (words[:fifth], "stop")


def test_lines_of_stdin_are_continued(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["w1 w2", "", "w1 " * 40, "w3", "/end", "w4"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert call("generate", run / "run", "--data.tokenizer", run / "tok.json", "--tokens", 2, "--ignore-end") == 0
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()] == ["w1", "w3"]
    assert "the prompt has 40 tokens, and the model reads 32" in captured.err


def test_a_window_cuts_rows_that_are_longer_than_those_of_training(job_config: Path, tmp_path: Path) -> None:
    """As where the last rows of a mixture were longer: what the configuration plans says nothing of them."""
    flags = ["--model.window", 8, "--model.window-every", 2, "--train.seq-length", 4]
    assert call("train", job_config, "--train-steps", 1, "--save", tmp_path / "run", *flags) == 0
    checkpoint = replace(open_checkpoint(str(tmp_path / "run"), None, {}, world_size=1), window=16)
    assert checkpoint.config.train.seq_length == 4
    tokens = torch.randint(61, (1, 16), generator=torch.Generator().manual_seed(0))
    with Ranks("cpu", timeout_s=60) as ranks:
        engine = TrainedModel(checkpoint, ranks).engine
        logits = engine.logits(tokens)
        windows = [block.attention.window for block in engine.chunks[0].blocks]
        names = engine.choices.names
        state = {name: value.detach().double() for name, value in engine.store.values()}
    assert windows == [8, None, 8]
    assert names == {"attention": "sdpa-cpu", "attention-window-8": "reference"}
    model, positions = engine.config.model, torch.arange(16).unsqueeze(0)
    expected, full = (
        plain_model.logits(each, state, tokens, positions, lambda x, **place: x)[:, -1, :61]
        for each in (model, replace(model, window=0))
    )
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    assert (expected - full).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "no tokenizer to read the prompt with"),
        (["--data.tokenizer", "large.json"], "has 62 tokens, the model 61"),
        (["--data.tokenizer", "tok.json", "--prompt", ""], "the prompt holds no token"),
        (["--data.tokenizer", "tok.json", "--prompt", "w1 " * 33], "the prompt has 33 tokens, and the model reads 32"),
        (["--data.tokenizer", "tok.json", "--top-k", 5], "top_k needs temperature"),
        (["--data.tokenizer", "tok.json", "--samples", 5], "samples needs temperature"),
        (["--data.tokenizer", "tok.json", "--stop-token", "<end>"], "the tokenizer has no token '<end>'"),
        (["--data.tokenizer", "tok.json", "--stop-token", "61"], "the tokenizer has no token '61'"),
        (["--data.tokenizer", "tok.json", "--stop", ""], "--stop is an empty text"),
        (["--data.tokenizer", "tok.json", "--prompts", "none.txt"], "No such file or directory"),
        (["--data.tokenizer", "tok.json", "--prompts", "wrong.jsonl"], "line 2 of wrong.jsonl is not JSON"),
        (["--data.tokenizer", "tok.json", "--prompts", "chats.jsonl"], "line 1 of chats.jsonl has messages"),
        (["--data.tokenizer", "tok.json", "--prompts", "empty.txt"], "empty.txt holds no prompt"),
        (["--data.tokenizer", "tok.json", "--chat"], "the tokenizer has no chat template"),
        (["--data.tokenizer", "tok.json", "--system", "be kind"], "system needs chat"),
        (["--data.tokenizer", "tok.json", "--cp", 1, "--tp", 2], "needs 2 processes"),
    ],
)
def test_what_cannot_be_generated(
    run: Path, flags: list, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    Path("wrong.jsonl").write_text('"w1"\n{\n')
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "w1"}]}\n')
    Path("empty.txt").write_text("\n")
    assert call("generate", "run", "--prompt", "w1", *flags) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "hint: " in error


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--tokens", 0], "argument --tokens: '0' is not a whole number >= 1"),
        (["--temperature", -1], "argument --temperature: '-1' is not a number >= 0"),
        (["--top-p", 0], "argument --top-p: '0' is not a number > 0 and <= 1"),
        (["--min-p", 2], "argument --min-p: '2' is not a number >= 0 and <= 1"),
    ],
)
def test_numbers_out_of_range_are_usage_faults(flags: list, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        call("generate", "run", "--prompt", "w1", *flags)
    assert expected in capsys.readouterr().err


def test_json_is_for_prompts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("generate", run / "run", "--data.tokenizer", run / "tok.json", "--json") == 2
    assert "--json is for prompts that are given" in capsys.readouterr().err
