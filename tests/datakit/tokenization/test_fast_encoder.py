"""GigatokenEncoder: the reference's ids for every document, whatever the engine would do, and bounded memory."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from datakit.tokenization import fast_encoder
from datakit.tokenization.encoder import PROBE, Encoder, open_encoder
from datakit.tokenization.fast_encoder import GigatokenEncoder
from datakit.tokenization.tokenizer import JsonTokenizer, TextFault, Tokenizer, open_tokenizer

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.just("a<|endoftext|> b"), max_size=20)


@pytest.fixture(scope="module")
def both(tokenizer_path: str) -> tuple[Encoder, Tokenizer]:
    return open_encoder(tokenizer_path, "gigatoken"), open_tokenizer(tokenizer_path)


@given(texts=TEXTS)
def test_fast_ids_are_the_references(both: tuple[Encoder, Tokenizer], texts: list[str]) -> None:
    fast, sure = both
    assert [ids.tolist() for ids in fast.encode_batch(texts)] == [ids.tolist() for ids in sure.encode_batch(texts)]


def test_fast_ids_of_the_probe_are_the_references(both: tuple[Encoder, Tokenizer]) -> None:
    fast, sure = both
    assert [ids.tolist() for ids in fast.encode_batch(PROBE)] == [ids.tolist() for ids in sure.encode_batch(PROBE)]


def test_documents_of_all_sizes_in_one_batch(tokenizer_path: str) -> None:
    sizes = [*range(40), 20_000, 3, 3, 0, 900, 5, 2000, *range(30)]
    texts = [("the store größe " * 2000)[:size] for size in sizes]
    encoder, sure = GigatokenEncoder(Path(tokenizer_path)), open_tokenizer(tokenizer_path)
    for batch in (texts, texts[:40], texts[40:41], [], [""], ["", ""]):
        assert [ids.tolist() for ids in encoder.encode_batch(batch)] == [
            ids.tolist() for ids in sure.encode_batch(batch)
        ]


def test_short_documents_pass_the_engine_in_one_call_after_the_first_of_them(
    tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, calls = GigatokenEncoder(Path(tokenizer_path)), []
    documents = [f"document {number}" for number in range(1000)]
    engine = type(encoder._engine)
    for name in ("encode", "encode_rows"):
        usual = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *words, of=name, usual=usual: calls.append(of) or usual(*words))
    monkeypatch.setattr(fast_encoder, "FIRST_CHARACTERS", 1)
    first, second = encoder.encode_batch(documents), encoder.encode_batch(documents)
    assert calls == ["encode"] * 1000 + ["encode_rows"]
    assert (first.tokens == second.tokens).all()
    assert (first.lengths == second.lengths).all()


def texts_of_the_reference(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that takes every text that the reference encodes from now on."""
    seen, usual = list[str](), JsonTokenizer.encode_batch

    def watched(self: JsonTokenizer, texts: list[str]) -> list[np.ndarray]:
        seen.extend(texts)
        return usual(self, texts)

    patch.setattr(JsonTokenizer, "encode_batch", watched)
    return seen


def test_a_text_with_a_drifting_character_goes_to_the_reference(
    tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = GigatokenEncoder(Path(tokenizer_path))
    seen = texts_of_the_reference(monkeypatch)
    texts = ["plain", "größe 列車 🙂", "new \U000323b0", "\u0378"]
    sure = [Library.from_file(tokenizer_path).encode(text).ids for text in texts]
    assert [ids.tolist() for ids in engine.encode_batch(texts)] == sure
    assert seen == texts[2:]


def test_only_the_drifting_lines_of_a_text_go_to_the_reference_where_lines_stand_apart(
    tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = GigatokenEncoder(Path(tokenizer_path))
    seen = texts_of_the_reference(monkeypatch)
    text = "a line\n\nthe store.\n  new \U000323b0;\nthe store\n \u0378\n\u0378\nsize 列車\nreturn"
    [ids] = engine.encode_batch([text])
    assert ids.tolist() == Library.from_file(tokenizer_path).encode(text).ids
    assert seen == ["\n  new \U000323b0;", "\n \u0378\n\u0378\nsize 列車\nreturn"]

    class Joining:  # gives other ids for lines than for the whole
        takes_batches = False

        def encode(self, text: str) -> np.ndarray:
            return np.array([len(text)], np.uint32)

    monkeypatch.setattr(engine, "_engine", Joining())
    assert np.array_equal(engine.encode_batch([text])[0], ids)
    assert seen[2:] == [text]


class PanicException(BaseException):
    """Named as what the engines written in Rust raise."""


def test_where_the_engine_gives_up_the_reference_steps_in(tokenizer_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        takes_batches = False

        def encode(self, text: str) -> np.ndarray:
            raise PanicException(text)

    monkeypatch.setattr(fast_encoder, "_open_engine", lambda _: Engine())
    sure = open_tokenizer(tokenizer_path).encode_batch(["the store", "größe"])
    engine = GigatokenEncoder(Path(tokenizer_path))
    assert [ids.tolist() for ids in engine.encode_batch(["the store", "größe"])] == [ids.tolist() for ids in sure]
    monkeypatch.setattr(Engine, "encode", lambda *_: sys.exit(3))
    with pytest.raises(SystemExit):
        engine.encode_batch(["the store"])


def test_a_fault_of_the_reference_names_its_text_in_the_batch(tmp_path: Path, tokenizer_path: str) -> None:
    library = Library.from_file(tokenizer_path)
    library.add_tokens([AddedToken("<", lstrip=True, rstrip=True), AddedToken("\n", lstrip=True)])
    library.save(str(tmp_path / "t.json"))
    with pytest.raises(TextFault) as caught:
        GigatokenEncoder(tmp_path / "t.json").encode_batch(["fine", "größe", "\u0378<\n "])
    assert caught.value.number == 2


def test_a_cache_that_grew_is_dropped(tokenizer_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resident = iter([100, 150, 301, 100, 200])
    monkeypatch.setattr(fast_encoder, "resident_bytes", lambda: next(resident))
    engine = GigatokenEncoder(Path(tokenizer_path), max_cache_bytes=200, check_characters=2)
    loaded = [engine._engine]
    for _ in range(3):
        assert engine.encode_batch(["the", "store"])[0].size
        loaded.append(engine._engine)
    assert loaded[0] is loaded[1]
    assert loaded[1] is not loaded[2]
    assert loaded[2] is loaded[3]
    assert next(resident, None) is None


WORDS_WITHOUT_END = """
import sys
from pathlib import Path
import numpy as np
from datakit.tokenization import fast_encoder
engine = fast_encoder.GigatokenEncoder(Path(sys.argv[1]), max_cache_bytes=16 << 20, check_characters=1 << 18)
random = np.random.default_rng(0)
before, peak = fast_encoder.resident_bytes(), 0
for _ in range(80):
    words = random.integers(97, 123, (20000, 9), dtype=np.uint8)
    words[:, 8] = 32
    engine.encode_batch([words.tobytes().decode()])
    peak = max(peak, fast_encoder.resident_bytes())
print(peak - before)
"""


def test_words_without_end_take_bounded_memory(tokenizer_path: str) -> None:
    """In a process of its own: in this one, what other tests left and the allocator keeps counts too."""
    run = [sys.executable, "-P", "-c", WORDS_WITHOUT_END, tokenizer_path]
    grown = int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert grown < 96 << 20  # 14 MB of distinct words, ten times that in a cache that keeps them all
