"""Tokenizers as the published model families have them, trained here on a small corpus: no file of theirs is needed.

The structure of each tokenizer.json (normalizer, pre-tokenizer, byte fallback, added tokens, post-processor) is that of
the family; the vocabulary is small and our own. What sentencepiece trained is converted as `transformers` does it:
merges are all pairs of pieces that make a piece, by the piece's score.
"""

import io
from collections.abc import Callable, Sequence

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPACE = "▁"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
Family = Callable[[Sequence[str], int], Tokenizer]


def train_pieces(texts: Sequence[str], vocab_size: int, **options: object) -> sentencepiece.SentencePieceProcessor:
    """Return a sentencepiece BPE with byte fallback, of the options that Llama 2 was trained with."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="bpe", vocab_size=vocab_size, byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, max_sentence_length=1 << 16, minloglevel=2, **options,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def merges_of(vocab: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, best score first, then by the ids of the pair."""
    found = []
    for piece, score in scores.items():
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
        found += [(score, pair) for pair in sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    return [pair for _, pair in sorted(found, key=lambda entry: entry[0], reverse=True)]


def byte_fallback_bpe(texts: Sequence[str], vocab_size: int, **options: object) -> models.BPE:
    """Return the model of a tokenizer.json that was converted from sentencepiece."""
    pieces = train_pieces(texts, vocab_size, **options)
    names = [pieces.id_to_piece(number) for number in range(pieces.vocab_size())]
    vocab = {name: number for number, name in enumerate(names)}
    usual = [n for n in range(len(names)) if not (pieces.is_control(n) or pieces.is_unknown(n) or pieces.is_byte(n))]
    merges = merges_of(vocab, {names[number]: pieces.get_score(number) for number in usual})
    return models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def begin_with(token: str, library: Tokenizer) -> processors.TemplateProcessing:
    """Return the post-processor that puts a token before each text."""
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, library.token_to_id(token))]
    )


def specials(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def llama2(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    library = Tokenizer(byte_fallback_bpe(texts, vocab_size))
    library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_tokens(specials("<unk>", "<s>", "</s>"))
    library.post_processor = begin_with("<s>", library)
    return library


def mistral(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Mistral v3: a Metaspace that prepends to the first part only, and control tokens in the vocabulary."""
    control = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[control_8]"]
    library = Tokenizer(byte_fallback_bpe(texts, vocab_size, control_symbols=control))
    library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_tokens(specials("<unk>", "<s>", "</s>", *control))
    library.post_processor = begin_with("<s>", library)
    return library


def gemma(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Gemma: no blank before the text, pieces of lines and blanks, and some hundred added tokens."""
    runs = ["\n" * size for size in range(2, 32)] + [SPACE * size for size in range(2, 32)]
    tags = [f"<{mark}{tag}>" for tag in ("table", "tr", "h1", "blockquote", "strong", "code") for mark in ("", "/")]
    own = ["[@BOS@]", *(f"<unused{number}>" for number in range(99)), "<start_of_turn>", "<end_of_turn>"]
    library = Tokenizer(
        byte_fallback_bpe(
            texts, vocab_size, user_defined_symbols=[*own, *runs, *tags], add_dummy_prefix=False, pad_id=0, eos_id=1,
            bos_id=2, unk_id=3, pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>",
        )
    )  # fmt: skip
    library.normalizer = normalizers.Replace(" ", SPACE)
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    library.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_tokens(specials("<pad>", "<eos>", "<bos>", "<unk>"))
    library.add_tokens([AddedToken(name, special=False, normalized=False) for name in [*own, *runs, *tags]])
    library.post_processor = begin_with("<bos>", library)
    return library


def llama3(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Llama 3: byte-level, whole words taken from the vocabulary before merges, and a token before each text."""
    library = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    library.add_tokens(specials("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"))
    begin = begin_with("<|begin_of_text|>", library)
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    return library


FAMILIES: dict[str, Family] = {"llama2": llama2, "mistral": mistral, "gemma": gemma, "llama3": llama3}
