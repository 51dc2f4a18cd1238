"""HarnessModel: a checkpoint as the model of lm-eval, EleutherAI's evaluation harness. Imported with lm-eval alone.

It runs on the thread of the harness, turns texts into tokens as the harness's own model of transformers does, and
orders the main threads of all ranks to score or to continue them. Source: EleutherAI/lm-evaluation-harness 0.4.13,
`lm_eval/models/huggingface.py`, whose windows, prefix and truncation these are.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from datakit import Tokenizer
from threefold.errors import UserError

ORDER_TOKENS = 1 << 17  # of one order, at most, unless one row has more
SCORE, CONTINUE = "score", "continue"
Pair = tuple[Any, list[int], list[int]]


class HarnessModel(TemplateLM):  # type: ignore[misc]  # whose types are not read
    """The model that lm-eval asks; `ask` hands an order over and returns its answer."""

    def __init__(self, tokenizer: Tokenizer, prefix: int, window: int, ask: Callable[[str, Any], Any]) -> None:
        super().__init__()
        self._tokenizer, self._prefix, self._window, self._ask = tokenizer, prefix, window, ask
        self._frame = tokenizer.frame()

    @property
    def eot_token_id(self) -> int:
        """The token that a text without anything before it comes after."""
        return self._prefix

    @property
    def max_length(self) -> int:
        """The most tokens that the model reads."""
        return self._window

    @property
    def tokenizer_name(self) -> str:
        """What the tokenizer is, for caches of requests."""
        return self._tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_kwargs: Any) -> list[int]:
        """Return the tokens of a text, with what the tokenizer puts before it unless that is there or not wanted."""
        before, after = map(list, self._frame)
        ids = self._tokenizer.encode_batch([string])[0].tolist()
        ids = ids[: len(ids) - len(after)]
        own = ids[len(before) :]
        has_prefix = own[:1] == [self._prefix]
        return own if add_special_tokens is False or (add_special_tokens is None and has_prefix) else ids

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of as many tokens as the model reads."""
        pairs, owners = list[Pair](), list[int]()
        for number, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self._prefix, self._window, 1)
            for context, continuation in map(make_disjoint_window, windows):
                pairs.append((None, context, continuation))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            sums[owner] += logprob
        return sums

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_kwargs: Any) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the likeliest; contexts are cut at left."""
        rows = []
        for _, context, continuation in requests:
            if len(continuation) > self._window:
                raise UserError(
                    f"a task has a continuation of {len(continuation)} tokens, and the model reads {self._window}",
                    hint=f"--train.seq-length {len(continuation) + 1} reads further, with rotary positions",
                )
            tokens = [*(context or [self._prefix]), *continuation]
            rows.append((tokens[-(self._window + 1) :], len(continuation)))
        answers = [answer for part in parts_of(rows) for answer in self._ask(SCORE, part)]
        return [(logprob, is_greedy) for logprob, is_greedy in answers]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each text, up to a text that ends it."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        for key, numbers in groups.items():
            how = normalize_gen_kwargs(json.loads(key), 256)
            most = int(how["max_gen_toks"])
            if most >= self._window:
                raise UserError(
                    f"a task asks for {most} tokens behind a text, and the model reads {self._window} in all",
                    hint=f"--train.seq-length {4 * most} reads further, with rotary positions",
                )
            ends = [text for text in handle_stop_sequences(how.get("until"), None) if text]
            sampling = {name: how[name] for name in ("temperature", "top_k", "top_p") if how.get(name) is not None}
            prompts = [self._prompt(requests[number].args[0], self._window - most) for number in numbers]
            order = {"prompts": prompts, "num_tokens": most, "texts": ends, "sampling": sampling}
            texts |= zip(numbers, self._ask(CONTINUE, order), strict=True)
        return [texts[number] for number in range(len(requests))]

    def _prompt(self, text: str, most: int) -> list[int]:
        return self.tok_encode(text)[-most:] or [self._prefix]


def parts_of(rows: Sequence[tuple[list[int], int]]) -> list[list[tuple[list[int], int]]]:
    """Return rows in parts of so many tokens that an order has."""
    parts, size = list[list[tuple[list[int], int]]](), ORDER_TOKENS
    for row in rows:
        if size + len(row[0]) > ORDER_TOKENS:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += len(row[0])
    return parts
