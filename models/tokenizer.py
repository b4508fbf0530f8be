"""Tokenizers, for either kind of model file."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast


def load_tokenizer(path: str | Path | Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer of a model directory in Hugging Face layout or of a .gguf file, with chat template and special ids;
    or one of the tokenizers library as one of transformers.

    Nothing is downloaded. Raises FileNotFoundError when the path does not exist, ValueError when it has no tokenizer or
    one of an unsupported kind.
    """
    if isinstance(path, Tokenizer):
        return PreTrainedTokenizerFast(tokenizer_object=path)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such model directory or GGUF file: {path}")
    if path.suffix == ".gguf" and path.is_file():
        from models.gguf_tokenizer import tokenizer_from_gguf  # needs the package gguf

        return tokenizer_from_gguf(path)
    if not path.is_dir():
        raise ValueError(f"{path} is neither a model directory nor a .gguf file")
    if not (path / "tokenizer.json").exists() and not (path / "tokenizer_config.json").exists():
        raise ValueError(f"{path} has no tokenizer: neither tokenizer.json nor tokenizer_config.json")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = type(tokenizer).__name__
        raise ValueError(f"{path} has a tokenizer of the slow class {kind}; supported: those with a tokenizer.json")
    return tokenizer
