"""The tokenizer inside a GGUF file, built from its metadata with the `tokenizers` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from models.gguf import gguf, read_gguf

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Style(NamedTuple):
    """How a byte-level vocabulary cuts text before merging. `split` is a regex; None is GPT-2's own."""

    split: str | None = None
    single_digits: bool = False  # cut every digit off first
    whole_words: bool = False  # a word that is itself a token needs no merges
    nfc: bool = False
    add_bos: bool = False  # when the file does not say


_GPT2 = _Style()
_LLAMA3 = _Style(_LLAMA3_SPLIT, whole_words=True, add_bos=True)
_QWEN2 = _Style(_QWEN2_SPLIT, nfc=True)
_STYLES = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _Style(single_digits=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Style(_TEKKEN_SPLIT, whole_words=True, add_bos=True),
}


class _Vocabulary(NamedTuple):
    """The token table of a GGUF file, without the padding that evens out the embedding matrix."""

    tokens: list[str]
    kinds: list[int]  # gguf.TokenType
    scores: list[float]

    def of_kind(self, kind: gguf.TokenType) -> list[str]:
        return [token for token, k in zip(self.tokens, self.kinds, strict=True) if k == kind]


def tokenizer_from_gguf(path: Path) -> PreTrainedTokenizerFast:
    """Tokenizer, chat template and special tokens of a file. Raises ValueError for what is missing or unsupported."""
    metadata = read_gguf(path).metadata

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.{key}", default)

    vocabulary = _vocabulary(get, path)
    special = {
        f"{name}_token": vocabulary.tokens[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := get(f"ggml.{key}_token_id")) is not None and index < len(vocabulary.tokens)
    }
    model = get("ggml.model")
    if model == "gpt2":
        style = _style(get("ggml.pre", "default"), path)
        tokenizer, add_bos = _byte_level(vocabulary, _merges(get("ggml.merges"), path), style), style.add_bos
    elif model == "llama":
        merges = _merges(get("ggml.merges"), path) if get("ggml.merges") else _merges_from_scores(vocabulary, path)
        prefix = get("ggml.add_space_prefix", True)
        tokenizer, add_bos = _sentencepiece(vocabulary, merges, special.get("unk_token"), prefix), True
    else:
        raise ValueError(f"{path}: tokenizer.ggml.model={model!r} is not supported; supported: gpt2, llama")
    _add_special_tokens(tokenizer, vocabulary)
    bos = special.get("bos_token") if get("ggml.add_bos_token", add_bos) else None
    eos = special.get("eos_token") if get("ggml.add_eos_token", False) else None
    _frame(tokenizer, bos, eos)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=get("chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _vocabulary(get: Any, path: Path) -> _Vocabulary:
    tokens = get("ggml.tokens")
    if not tokens:
        raise ValueError(f"{path} holds no tokenizer: metadata tokenizer.ggml.tokens is missing")
    kinds = get("ggml.token_type") or [int(gguf.TokenType.NORMAL)] * len(tokens)
    scores = get("ggml.scores") or [0.0] * len(tokens)
    if not len(tokens) == len(kinds) == len(scores):
        raise ValueError(f"{path}: {len(tokens)} tokens, {len(kinds)} token types, {len(scores)} scores")
    end = len(tokens)
    while end and kinds[end - 1] == gguf.TokenType.UNUSED:
        end -= 1
    return _Vocabulary(tokens[:end], kinds[:end], scores[:end])


def _style(pre: str, path: Path) -> _Style:
    if pre not in _STYLES:
        raise ValueError(f"{path}: tokenizer.ggml.pre={pre!r} is not supported; supported: {', '.join(_STYLES)}")
    return _STYLES[pre]


def _merges(lines: list[str] | None, path: Path) -> list[tuple[str, str]]:
    if not lines:
        raise ValueError(f"{path}: metadata tokenizer.ggml.merges is missing")
    pairs = [line.split(" ") for line in lines]
    if bad := next((line for line, pair in zip(lines, pairs, strict=True) if len(pair) != 2), None):
        raise ValueError(f"{path}: tokenizer.ggml.merges has the entry {bad!r}, expected two tokens")
    return [(left, right) for left, right in pairs]


def _merges_from_scores(vocabulary: _Vocabulary, path: Path) -> list[tuple[str, str]]:
    """Sentencepiece merges whatever two neighbours make the best scored token: every way to cut every token in two is
    a merge, best score first."""
    if not any(vocabulary.scores):
        raise ValueError(f"{path}: tokenizer.ggml.model='llama' needs tokenizer.ggml.scores or tokenizer.ggml.merges")
    known = set(vocabulary.tokens)
    ranked = []
    for token, kind, score in zip(*vocabulary, strict=True):
        if kind == gguf.TokenType.NORMAL:
            cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
            ranked += [(score, left, right) for left, right in cuts if left in known and right in known]
    ranked.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in ranked]


def _byte_level(vocabulary: _Vocabulary, merges: list[tuple[str, str]], style: _Style) -> Tokenizer:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(BPE(ids, merges, ignore_merges=style.whole_words))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style.split is None)]
    if style.split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(style.split), behavior="isolated"))
    if style.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if style.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    vocabulary: _Vocabulary, merges: list[tuple[str, str]], unk: str | None, space_prefix: bool
) -> Tokenizer:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend("▁")] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        steps.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are special; user-defined ones (such as <think>) are text, but never cut into pieces."""
    control = vocabulary.of_kind(gguf.TokenType.CONTROL)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    defined = vocabulary.of_kind(gguf.TokenType.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _frame(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes encoding with special tokens put `bos` before and `eos` after the text."""
    if bos is None and eos is None:
        return
    template = [token for token in (bos, "$A", eos) if token is not None]
    pair = template + [token.replace("$A", "$B") for token in template]
    ids = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=ids)
