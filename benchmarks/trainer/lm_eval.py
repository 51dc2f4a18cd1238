"""lm-eval on a run of the trainer, beside its own model of transformers on the folder that the run is exported to.

    python benchmarks/trainer/lm_eval.py --output DIR [--items 500] [--steps 80] [--layouts tp1,tp2]

lm-eval and transformers must be there: `pip install "lm-eval[hf]>=0.4.13"`. The corpus of examples/demo.py, the sources
of the standard library, makes a tokenizer, a store and a small run. Each item is of one file: some of its lines, and
the line that follows. `demo_choice` has that line and three of other files as choices, `demo_line` its likelihood,
`demo_text` that of all lines. Both models are asked the same, in fp32; compared are the metrics, and what each request
of each item was found to be: the log-likelihood and whether it is the likeliest. The peer sums the log-likelihoods of
tokens in float64, as ours does: sums of 500 in float32 have an error of 3e-5 themselves.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import add_option
from examples.demo import gather_corpus
from threefold.console import print_table

ROOT = Path(__file__).parents[2]
TASKS = {
    "demo_choice": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"},
    "demo_line": {"output_type": "loglikelihood", "doc_to_target": "{{line}}"},
    "demo_text": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{before}}{{line}}"},
}
METRICS = {"demo_choice": ["acc", "acc_norm"], "demo_line": ["acc", "perplexity"], "demo_text": ["bits_per_byte"]}
WITHIN = 1e-4  # of log-likelihoods
STDERR = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="a folder for corpus, run, tasks and results")
    parser.add_argument("--items", type=int, default=500, help="items of each task")
    parser.add_argument("--steps", type=int, default=80, help="steps of the run")
    parser.add_argument("--layouts", default="tp1,tp2", help="on which our model runs")
    add_option(parser)
    arguments = parser.parse_args()
    rows = compared(arguments.output, arguments.items, arguments.steps, arguments.layouts.split(","), arguments.record)
    print_table(("task", "layout", "metric", "trainer", "hf", "items", "requests", "largest difference"), rows)
    return (
        0 if all(float(row[-1]) <= WITHIN and row[3] == row[4] for row in rows if row[2] in ("acc", "acc_norm")) else 1
    )


def compared(output: Path, num_items: int, steps: int, layouts: Sequence[str], record: Any) -> list[list[str]]:
    """Return a row for each layout, task and metric, and record them."""
    output = output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    prepare(output, num_items, steps)
    peer = peers_results(output)
    rows = []
    for layout in layouts:
        results = trainers_own(output, layout)
        for task, metrics in METRICS.items():
            difference, num_requests = largest_difference(results["samples"][task], peer["samples"][task])
            for metric in metrics:
                own, other = (each["results"][task][f"{metric},none"] for each in (results, peer))
                texts = [f"{value:.4f}" if value < 1e6 else f"{value:.4e}" for value in (own, other)]
                rows.append([task, layout, metric, *texts, str(num_items), str(num_requests), f"{difference:.2g}"])
                if (task, metric) == ("demo_choice", "acc"):
                    claim = f"lm-eval: accuracy of {num_items} items with four choices, {layout}"
                    record.add(claim, own, "of 1", peer={"its own model of transformers": other})
            claim = f"lm-eval: largest difference of {num_requests} log-likelihoods of {task}, {layout}"
            record.add(claim, difference, "nats", limit={"allowed": WITHIN})
    return rows


def prepare(output: Path, num_items: int, steps: int) -> None:
    """Make corpus, tokenizer, store, run, the exported folder and the tasks, unless they are there."""
    corpus = output / "corpus.jsonl"
    if not corpus.exists():
        gather_corpus(corpus)
    write_tasks(output, num_items)
    if (output / "folder" / "config.json").exists():
        return
    run("datakit", "train-tokenizer", corpus, "--vocab-size", 4096, "--output", output / "tok.json")
    store = ["--output", output / "store", "--tokenizer", output / "tok.json", "--append-eod"]
    run("datakit", "preprocess", corpus, *store, "--split", "0.99,0.01")
    data = ["--data.stores", output / "store" / "train", "--data.valid.stores", output / "store" / "valid"]
    flags = ["--train-steps", steps, "--save", output / "run", "--train.eval-interval", steps]
    run("trainer", "train", ROOT / "examples" / "demo.toml", *data, *flags)
    run("ckptkit", "export", output / "run", output / "folder", "--to", "hf")
    (output / "folder" / "tokenizer.json").write_bytes((output / "tok.json").read_bytes())
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (output / "folder" / "tokenizer_config.json").write_text(json.dumps(special))


def write_tasks(output: Path, num_items: int) -> None:
    """Write items, and a file for each task, which is YAML as all JSON is."""
    folder = output / "tasks"
    folder.mkdir(exist_ok=True)
    items = folder / "items.jsonl"
    items.write_text("".join(json.dumps(item) + "\n" for item in items_of(output / "corpus.jsonl", num_items)))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(items)}},
            "test_split": "test",
            "doc_to_text": "{{before}}",
            "metric_list": [{"metric": metric} for metric in METRICS[name]],
        }
        (folder / f"{name}.yaml").write_text(json.dumps({**common, **task}))


def items_of(corpus: Path, num_items: int) -> Iterator[dict[str, Any]]:
    """Yield items: lines of a file, the one that follows, and lines of other files, in an order by chance."""
    chance = random.Random(1)
    texts = [json.loads(line)["text"] for line in corpus.open()]
    files = [lines for text in texts if len(lines := [line for line in text.splitlines() if line.strip()]) > 20]
    for _ in range(num_items):
        own, *others = chance.sample(files, 4)
        begin, size = chance.randrange(len(own) - 12), chance.randint(1, 10)
        line, *wrong = (
            f"{lines[place]}\n"
            for lines, place in [(own, begin + size), *((f, chance.randrange(len(f))) for f in others)]
        )
        answer = chance.randrange(4)
        choices = [*wrong[:answer], line, *wrong[answer:]]
        before = "".join(f"{text}\n" for text in own[begin : begin + size])
        yield {"before": before, "line": line, "choices": choices, "answer": answer}


def peers_results(output: Path) -> dict[str, Any]:
    """Return what lm-eval finds with its own model of the exported folder, in a process of its own."""
    code = (
        "import json, sys, torch; from lm_eval import simple_evaluate; from lm_eval.tasks import TaskManager\n"
        f"model = {{'pretrained': {str(output / 'folder')!r}, 'dtype': 'float32', 'softmax_dtype': torch.float64}}\n"
        f"tasks = TaskManager(include_path={str(output / 'tasks')!r})\n"
        f"found = simple_evaluate('hf', model, {list(TASKS)!r}, batch_size=8, device='cpu', task_manager=tasks)\n"
        "json.dump(found, open(sys.argv[1], 'w'), default=str)\n"
    )
    call([sys.executable, "-c", code, output / "peer.json"])
    return json.loads((output / "peer.json").read_text())


def trainers_own(output: Path, layout: str) -> dict[str, Any]:
    """Return what `trainer eval` finds on a layout such as tp2."""
    axis, size = layout[:2], layout[2:]
    file, tasks = output / f"{layout}.json", ["--tasks", ",".join(TASKS), "--tasks-path", output / "tasks"]
    verb = ["eval", output / "run", *tasks, "--output", file, "--train.device", "cpu"]
    if size == "1":
        run("trainer", *verb)
    else:
        run("trainer", "launch", "--nproc-per-node", size, *verb, f"--{axis}", size)
    return json.loads(file.read_text())


def largest_difference(own: Sequence[Any], peer: Sequence[Any]) -> tuple[float, int]:
    """Return the largest difference of log-likelihoods, and of how many; 1 more where not both are the likeliest."""
    pairs = [pair for items in zip(by_number(own), by_number(peer), strict=True) for pair in zip(*items, strict=True)]
    gaps = [abs(one[0] - other[0]) + (one[1] != other[1]) for one, other in pairs]
    return max(gaps), len(gaps)


def by_number(samples: Sequence[Any]) -> list[list[tuple[float, str]]]:
    """Return the responses of each item in the order of items: a log-likelihood, and whether it is the likeliest."""
    ordered = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    pairs = [
        [response if isinstance(response, list) else [response, ""] for response in sample["filtered_resps"]]
        for sample in ordered
    ]
    return [[(float(logprob), str(is_greedy)) for logprob, is_greedy in responses] for responses in pairs]


def run(kit: str, *arguments: object) -> None:
    """Run a command of a kit."""
    call([sys.executable, "-m", kit, *arguments])


def call(command: Sequence[object]) -> None:
    """Run a command; its output goes to stderr, and its fault ends this."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(list(map(str, command)), check=True, stdout=STDERR, env=environment)


if __name__ == "__main__":
    sys.exit(main())
