"""Detokenizer: whole characters, nothing of the prompt, stop strings; the same with every way to cut the tokens."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from jaxserve.detokenizer import Detokenizer, StopMatch, find_stop_string, held_back

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sampling_cases.json").read_text())


@cache
def byte_tokenizer() -> Tokenizer:
    """Token id = byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocabulary = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    """Words with a space mark, then bytes: <0x00> has id 3."""
    words = ["<unk>", "▁the", "▁cat"]
    vocabulary = {token: i for i, token in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


class PlainTokenizer:
    """Only decode(): what a tokenizer that is not built on `tokenizers` offers."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)


BYTES = [pytest.param(byte_tokenizer(), id="stream"), pytest.param(PlainTokenizer(byte_tokenizer()), id="plain")]


def deltas(detokenizer: Detokenizer, tokens: list[int], chunk: int = 1) -> tuple[list[str], StopMatch | None]:
    """What a streaming user sees at each step and at the end, and the match that ended it."""
    pieces, shown, match = [], 0, None
    for start in range(0, len(tokens), chunk):
        match = detokenizer.push(tokens[start : start + chunk])
        finished = match is not None or start + chunk >= len(tokens)
        end = detokenizer.num_visible(finished)
        pieces.append(detokenizer.text[shown:end])
        shown = end
        if match is not None:
            break
    return pieces, match


@pytest.mark.parametrize(("text", "num_new", "stop", "include", "expected"), GOLDEN["stop_strings"])
def test_golden_stop_strings(text: str, num_new: int, stop: list[str], include: bool, expected: Any) -> None:
    found = find_stop_string(text, num_new, stop, include)
    if expected is None:
        assert found is None
    else:
        assert found == (expected[0], len(text) if expected[1] == -1 else expected[1])


@pytest.mark.parametrize("tokenizer", BYTES)
@pytest.mark.parametrize("case", GOLDEN["detokenizer"], ids=lambda case: case["case"])
def test_golden_detokenizer(case: dict[str, Any], tokenizer: Any) -> None:
    prompt = case.get("prompt_tokens") or list(case["prompt"].encode())
    detokenizer = Detokenizer(tokenizer, prompt, stop=case["stop"], min_tokens=case.get("min_tokens", 0))
    tokens, chunk = case["tokens"], case["chunk"]
    pieces, kept, match = [], 0, None
    for start in range(0, len(tokens), chunk):
        shown = len(detokenizer.text)
        new = tokens[start : start + chunk]
        match = detokenizer.push(new)
        pieces.append(detokenizer.text[shown:])
        kept += len(new) if match is None else match.num_tokens
        if match is not None:
            break
    text = detokenizer.text
    assert text == case.get("text", text)
    assert (match and match.stop) == case.get("stop_reason")
    assert pieces == case.get("deltas", pieces)
    assert kept == case.get("num_tokens_kept", kept)
    assert "text_must_not_contain" not in case or case["text_must_not_contain"] not in text
    assert text.endswith(case.get("text_ends_with", ""))


@pytest.mark.parametrize("tokenizer", BYTES)
@pytest.mark.parametrize(
    ("prompt", "tokens", "expected"),
    [
        ("Hello \U0001f336".encode()[:-1], b"\xb6x", "\U0001f336x"),
        ("Hello \U0001f336".encode()[:-1], b"x", "x"),
        ("é\U0001f336".encode()[:-3], "\U0001f336y".encode()[1:], "\U0001f336y"),
        (b"\xff" * 30, b"x", "x"),
        (b"\xff" * 30, b"\xffx", "\ufffdx"),
        (b"\xff\xf0\x9f\x8c", b"\xb6x", "\U0001f336x"),
        (b"\x9f" * 9 + b"ok", b"x", "x"),
        (b"", b"\xb6x", "\ufffdx"),
        (b"", b"x", "x"),
    ],
)
def test_prompt_does_not_leak(prompt: bytes, tokens: bytes, expected: str, tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, list(prompt))
    detokenizer.push(list(tokens))
    assert detokenizer.text == expected


@pytest.mark.parametrize("tokenizer", BYTES)
@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("日本語のテキスト。終わり", ["。"], "日本語のテキスト", "。"),
        ("日本語のテキスト。終わり", ["終わる", "ト。終"], "日本語のテキス", "ト。終"),
        ("안녕하세요 세계", ["세상"], "안녕하세요 세계", None),
        ("你好、世界", ["世界", "界"], "你好、", "世界"),
        (
            "a\U0001f468\u200d\U0001f469\u200d\U0001f467z",
            ["\U0001f467z"],
            "a\U0001f468\u200d\U0001f469\u200d",
            "\U0001f467z",
        ),
    ],
)
def test_streaming_cjk_with_stop_strings(
    text: str, stop: list[str], expected: str, reason: Any, tokenizer: Any
) -> None:
    for chunk in (1, 2, 3, 5, 100):
        pieces, match = deltas(Detokenizer(tokenizer, [112], stop=stop), list(text.encode()), chunk)
        assert "".join(pieces) == expected
        assert all("\ufffd" not in piece for piece in pieces)
        assert (match and match.stop) == reason


def test_what_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(byte_tokenizer(), [112], stop=["STOP", "X\nY"])
    pieces, match = deltas(detokenizer, list(b"aSTOxX\nSTOP"))
    assert pieces == ["a", "", "", "", "STOx", "", "", "X\n", "", "", ""]
    assert match == ("STOP", 1)
    pieces, match = deltas(Detokenizer(byte_tokenizer(), [112], stop=["STOP"]), list(b"aST"))
    assert pieces == ["a", "", "ST"], "an end without a match shows what was held back"
    pieces, match = deltas(
        Detokenizer(byte_tokenizer(), [112], stop=["STOP"], include_stop_str_in_output=True), list(b"aSTOPb")
    )
    assert pieces == ["a", "S", "T", "O", "P"]
    assert match == ("STOP", 1)


@given(text=st.text("ab", max_size=8), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_held_back_is_the_longest_possible_beginning(text: str, stop: list[str]) -> None:
    expected = max(
        (n for n in range(len(text) + 1) if any(len(s) > n and s.startswith(text[len(text) - n :]) for s in stop)),
        default=0,
    )
    assert held_back(text, stop) == expected


@given(
    tokens=st.lists(st.integers(0, 255), max_size=24),
    cuts=st.lists(st.integers(1, 5), max_size=24),
    plain=st.booleans(),
)
def test_text_is_that_of_the_bytes(tokens: list[int], cuts: list[int], plain: bool) -> None:
    tokenizer = PlainTokenizer(byte_tokenizer()) if plain else byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, list(b"prompt"))
    rest, shown = tokens, ""
    for cut in [*cuts, len(tokens)]:
        detokenizer.push(rest[:cut])
        rest = rest[cut:]
        assert detokenizer.text.startswith(shown)
        shown = detokenizer.text
        assert not shown.endswith("\ufffd")
    whole = bytes(tokens).decode(errors="replace")
    assert whole.startswith(shown)
    assert set(whole[len(shown) :]) <= {"\ufffd"}


@given(
    text=st.text("ab日", max_size=20),
    stop=st.lists(st.text("ab日", min_size=1, max_size=4), min_size=1, max_size=3),
    chunk=st.integers(1, 9),
    include=st.booleans(),
)
def test_stop_strings_however_the_tokens_arrive(text: str, stop: list[str], chunk: int, include: bool) -> None:
    tokens = list(text.encode())
    detokenizer = Detokenizer(byte_tokenizer(), [112], stop=stop, include_stop_str_in_output=include)
    pieces, match = deltas(detokenizer, tokens, chunk)
    ends = [(text.find(s) + len(s), i, s) for i, s in enumerate(stop) if s in text]
    if not ends:
        assert match is None
        assert "".join(pieces) == text
        return
    end, _, first = min(ends)
    assert match is not None
    assert match.stop == first
    assert "".join(pieces) == text[: end if include else end - len(first)]
    num_tokens = (len(pieces) - 1) * chunk + match.num_tokens
    assert bytes(tokens[:num_tokens]).decode() == text[:end]


@pytest.mark.parametrize("plain", [False, True])
def test_sentencepiece_keeps_the_space_after_the_prompt(plain: bool) -> None:
    tokenizer = PlainTokenizer(sentencepiece_tokenizer()) if plain else sentencepiece_tokenizer()
    detokenizer = Detokenizer(tokenizer, [1])
    detokenizer.push([2, 1])
    assert detokenizer.text == " cat the"


@pytest.mark.parametrize("plain", [False, True])
def test_decoder_that_changes_its_mind(plain: bool) -> None:
    """Byte fallback turns a whole run of bytes into replacement characters when one of them is wrong."""
    tokenizer = PlainTokenizer(sentencepiece_tokenizer()) if plain else sentencepiece_tokenizer()
    detokenizer = Detokenizer(tokenizer, [1])
    tokens = [3 + b for b in "日".encode()] + [3 + 0xFF, 1, 2]
    for token in tokens:
        detokenizer.push([token])
    assert detokenizer.text.startswith("日")
    assert detokenizer.text.endswith("the cat")


def special_tokenizer() -> Tokenizer:
    """Word level with decoding that joins everything by spaces; ids 2 and 3 are special."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[U]": 4}, unk_token="[U]"))
    tokenizer.add_special_tokens([AddedToken("<x>"), AddedToken("<y>")])
    return tokenizer


@pytest.mark.parametrize(
    ("skip", "spaces", "expected"),
    [(True, True, " a b"), (True, False, " a b"), (False, True, " a <x> <y> <x> b"), (False, False, " a <x><y><x> b")],
)
def test_special_tokens(skip: bool, spaces: bool, expected: str) -> None:
    tokenizer = special_tokenizer()
    x, y = tokenizer.token_to_id("<x>"), tokenizer.token_to_id("<y>")
    detokenizer = Detokenizer(tokenizer, [0], skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    detokenizer.push([0, x, y, x, 1])
    assert detokenizer.text == expected


def test_hidden_last_token() -> None:
    detokenizer = Detokenizer(byte_tokenizer(), [112], stop=["b"])
    assert detokenizer.push([97, 98], hidden_last=True) is None
    assert detokenizer.text == "a"


def test_cost_for_64_requests() -> None:
    detokenizers = [Detokenizer(byte_tokenizer(), [112] * 100, stop=["\n\n", "END"]) for _ in range(64)]
    times = []
    for _ in range(30):
        start = time.perf_counter()
        for detokenizer in detokenizers:
            detokenizer.push([97])
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3
