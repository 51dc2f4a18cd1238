"""Milliseconds a token of generation, beside transformers with its cache: the same weights, tokens, thread and process.

    python benchmarks/trainer/generate.py [--device cpu] [--precision fp32] [--sizes 768,12,12,4,2048] [--tokens 12]

transformers must be there: `pip install transformers --target FOLDER` and PYTHONPATH=FOLDER keep it apart. It makes the
model, a Llama with random weights, and saves it; the trainer opens that folder. Both read prompts and then take the
likeliest token of each row: another one only where two are all but equally likely. A token is the median of steps of
both in turn; lengths are those before the first of them. "uncached" computes all of one row again, as `Engine.logits`
does.
"""

import argparse
import inspect
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.record import add_option
from threefold.console import print_table
from threefold.options import FlagText
from trainer import Ranks, TrainedModel, open_checkpoint
from trainer.engine import DTYPES
from trainer.run.decoder import Decoder

CONTEXTS, BATCHES, VOCAB_SIZE = (128, 512, 2048), (1, 16), 32768
WANTED = 1.3  # times transformers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--sizes", default="768,12,12,4,2048", help="hidden size, layers, heads, kv heads, width of the MLP"
    )
    parser.add_argument("--tokens", type=int, default=12, help="tokens timed of each row")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--uncached", action="store_true", help="time that too, for one row")
    add_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contexts, batches = (
        [int(number) for number in text.split(",")] for text in (arguments.contexts, arguments.batches)
    )
    with tempfile.TemporaryDirectory() as folder:
        peer, model = models(folder, arguments, max(contexts) + 2 * arguments.tokens)
        rows = [compared(peer, model, context, batch, arguments) for batch in batches for context in contexts]
    columns = (
        "rows",
        "context",
        "ms a token",
        "transformers",
        "ratio",
        "rows of the same tokens",
        *["uncached"] * arguments.uncached,
    )
    print_table(columns, rows)
    return 0


def models(folder: str, arguments: argparse.Namespace, length: int) -> tuple[Any, TrainedModel]:
    """Return the peer's model and ours, of one folder."""
    import transformers

    hidden, layers, heads, kv_heads, ffn = map(int, arguments.sizes.split(","))
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=ffn, max_position_embeddings=length, tie_word_embeddings=False,
        initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = DTYPES[arguments.precision]
    peer = transformers.LlamaForCausalLM(config).to(dtype).eval()
    peer.save_pretrained(folder)
    flags = {"train.precision": arguments.precision, "train.device": arguments.device}
    settings = {name: FlagText(text, f"--{name}") for name, text in flags.items()}
    checkpoint = open_checkpoint(f"hf:{folder}", None, settings, world_size=1)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {arguments.precision}", file=sys.stderr)
    return peer.to(arguments.device), TrainedModel(checkpoint, Ranks(arguments.device, timeout_s=60))


def compared(peer: Any, model: TrainedModel, context: int, batch: int, arguments: argparse.Namespace) -> list[str]:
    """Return a line of the table, and record it."""
    generator = torch.Generator().manual_seed(context + batch)
    prompts = torch.randint(VOCAB_SIZE, (batch, context), generator=generator)
    steps = {
        "trainer": step_here(model, prompts, arguments.tokens),
        "transformers": step_of_peer(peer, prompts.to(arguments.device)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    tokens: dict[str, list[list[int]]] = {name: [] for name in steps}
    for _ in range(arguments.tokens):
        for name, step in steps.items():
            start = time.perf_counter()
            tokens[name].append(step())
            seconds[name].append(time.perf_counter() - start)
    own, other = (1000 * statistics.median(seconds[name]) for name in ("trainer", "transformers"))
    claim = f"a token after {context} of {batch} row{'s' * (batch > 1)}, {arguments.device}, {arguments.precision}"
    arguments.record.add(claim, own, "ms", peer={"transformers with its cache": other})
    line = [str(batch), str(context), f"{own:.1f}", f"{other:.1f}", f"{own / other:.2f}"]
    rows = (zip(*tokens[name], strict=True) for name in ("trainer", "transformers"))
    line.append(f"{sum(row == other for row, other in zip(*rows, strict=True))} of {batch}")
    if arguments.uncached:
        start = time.perf_counter()
        with torch.no_grad():
            model.engine.logits(prompts[:1].to(arguments.device)).argmax(-1).tolist()
        line.append(f"{1000 * (time.perf_counter() - start):.0f}")
    print("  ".join(line), file=sys.stderr, flush=True)
    return line


def step_here(model: TrainedModel, prompts: torch.Tensor, num_tokens: int) -> Callable[[], list[int]]:
    """Read prompts; return what returns the next token of each row."""
    decoder = Decoder(model.engine)
    tokens = decoder.begin(prompts.tolist(), likeliest, most_tokens=prompts.shape[1] + num_tokens)

    def step() -> list[int]:
        nonlocal tokens
        tokens = decoder.next(tokens, likeliest)
        return tokens

    return step


def step_of_peer(peer: Any, prompts: torch.Tensor) -> Callable[[], list[int]]:
    """Do the same with the peer, as its `generate` does."""
    kept = "cache" if "cache" in inspect.signature(peer.forward).parameters else "past_key_values"  # its older name
    with torch.inference_mode():
        out = peer(input_ids=prompts, use_cache=True, logits_to_keep=1)
    tokens, cache = out.logits[:, -1].argmax(-1), out.past_key_values

    def step() -> list[int]:
        nonlocal tokens, cache
        with torch.inference_mode():
            out = peer(input_ids=tokens[:, None], **{kept: cache}, use_cache=True)
        tokens, cache = out.logits[:, -1].argmax(-1), out.past_key_values
        return tokens.tolist()

    return step


def likeliest(logits_BV: torch.Tensor) -> torch.Tensor:
    return logits_BV.argmax(-1)


if __name__ == "__main__":
    sys.exit(main())
