"""The whole job on one machine, from text to a run that survives a kill and a change of layout.

Gathers the Python standard library's sources as a corpus, trains a tokenizer, preprocesses, starts a real S3 server on
loopback, trains a small GPT as TP2 x PP2 in four processes, kills that run with SIGKILL, reshards its newest checkpoint
on object storage, resumes as PP2 x DP2, evaluates, generates, and compares every loss with an uninterrupted run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from threefold.cli import Parser, run
from threefold.scratch import fresh_folder

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
CONFIG = ROOT / "examples" / "demo.toml"
BUCKET = "demo"
FIRST_STEPS = 20  # after the layout change, this many losses must agree to the tight tolerance
FALL = 0.3  # what the loss must fall by at least
PROMPT = "def read(self, "
TITLE = "One run whole (tp2 x pp2), and the same killed and resumed as pp2 x dp2"


def main() -> int:
    parser = Parser(prog="demo.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for all that the demo makes")
    parser.add_argument("--precision", choices=["fp32", "fp64"], default="fp32", help="precision of the training")
    parser.add_argument("--first-rtol", type=float, default=1e-5, help="bound on the first losses after the resume")
    parser.add_argument("--all-rtol", type=float, default=1e-2, help="bound on every loss after the resume")
    parser.add_argument("--train-steps", type=int, default=80, help="steps of the uninterrupted run")
    parser.add_argument("--save-interval", type=int, default=10, help="steps between saves")
    parser.set_defaults(handler=demo)
    return run(parser)


def demo(arguments: argparse.Namespace) -> int:
    """Do the whole job; 0 when the resumed run agrees with the uninterrupted one."""
    output = fresh_folder(arguments.output, "demo.py")
    started = time.monotonic()
    keep_inside(output / "tmp")

    say("1/7 corpus and tokenizer")
    corpus = gather_corpus(output / "corpus.jsonl")
    tokenizer = output / "tokenizer.json"
    call("datakit", "train-tokenizer", corpus, "--vocab-size", 4096, "--output", tokenizer)

    say("2/7 token store")
    store = output / "store"
    summary = json.loads(
        call("datakit", "preprocess", corpus, "--output", store, "--tokenizer", tokenizer, "--append-eod",
             "--workers", 2, "--split", "0.99,0.01", "--json")
    )  # fmt: skip
    call("datakit", "verify", store / "train")  # its own copy of the tokenizer too: none is named from here on

    with s3_server(output / "s3") as environment:
        source, target = f"s3://{BUCKET}/run", f"s3://{BUCKET}/resharded"
        train = Training(output, store, environment, arguments)
        say("3/7 the uninterrupted run, tp2 x pp2 in four processes")
        train.run("whole", f"s3://{BUCKET}/whole", tp=2, pp=2)

        say("4/7 the same run, killed with SIGKILL")
        killed_at = train.run_until_killed("killed", source, tp=2, pp=2)
        listing = json.loads(call("ckptkit", "ls", source, "--json", env=environment))

        say("5/7 reshard on object storage, then resume as pp2 x dp2")
        call("ckptkit", "reshard", source, target, "--pp", 2, "--dp", 2, env=environment)
        train.run("resumed", target, tp=1, pp=2)

        say("6/7 verify, evaluate, generate")
        verified = json.loads(call("ckptkit", "verify", target, "--json", env=environment))
        evaluation = json.loads(call("trainer", "eval", target, *train.flags(), "--json", env=environment))
        text = call("trainer", "generate", target, *train.flags(), "--prompt", PROMPT,
                    "--tokens", 60, "--temperature", 0.8, env=environment)  # fmt: skip

    say("7/7 compare")
    runs = {name: output / f"{name}.jsonl" for name in ("whole", "killed", "resumed")}
    plot = output / "losses.png"
    call(sys.executable, TOOLS / "plot_metrics.py", *runs.values(), "--output", plot, "--title", TITLE)
    agreed = report(runs, summary, listing, verified, evaluation, killed_at, arguments)
    print(f"\ngenerated:\n{text}")
    shutil.rmtree(output / "tmp", ignore_errors=True)
    print(f"loss plot: {plot}\nwhole demo: {time.monotonic() - started:.0f} s")
    return 0 if agreed else 1


class Training:
    """Starts the trainer under torchrun with the demo's configuration."""

    def __init__(self, output: Path, store: Path, environment: dict[str, str], arguments: argparse.Namespace) -> None:
        self.output, self.store = output, store
        self.environment, self.arguments = environment, arguments

    def flags(self) -> list[object]:
        return [
            CONFIG, "--data.stores", self.store / "train", "--data.valid.stores", self.store / "valid",
            "--train-steps", self.arguments.train_steps,
            "--train.precision", self.arguments.precision,
        ]  # fmt: skip

    def start(self, name: str, url: str, *, tp: int, pp: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4,
            "-m", "trainer", "train",
            *self.flags(), "--tp", tp, "--pp", pp, "--save", url, "--save-interval", self.arguments.save_interval,
            "--metrics", self.output / f"{name}.jsonl",
        ]  # fmt: skip
        log = (self.output / f"{name}.log").open("wb")
        return subprocess.Popen(
            [str(word) for word in command], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            env=self.environment | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip

    def run(self, name: str, url: str, *, tp: int, pp: int) -> None:
        process = self.start(name, url, tp=tp, pp=pp)
        try:
            for _ in self.follow(process, name):
                pass
            if process.returncode:
                self.fail(name)
        finally:
            kill_run(process)

    def run_until_killed(self, name: str, url: str, *, tp: int, pp: int) -> int:
        """Kill the run past its half, a few steps after a save; return the last step it logged."""
        process = self.start(name, url, tp=tp, pp=pp)
        target = self.arguments.train_steps // 2 + self.arguments.save_interval // 3
        try:
            if not any(step >= target for step in self.follow(process, name)):
                self.fail(name)
        finally:
            kill_run(process)
        return max(losses(self.output / f"{name}.jsonl"))

    def follow(self, process: subprocess.Popen[bytes], name: str) -> Iterator[int]:
        """Yield the last step that a run logged, again and again until it ends; a line is shown every so many steps."""
        metrics, shown = self.output / f"{name}.jsonl", 0
        while process.poll() is None:
            time.sleep(0.05)
            done = losses(metrics) if metrics.exists() else {}
            step = max(done, default=0)
            if step >= shown + self.arguments.save_interval:
                shown = step - step % self.arguments.save_interval
                print(f"   step {step} of {self.arguments.train_steps}, loss {done[step]:.4f}", flush=True)
            yield step

    def fail(self, name: str) -> None:
        log = (self.output / f"{name}.log").read_text(errors="replace")
        sys.exit(f"the {name} run failed:\n{log[-6000:]}")


def keep_inside(folder: Path) -> None:
    """Have what all programs of the demo leave for themselves, as caches and torchrun's logs, in one folder."""
    folder.mkdir()
    for name in ("TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR"):
        os.environ[name] = str(folder)


def kill_run(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL torchrun and all its workers, as a lost node would; checkpoint writers live in sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        for victim in [psutil.Process(process.pid), *psutil.Process(process.pid).children()]:
            victim.kill()
    process.wait()


def gather_corpus(path: Path) -> Path:
    """Write every source file of the standard library, one JSON document a line."""
    library = Path(sysconfig.get_paths()["stdlib"])
    with path.open("w", encoding="utf-8") as out:
        for source in sorted(library.rglob("*.py")):
            relative = source.relative_to(library)
            if "site-packages" in relative.parts:
                continue
            try:
                text = source.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # a few test files are in other encodings on purpose
                continue
            if text.strip():
                out.write(json.dumps({"text": text, "path": str(relative)}) + "\n")
    return path


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """A real S3 server on loopback; yields the environment that reaches it."""
    script = TOOLS / "s3_server.py"
    exports = call(sys.executable, script, "start", folder, "--bucket", BUCKET)
    settings = dict(line.removeprefix("export ").split("=", 1) for line in exports.splitlines() if "=" in line)
    try:
        yield {**os.environ, **settings}
    finally:
        call(sys.executable, script, "stop", folder)


def call(*command: object, env: dict[str, str] | None = None) -> str:
    """Run one command of the project, show its progress, return its standard output."""
    words = [str(word) for word in command]
    if words[0] in ("datakit", "ckptkit", "trainer"):
        words = [sys.executable, "-m", *words]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with exit code {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def lines(path: Path) -> list[dict[str, object]]:
    """Return the whole lines of a metrics file; a line that is still being written is left out."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def losses(path: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(path) if "event" not in line}  # type: ignore[misc]


def report(
    runs: dict[str, Path], summary: dict, listing: list, verified: dict, evaluation: dict, killed_at: int,
    arguments: argparse.Namespace,
) -> bool:  # fmt: skip
    """Print the one table; True when the resumed run agrees with the uninterrupted one and the loss fell."""
    whole, killed, resumed = (losses(path) for path in runs.values())
    saves = [line for line in lines(runs["whole"]) if line.get("event") == "save" and line["ok"]]
    first, last = min(resumed), max(whole)
    gap = {step: abs(resumed[step] - whole[step]) / whole[step] for step in resumed}
    first_gap = max(gap[step] for step in sorted(gap)[:FIRST_STEPS])
    fell = 1 - whole[last] / whole[min(whole)]
    stalls = sorted(float(save["stall_s"]) for save in saves)
    agrees = first_gap <= arguments.first_rtol, max(gap.values()) <= arguments.all_rtol
    rows: list[tuple[str, str, bool | None]] = [  # what was done, what came of it, and whether that is right
        ("preprocess", f"{summary['mb_per_s']:.1f} MB/s, {summary['tokens_per_s']:,.0f} tokens/s", None),
        ("corpus", f"{summary['num_documents']:,} documents, {summary['num_tokens']:,} tokens", None),
        ("loss at the start", f"{whole[min(whole)]:.6f}", None),
        (f"loss at the kill (step {killed_at})",
         f"{killed[killed_at]:.6f} (uninterrupted {whole[killed_at]:.6f})", None),
        (f"loss at the resume (step {first})", f"{resumed[first]:.6f} (uninterrupted {whole[first]:.6f})", None),
        (f"loss at the end (step {last})", f"{resumed[last]:.6f} (uninterrupted {whole[last]:.6f})", None),
        ("loss fell by", f"{fell:.1%} (at least {FALL:.0%})", fell >= FALL),
        (f"largest difference, first {FIRST_STEPS} steps", f"{first_gap:.1e} (bound {arguments.first_rtol:.0e})",
         agrees[0]),
        ("largest difference, all steps", f"{max(gap.values()):.1e} (bound {arguments.all_rtol:.0e})", agrees[1]),
        ("difference at the last step", f"{gap[last]:.1e}", None),
        ("stall of a save", f"median {1e3 * stalls[len(stalls) // 2]:.0f} ms, longest {1e3 * stalls[-1]:.0f} ms", None),
        ("bytes of a save", f"{saves[-1]['bytes']:,}", None),
        ("steps committed before the kill", ", ".join(str(row["step"]) for row in listing), bool(listing)),
        ("verify", "all checksums hold" if verified["ok"] else "DAMAGED", bool(verified["ok"])),
        ("validation", f"loss {evaluation['loss']:.4f}, perplexity {evaluation['perplexity']:.1f}", None),
    ]  # fmt: skip
    print("\n" + "\n".join(table(rows)))
    return all(is_right for _, _, is_right in rows if is_right is not None)


def table(rows: list[tuple[str, str, bool | None]]) -> list[str]:
    """Return the lines of a table, each with a mark before it if it is a check: letters that any terminal has."""
    width = max(len(name) for name, _, _ in rows)
    marks = {None: "", True: "ok", False: "FAILED"}
    return [f"{marks[is_right]:<6}  {name:<{width}}  {value}" for name, value, is_right in rows]


if __name__ == "__main__":
    sys.exit(main())
