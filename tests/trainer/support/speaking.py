"""What the guide on generation takes as given: a trained run, and a model of Hugging Face that chats."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.ckptkit.support.hf_folders import write_folder
from tests.support.checks import require
from tests.trainer.support.training import ROOT

SPEAKING = (  # sections of the guide, and of that on evaluations
    "Continue a text",
    "End it",
    "Continue many prompts",
    "Answer lines",
    "Chat with a model",
    "Use several processes",
    "Generate in Python",
    "Measure the loss of a step",
    "See where the loss is",
    "Answer the tasks of lm-eval",
)
CONFIG = """
model = {num_layers = 2, hidden_size = 32}
data.stores = ["store"]
train = {train_steps = 6, seq_length = 32, device = "cpu"}
"""
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def write_speaking(folder: Path) -> None:
    """Train a run on the store in a folder, beside a model with the same tokenizer and a template."""
    (folder / "run.toml").write_text(CONFIG)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer", "train", "run.toml", "--save", "run"]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    require(run.returncode == 0, run.stderr)
    write_folder(folder / "model", "qwen3", vocab_size=500)
    shutil.copy(folder / "tok.json", folder / "model" / "tokenizer.json")
    config = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "prompts.txt").write_text("The store\ndocument 7:\n")
