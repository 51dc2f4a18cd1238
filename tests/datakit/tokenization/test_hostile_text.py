"""Hostile and non-English text: through the real preprocess, a store has the ids of the library's own `encode`."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from datakit.store.token_store import TokenStore
from datakit.tokenization.encoder import choose_backend, open_encoder
from datakit.tokenization.fast_encoder import GigatokenEncoder, _table, has_drift
from datakit.tokenization.rank_file import (
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    O200K_PATTERN,
    QWEN_PATTERN,
    TEKKEN_PATTERN,
)
from datakit.tokenization.tokenizer import DEFAULT_EOD, open_tokenizer
from tests.datakit.conftest import Cli, ranks_of, write_jsonl

Encode = Callable[[str], list[int]]
BACKENDS = ["gigatoken", "tokenizers", "tiktoken", "gigatoken over ranks", "sentencepiece"]
FORMATS = ["jsonl", "txt", "parquet"]
MIB = 1 << 20

SCRIPTS = {
    "latin": "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich, Ærøskøbing, ﬁn",
    "greek": "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία, ΌΣΟΣ ὅσος",
    "cyrillic": "Съешь ещё этих мягких французских булок, да выпей чаю; Ҷӣ Ѣ",
    "arabic": "نصٌّ حكيمٌ له سرٌّ قاطعٌ وذو شأنٍ عظيمٍ ٠١٢٣٤٥٦٧٨٩ ﷺ",
    "hebrew": "דג סקרן שט בים מאוכזב ולפתע מצא חברה, שָׁלוֹם",
    "devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का ०१२३ क्ष",
    "tamil": "யாமறிந்த மொழிகளிலே தமிழ்மொழி போல் ௧௨௩",
    "thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์ ๑๒๓ น้ำ",
    "georgian": "ვეპხის ტყაოსანი შოთა რუსთაველი ᲕᲔᲞᲮᲘᲡ",
    "armenian": "Բել դղյակի ձախ ժամն օֆ ազգությանը ցպահանջ և",
    "amharic": "ሰማይ አይታረስ ንጉሥ አይከሰስ። ፩፪፫",
    "chinese": "視野無限廣，窗外有藍天。微风迎客，软语伴茶。𠀀𪚥",
    "japanese": "いろはにほへと ちりぬるを ｶﾀｶﾅ カタカナ が か\u3099",
    "korean": "키스의 고유조건은 입술끼리 만나야 하고 \u1112\u1161\u11ab",
    "emoji": "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇯🇵 ❤️ 1️⃣ 🏴\U000e0067\U000e0062\U000e007f",
    "marks": "e\u0301\u0323 \u0323\u0301 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘",
    "direction": "\u202eabc\u202c \u2066א\u2069 \u061c1\u200f2\u200e ",
    "other": "ߒߞߏ ᏣᎳᎩ ꮳꮃꭹ ខ្មែរ བོད་ཡིག မြန်မာ සිංහල ລາວ ᠮᠣᠩᠭᠣᠯ 𐍈𐌰𐌿 𓀀𓂋 𒀀 𝔘𝔫𝔦 ⴰⵎⴰⵣⵉⵖ",
    "white space": "\t\x0b\x0c\x1c\x85\u00a0\u1680\u180e\u2000\u2028\u2029\u202f\u205f\u3000\ufeff\u200b \r\r\n\n ",
    "control": "".join(map(chr, range(32))) + "\x7f\x80\x9f\x00\x00",
    "newer than some tables": "\u088f a\u0c5cb \u1acf \U00016ea0x \U000323b0 e\u1ac3\u0301 \U0001e136\u0323",
    "private and unassigned": "\ue000 \U000f0000 \U0010ffff \uffff \ufdd0 \u0378 \U00050000",
    "digits": "1234567 ١٢٣٤٥٦٧ १२३४५६७ 𝟙𝟚𝟛𝟜 ²³¹ ⅷ ½ 零一二",
    "contractions": "I'm I'M i'LL 'ſ ’s don''t 'reS 'tt O'Neil's ''ve'",
}  # fmt: skip
# of one letter; tiktoken gives up on 999,023 spaces and more, which is tested elsewhere
REPEATED = {
    "x": MIB,
    "Q7": MIB // 2,
    "9": MIB,
    " ": 900_000,
    "\n": 900_000,
    "漢": MIB // 3,
    "🙂": MIB // 4,
    "\u0301": MIB // 2,
}


@pytest.fixture(scope="module")
def hostile() -> list[str]:
    """Some hundred texts: all scripts, random Unicode, and the end-of-document token in odd places."""
    random = np.random.default_rng(7)
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    anywhere = ["".join(map(chr, random.choice(codes, size))) for size in (1, 3, 10, 100, 1000)]
    letters = "".join(SCRIPTS.values())
    mixed = ["".join(random.choice(list(letters), 200)) for _ in range(40)]
    end, half = DEFAULT_EOD, DEFAULT_EOD[:7]
    tokens = [
        end,
        end * 3,
        f"a{end}b",
        f" {end} ",
        f"{half}{end}{half}",
        end.upper(),
        f"\n{end}\r\n",
        f"é{end}\u0301",
        half,
    ]
    return [*SCRIPTS.values(), *anywhere, *mixed, *tokens, letters, "", " ", "\ufeffbegins with a mark"]


@pytest.fixture
def tokenizer_of(
    tmp_path: Path, tokenizer_path: str, rank_path: Path, model_path: Path
) -> Callable[[str], tuple[Path, list[str], Encode]]:
    """Of a backend: the tokenizer's file, the flags that ask for the backend, and the reference library's `encode`."""

    def find(backend: str) -> tuple[Path, list[str], Encode]:
        asked = ["--tokenizer-backend", backend.split()[0]]
        if backend == "sentencepiece":
            return model_path, asked, sentencepiece.SentencePieceProcessor(model_file=str(model_path)).encode
        if "rank" in backend or backend == "tiktoken":
            library = tiktoken.Encoding(
                "ranks",
                pat_str=GPT2_PATTERN,
                mergeable_ranks=ranks_of(tokenizer_path),
                special_tokens={DEFAULT_EOD: 399},
            )
            return rank_path, asked, lambda text: library.encode(text, allowed_special="all")
        library = Library.from_file(tokenizer_path)
        return Path(tokenizer_path), asked, lambda text: library.encode(text).ids

    return find


def write_texts(folder: Path, kind: str, texts: list[str]) -> Path:
    folder.mkdir()
    if kind == "jsonl":
        return write_jsonl(folder / "a.jsonl", texts)
    if kind == "txt":
        for number, text in enumerate(texts):
            (folder / f"{number:06}.txt").write_bytes(text.encode())
        return folder
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet")
    return folder


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        pytest.param(backend, kind, marks=[pytest.mark.slow] if kind != "jsonl" and backend != BACKENDS[0] else [])
        for backend in BACKENDS
        for kind in FORMATS
    ],
)
def test_the_ids_in_the_store_are_the_librarys(
    tmp_path: Path, hostile: list[str], tokenizer_of: Callable, backend: str, kind: str, cli: Cli
) -> None:
    tokenizer, flags, encode = tokenizer_of(backend)
    source = write_texts(tmp_path / "in", kind, hostile)
    assert cli("preprocess", source, "--output", tmp_path / "s", "--tokenizer", tokenizer, "--workers", 1, *flags) == 0
    store = TokenStore.open(tmp_path / "s")
    assert store.num_documents == len(hostile)
    for number, text in enumerate(hostile):
        text = text.removeprefix("\ufeff") if kind == "txt" else text  # the mark of a file, not its text
        assert store.document(number).tolist() == encode(text), repr(text[:60])


@pytest.mark.parametrize(
    "backends",
    [
        pytest.param(["gigatoken", "tokenizers"], marks=pytest.mark.slow),
        pytest.param(["gigatoken over ranks", "tiktoken"], marks=pytest.mark.slow),
        pytest.param(["sentencepiece"], marks=pytest.mark.slow),
    ],
)
def test_a_mebibyte_of_one_letter(tmp_path: Path, tokenizer_of: Callable, backends: list[str], cli: Cli) -> None:
    source = write_texts(tmp_path / "in", "jsonl", [letter * count for letter, count in REPEATED.items()])
    stores = []
    for backend in backends:
        tokenizer, flags, encode = tokenizer_of(backend)
        flags += ["--tokenizer", tokenizer, "--workers", 1]
        assert cli("preprocess", source, "--output", tmp_path / backend, *flags) == 0
        stores.append(TokenStore.open(tmp_path / backend))
    for number, (letter, count) in enumerate(REPEATED.items()):
        sure = encode(letter * count)
        assert all(np.array_equal(store.document(number), sure) for store in stores), repr(letter)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": "\xed\xa0\x80"}\n', "line 2: invalid UTF-8: .* 0xed at byte 27"),
        pytest.param(
            "a.jsonl",
            b'{"text": "fine"}\n{"text": "a\x00b"}\n',
            "a.jsonl, line 2: invalid JSON: .*control character",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "a.jsonl",
            b'{"text": "fine"}\n{"text": "a\xc3"}\n',
            "line 2: invalid UTF-8: .* 0xc3 at byte 28",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "a.jsonl",
            b'{"text": "fine"}\n' + b"[" * 9999 + b"\n",
            "a.jsonl, line 2: invalid JSON",
            marks=pytest.mark.slow,
        ),
        ("a.txt", b"fine\n\xf0\x9f\x99\n", "a.txt, line 2: invalid UTF-8: .* 0xf0 at byte 5"),
        pytest.param(
            "a.txt",
            b"fine\n\xc0\x80\n",
            "a.txt, line 2: invalid UTF-8: .* 0xc0 at byte 5",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_no_text_is_named_or_skipped(
    tmp_path: Path, name: str, content: bytes, fault: str, tokenizer_path: str, cli: Cli,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / name).write_bytes(content)
    flags = ["--tokenizer", tokenizer_path, "--txt-split", "line", "--output", tmp_path / "s", "--workers", 1]
    assert cli("preprocess", tmp_path / name, *flags) == 2
    assert re.search(fault, capsys.readouterr().err)
    assert cli("preprocess", tmp_path / name, *flags, "--skip-invalid", "--output", tmp_path / "t") == 0
    store = TokenStore.open(tmp_path / "t")
    assert (store.num_documents, store.manifest.skipped) == (1, {"invalid": 1})


def test_random_bytes_are_counted_line_by_line(tmp_path: Path, tokenizer_path: str, cli: Cli) -> None:
    content = np.random.default_rng(3).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
    (tmp_path / "a.txt").write_bytes(content)
    lines = content.removesuffix(b"\n").split(b"\n")
    valid = []
    for line in lines:
        try:
            valid.append(line.rstrip(b"\r").decode())
        except UnicodeDecodeError:
            continue
    assert 0 < len(valid) < len(lines)
    flags = ["--tokenizer", tokenizer_path, "--txt-split", "line", "--skip-invalid"]
    assert cli("preprocess", tmp_path / "a.txt", "--output", tmp_path / "s", *flags) == 0
    store, library = TokenStore.open(tmp_path / "s"), Library.from_file(tokenizer_path)
    assert store.manifest.skipped == {"invalid": len(lines) - len(valid)}
    assert [store.document(i).tolist() for i in range(store.num_documents)] == [library.encode(t).ids for t in valid]


def boundary_tokenizer(
    pattern: str | None, normalizer: normalizers.Normalizer | None = None, added: tuple[AddedToken, ...] = ()
) -> Library:
    """A byte-level BPE with a merge for all pairs of bytes that meet where a common letter meets any character, or two
    characters meet, so that each place where text is split shows in the ids."""
    names = pre_tokenizers.ByteLevel.alphabet()
    names = sorted(names, key=ord)
    printed = [byte for byte in range(256) if chr(byte).isprintable() and byte != 0x20]
    letter = {byte: chr(byte) for byte in printed}
    letter |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in printed)}
    assert sorted(letter.values()) == sorted(names)
    common = b"a1 !\n's\tA\r/_"
    pairs = [(x, y) for x in common for y in range(256)] + [(x, y) for x in range(256) for y in common]
    pairs += [(x, y) for x in range(0x80, 0xC0) for y in range(0xC2, 0xF5)]
    merges = list(dict.fromkeys((letter[x], letter[y]) for x, y in pairs))
    tokens = [*names, *map("".join, merges)]
    library = Library(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    if pattern is None:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if normalizer is not None:
        library.normalizer = normalizer
    library.add_tokens([AddedToken(DEFAULT_EOD, special=True), *added])
    return library


CASES = {
    "gpt2": (None, None),
    "llama3": (LLAMA3_PATTERN, None),
    "qwen": (QWEN_PATTERN, None),
    "o200k": (O200K_PATTERN, None),
    "tekken": (TEKKEN_PATTERN, None),
    "gpt2 with NFC": (None, normalizers.NFC()),
    "qwen with NFC": (QWEN_PATTERN, normalizers.NFC()),
}
QUICK_CASE = "llama3"
HOSTILE_PIECES = st.sampled_from([*"".join(SCRIPTS.values()), "'s", "'LL", "\r\n", "  ", DEFAULT_EOD, "don't", "12345"])
HOSTILE_TEXTS = st.lists(HOSTILE_PIECES | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join)


@pytest.fixture(
    scope="module",
    params=[each if each == QUICK_CASE else pytest.param(each, marks=pytest.mark.slow) for each in CASES],
)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[GigatokenEncoder, Library]:
    path, library = tmp_path_factory.mktemp("t") / "t.json", boundary_tokenizer(*CASES[request.param])
    library.save(str(path))
    assert choose_backend("auto", str(path), open_tokenizer(path), []).backend == "gigatoken"
    return GigatokenEncoder(path), library


@given(text=HOSTILE_TEXTS)
def test_where_the_probe_passes_all_texts_have_the_references_ids(
    engines: tuple[GigatokenEncoder, Library], text: str
) -> None:
    fast, library = engines
    [ids] = fast.encode_batch([text])
    assert ids.tolist() == library.encode(text).ids


def contexts(letter: str) -> str:
    """A character beside all that decides where it is split off, and between marks that it may change places with."""
    return "ZZ".join(
        [f"a{letter}a", f"1{letter}1", f" {letter} ", f"!{letter}!", letter * 2, f"\n{letter}\n",
         f"'{letter}'s{letter}", f"A{letter}A a{letter} {letter}a", f"a\u0301{letter}\u05b0a",
         f"\u05b0{letter}a\u0345{letter}\u0301"]
    )  # fmt: skip


def test_drifting_characters_are_those_on_which_engines_differ(engines: tuple[GigatokenEncoder, Library]) -> None:
    fast, library = engines
    drifting = [code for code in np.flatnonzero(_table()).tolist() if code < 0x20000 and not 0xD800 <= code < 0xE000]
    texts = [contexts(chr(code)) for code in drifting[::11]]
    assert all(map(has_drift, texts))
    assert any(not np.array_equal(fast._engine.encode(text), library.encode(text).ids) for text in texts)
    assert all(np.array_equal(ids, library.encode(text).ids) for ids, text in zip(fast.encode_batch(texts), texts))


LINES = st.sampled_from(
    [
        "",
        " ",
        "a",
        "B'",
        "1,",
        "don't",
        "x = /",
        "/path",
        "the end.",
        "\t tab",
        "<|endoftext|>",
        "e",
        "\u0301 mark",
        "ÀÉ ",
    ]
)
NEW = "\u0378\u0897\u1acf\ua7cf\U00010d70\U00016ec0\U000323b0\U0001e4ec"
DRIFTING = st.sampled_from(NEW).map("x{0}\u0301y {0}".format)
TEXTS = st.lists(LINES | DRIFTING | st.tuples(LINES, DRIFTING).map("".join), max_size=30)


@given(TEXTS, st.sampled_from(["\n", "\r\n"]))
def test_texts_with_drifting_lines_get_the_references_ids(
    engines: tuple[GigatokenEncoder, Library], lines: list[str], end: str
) -> None:
    fast, library = engines
    [ids] = fast.encode_batch([end.join(lines)])
    assert ids.tolist() == library.encode(end.join(lines)).ids


# Where categories and normal forms vary: two planes, compatibility ideographs, tags and selectors. The rest are
# ideographs, private and unassigned code points, each like its neighbours: all for one kind of tokenizer, else some.
VARIED = [range(0x20000), range(0x2F800, 0x2FA20), range(0xE0000, 0xE01F0)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_character_of_unicode(engines: tuple[GigatokenEncoder, Library], request: pytest.FixtureRequest) -> None:
    fast, library = engines
    step = 1 if request.node.callspec.params["engines"] == "gpt2" else 61
    codes = [code for code in range(0x110000) if code % step == 0 or any(code in part for part in VARIED)]
    codes = [code for code in codes if not 0xD800 <= code < 0xE000]
    for start in range(0, len(codes), 256):
        texts = [contexts(chr(code)) for code in codes[start : start + 256]]
        for code, ids, sure in zip(codes[start:], fast.encode_batch(texts), library.encode_batch_fast(texts)):
            assert np.array_equal(ids, sure.ids), f"U+{code:04X}"


FLAGS = ["lstrip", "rstrip", "single_word", "normalized", "special"]


@pytest.mark.parametrize("content", ["<s>", "don't", " ", "Ａe\u0301", "<|end"])
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.ci
@pytest.mark.slow
def test_added_tokens_of_any_flags_get_the_references_ids(tmp_path: Path, content: str, flag: str) -> None:
    for normalizer in (None, normalizers.NFC()):
        path = tmp_path / "t.json"
        overlapping = AddedToken(f"{content[-1]}>", normalized=False)
        boundary_tokenizer(None, normalizer, (AddedToken(content, **{flag: True}), overlapping)).save(str(path))
        reference = open_tokenizer(path)
        choice = choose_backend("auto", str(path), reference, [])
        if choice.backend != "gigatoken":
            continue
        places = [
            "",
            " ",
            "  ",
            "a",
            "1",
            "\n",
            "\r\n",
            "é",
            "\u0301",
            ".",
            "'",
            ">",
            content,
            content[:1],
            DEFAULT_EOD,
        ]
        texts = [f"{before}{content}{after}" for before in places for after in places]
        encoder = open_encoder(path, choice.backend, choice.terms)
        for text, fast, sure in zip(texts, encoder.encode_batch(texts), reference.encode_batch(texts)):
            assert np.array_equal(fast, sure), f"{normalizer} {text!r}"


# What one document of N bytes makes of a worker's memory, besides 400 MB: measured 9 to 22 N with gigatoken, 8 to 41 N
# with tiktoken, 26 to 47 N with sentencepiece, 123 to 187 N with tokenizers, most for long words.
MEMORY_BOUNDS = {"gigatoken": (100, 30), "gigatoken over ranks": (100, 30), "tiktoken": (100, 50),
                 "sentencepiece": (100, 60), "tokenizers": (20, 220)}  # fmt: skip
MEASURED = """
import resource, sys
from datakit.cli import main
code = main(sys.argv[1:])
print("peak_kib", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_document_of_100_mb_takes_bounded_memory(tmp_path: Path, tokenizer_of: Callable, backend: str) -> None:
    tokenizer, flags, encode = tokenizer_of(backend)
    size_mb, bound = MEMORY_BOUNDS[backend]
    letters = np.random.default_rng(5).choice(np.frombuffer(b"etaoin shrdlu cmfwyp ", np.uint8), 1_000_000 - 2)
    block = f" x{letters.tobytes().decode()}"  # begins where text is split, so that its ids repeat
    source = write_texts(tmp_path / "in", "jsonl", [block * size_mb])
    argv = ["preprocess", source, "--output", tmp_path / "s", "--tokenizer", tokenizer, "--workers", "1", *flags]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, argv)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    peak_bytes = int(re.findall(r"peak_kib (\d+)", done.stdout)[0]) * 1024
    assert peak_bytes < 400e6 + bound * size_mb * 1e6
    once, twice = encode(block), encode(block * 2)
    period = len(twice) - len(once)
    tokens = TokenStore.open(tmp_path / "s").document(0)
    assert len(tokens) == len(once) + period * (size_mb - 1)
    assert np.array_equal(tokens[: len(twice)], twice)
    assert np.array_equal(tokens[period:], tokens[:-period])
