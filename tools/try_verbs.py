"""Run every verb of the three command lines in this interpreter; print, a JSON line each, how it ended.

    python tools/try_verbs.py --hide torch obstore        # as if these packages were not installed

A verb works or ends in one `error:` line with a hint; anything else is named and ends this program with 1.
"""

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path

COMMANDS = """
datakit train-tokenizer corpus --vocab-size 300 --output tok.json
datakit preprocess corpus --output store --tokenizer tok.json --append-eod --workers 1 --split 0.9,0.1
datakit preprocess corpus --output fast --tokenizer tok.json --workers 1 --tokenizer-backend gigatoken
datakit preprocess corpus --output ray --tokenizer tok.json --engine ray --ray-address 127.0.0.1:1
datakit preprocess corpus --output ranks --tokenizer ranks.tiktoken --workers 1
datakit preprocess table.parquet --output table --tokenizer tok.json --workers 1
datakit preprocess s3://bucket/corpus --output remote --tokenizer tok.json --workers 1
datakit preprocess 's3://bucket/*.jsonl' --output remote --tokenizer tok.json --workers 1
datakit preprocess memory://corpus --output remote --tokenizer tok.json --workers 1
datakit inspect store/train --sample 0 --seq-length 16
datakit inspect store/train --document 1 --tokenizer tok.json
datakit verify store/train
datakit verify s3://bucket/store
datakit stats store/train
datakit stats store/train --report stats.html
datakit merge store/train store/valid --output merged
datakit pack store/train --seq-length 16
datakit verify store/train/packing-best_fit-16
datakit convert store/train --to megatron --output datasets
datakit diff store/train store/valid
datakit archive store/train --output archive
datakit archive store/train --output s3://bucket/archive
datakit unarchive archive --output unarchived
datakit blend run.toml
datakit blend run.toml --plot blend.png
datakit blame run.toml --step 1 --tokenizer tok.json
datakit where run.toml --document store/train:1
datakit help preprocess
datakit completion bash
ckptkit ls run
ckptkit ls s3://bucket/run
ckptkit ls gs://bucket/run
ckptkit ls az://container/run
ckptkit ls memory://run
ckptkit inspect run
ckptkit verify run
ckptkit hash run
ckptkit copy run copied
ckptkit copy run s3://bucket/run
ckptkit reshard run resharded --tp 2
ckptkit diff run resharded
ckptkit export run exported --to hf
ckptkit import exported imported --from hf
ckptkit inspect run --stats --html stats.html
ckptkit rollback run/step-000000001 --dry-run
ckptkit rm run/step-000000001 --dry-run
ckptkit best run
ckptkit pin run/step-000000002
ckptkit unpin run/step-000000002
ckptkit prune run --keep-last 1
ckptkit prune s3://bucket/run --keep-last 1
ckptkit crash-test s3://bucket/run
ckptkit help
ckptkit completion zsh
trainer train run.toml
trainer train run.toml --save s3://bucket/run
trainer launch --nproc-per-node 1 schedule
trainer eval trained
trainer eval trained --tasks none
trainer watch trained
trainer verify run.toml --seconds 1e-6 --allow-partial
trainer verify run.toml --html card.html
trainer plan run.toml --gpus 2
trainer bench gpu --device cpu --seconds 0.1 --output card.json
trainer plan run.toml --gpus 1 --fixed --calibration card.json
trainer explain run.toml --layout dp2
trainer explain run.toml --html explained.html
trainer generate trained --prompt x
trainer schedule
trainer bench comm
trainer help train
trainer completion bash
"""
NO_SERVER = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_MAX_ATTEMPTS": "1", "GOOGLE_BASE_URL": "http://127.0.0.1:1", "GOOGLE_BEARER_TOKEN": "a",
    "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1", "AZURE_STORAGE_ACCOUNT_NAME": "a",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hide", nargs="*", default=[], metavar="PACKAGE", help="packages that cannot be imported")
    arguments = parser.parse_args()
    sys.modules.update(dict.fromkeys(arguments.hide))
    os.environ |= NO_SERVER
    faults = 0
    with tempfile.TemporaryDirectory(prefix="try-verbs-") as folder:
        os.chdir(folder)
        make_input()
        for command in COMMANDS.strip().splitlines():
            code, said = try_verb(command)
            errors = sum(line.startswith("error: ") for line in said.splitlines())
            is_sound = "Traceback" not in said and (code in (0, 1) or (code in (2, 3) and errors == 1))
            faults += not is_sound
            print(json.dumps({"command": command, "code": code, "sound": is_sound, "said": said[-2000:]}), flush=True)
    return 1 if faults else 0


def make_input() -> None:
    """Two corpora, a rank file, a run of two steps and a configuration, in the current folder."""
    import base64

    import numpy as np

    import ckptkit

    Path("corpus").mkdir()
    texts = [f"document {number}: a few words about tokens" for number in range(200)]
    Path("corpus/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("table.parquet").write_bytes(b"PAR1")
    Path("ranks.tiktoken").write_text(
        "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    )
    Path("ranks.tiktoken.json").write_text(json.dumps({"pattern": r"\S+|\s+", "special_tokens": {}}))
    weight = np.zeros((4, 4), np.float32)
    info = ckptkit.TensorInfo("w", "F32", (4, 4), ckptkit.Placement("first", (ckptkit.Cut(0),)))
    for step in (1, 2):
        ckptkit.save(
            "run", step, [ckptkit.Piece.whole("w", ckptkit.Box((0, 0), (4, 4)), weight)], tensors=[info],
            layout=ckptkit.ParallelLayout(), num_layers=1, metadata={"val_loss": 1.0},
        )  # fmt: skip
    Path("run.toml").write_text(
        "[model]\nnum_layers = 1\nhidden_size = 32\nnum_heads = 2\n[data]\nstores = ['store/train']\n"
        "tokenizer = 'tok.json'\n[data.valid]\nstores = ['store/valid']\n[train]\ntrain_steps = 2\nseq_length = 16\n"
        "device = 'cpu'\n[checkpoint]\nsave = 'trained'\nsave_interval = 2\n"
    )


def try_verb(command: str) -> tuple[int, str]:
    """Return the exit code of a command and what it wrote to stderr; 99 with the traceback where it raised."""
    kit, *argv = shlex.split(command)
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            return import_module(f"{kit}.cli").main(argv), said.getvalue()
        except SystemExit as stop:
            return int(stop.code or 0), said.getvalue()
        except BaseException:
            return 99, traceback.format_exc()


if __name__ == "__main__":
    sys.exit(main())
