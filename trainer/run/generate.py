"""Generation in its simple form: one process, one prompt, the whole window computed again for each token."""

from collections.abc import Callable

import torch

from ckptkit import HfFolder
from datakit import Tokenizer, open_tokenizer, store_tokenizer
from threefold.errors import UserError
from trainer.run.environment import ranks_of
from trainer.run.inference import Checkpoint, TrainedModel


def generate_text(checkpoint: Checkpoint, prompt: str, *, num_tokens: int, temperature: float) -> str:
    """Return the prompt and what a checkpoint continues it with, `num_tokens` tokens more.

    A temperature of 0 always takes the likeliest token; else train.seed seeds the sampling.
    """
    if num_tokens < 1 or temperature < 0:
        message = f"--tokens must be at least 1, got {num_tokens}, and --temperature at least 0, got {temperature:g}"
        raise UserError(message, hint="--tokens 64 --temperature 0.8")
    config = checkpoint.config
    tokenizer = prompt_tokenizer(checkpoint)
    tokens: list[int] = tokenizer.encode_batch([prompt])[0].tolist()
    if not tokens:
        raise UserError("the prompt holds no token", hint="--prompt 'Once upon a time'")
    with ranks_of(config) as ranks:
        engine = TrainedModel(checkpoint, ranks).engine

        def logits_of(window: list[int]) -> torch.Tensor:
            return engine.logits(torch.tensor([window], device=ranks.device))[0].double().cpu()

        ids = continue_tokens(
            logits_of, tokens, num_tokens, window=checkpoint.window, temperature=temperature, seed=config.train.seed
        )
    return tokenizer.decode(ids)


def prompt_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer to read a prompt with: the one that is named, else the run's own.

    That is the copy of the first of its stores that keeps one, or the file in a model's folder. UserError if there is
    none, if the run's own is another than the one named, or if it knows tokens that the model does not.
    """
    data, vocab_size = checkpoint.config.data, checkpoint.config.model.vocab_size
    own, reasons = own_tokenizer(checkpoint)
    tokenizer = open_tokenizer(data.tokenizer) if data.tokenizer else own
    name = data.tokenizer or "the tokenizer that the run's stores keep"
    if tokenizer is None:
        raise UserError(
            "no tokenizer to read the prompt with" + "".join(f"; {reason}" for reason in reasons[:2]),
            hint="--data.tokenizer FILE, the one of the run's stores",
        )
    if own is not None and own.fingerprint != tokenizer.fingerprint and not data.any_tokenizer:
        raise UserError(
            f"{name} has fingerprint {tokenizer.fingerprint}, the tokenizer of the run's stores {own.fingerprint}",
            hint="leave --data.tokenizer out, or --data.any-tokenizer true",
        )
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{name} has {tokenizer.vocab_size} tokens, the model {vocab_size}",
            hint="--data.tokenizer FILE, the one of the run's stores",
        )
    return tokenizer


def own_tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, list[str]]:
    """Return the tokenizer that a run's stores keep, or a model's folder, and why others did not have it."""
    reasons = []
    if isinstance(checkpoint.run, HfFolder):
        file = checkpoint.run.storage.local_path("tokenizer.json")
        if file is not None and file.is_file():
            return open_tokenizer(file), []
    for store in dict.fromkeys(checkpoint.stores):
        try:
            if (tokenizer := store_tokenizer(store)) is not None:
                return tokenizer, []
            reasons.append(f"{store} keeps no copy of its own")
        except UserError as why:  # it is gone, or cannot be read
            reasons.append(why.message)
    return None, reasons


def continue_tokens(
    logits_of: Callable[[list[int]], torch.Tensor],
    tokens: list[int],
    num_tokens: int,
    *,
    window: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """Return `tokens` and `num_tokens` more; `logits_of` returns those after at most `window` tokens, [vocabulary]."""
    sampler = torch.Generator().manual_seed(seed)
    ids = list(tokens)
    for _ in range(num_tokens):
        logits = logits_of(ids[-window:])
        if temperature:
            chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=sampler)
        else:
            chosen = logits.argmax(-1)
        ids.append(int(chosen))
    return ids
