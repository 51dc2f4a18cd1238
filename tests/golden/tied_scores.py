"""A model file whose routers have equal scores, for who makes the expected logits and who compares them."""

from pathlib import Path

from safetensors.torch import load_file, save_file


def tie_scores(path: Path) -> None:
    """Let each second expert of a router have the score of the one before it: a token goes to two of equal scores.

    Which of three it goes to is not transformers' to say: it takes torch.topk's, whose order of equal scores is open.
    """
    state = load_file(path)
    for name, values in state.items():
        if name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")):
            values[1::2] = values[::2]
    save_file(state, path, metadata={"format": "pt"})
