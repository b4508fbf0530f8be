"""The example runs, with a model of a few tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.jaxserve.test_speculation_models import CONFIG, V, Weights

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> str:
    """Of words it knows "the"; all others are token 2. Its tokenizer has a chat template."""
    weights = Weights(tmp_path_factory.mktemp("model") / "model", 0)
    weights.model(2)
    path = weights.write({name: value for name, value in CONFIG.items() if name != "eos_token_id"})
    words = {"the": 1, "?": 2} | {f"w{i}": i for i in range(3, V)} | {"end": 0}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    fast.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    fast.save_pretrained(path)
    return path


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_ngram_summarise(model: str, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("ngram_summarise", EXAMPLES / "ngram_summarise.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(["--model", model, "--method", method, "--drafts", "3", "--max-tokens", "40"])
    printed = capsys.readouterr().out
    assert "the answer      the same token for token" in printed
    assert "tokens/s" in printed
    accepted, _, drafted, *_ = printed.split("drafts          ")[1].split()
    assert 0 <= int(accepted) <= int(drafted)
    assert int(drafted) > 0
