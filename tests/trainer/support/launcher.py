"""What somebody has who comes from Megatron-LM: a script that starts a run, and its dataset."""

from pathlib import Path

from tests.datakit.foreign.test_megatron import write_dataset

SCRIPT = """LAYERS=2
MODEL_ARGS=(--num-layers $LAYERS --hidden-size 32 --num-attention-heads 2 --seq-length 32
  --max-position-embeddings 32 --swiglu --normalization RMSNorm)
torchrun --nproc_per_node 1 pretrain_gpt.py ${MODEL_ARGS[@]} --micro-batch-size 1 --global-batch-size 4 \\
  --train-iters 4 --lr 1e-3 --data-path data_text_document --split 100,0,0 --fp16-lm-cross-entropy --log-interval 1
"""


def write_launcher(folder: Path) -> None:
    """Write the script and its dataset, of tokens below 500."""
    (folder / "train.sh").write_text(SCRIPT)
    documents = [[1 + (number * place) % 499 for place in range(number % 60)] + [0] for number in range(200)]
    write_dataset(folder / "data_text_document", documents)
