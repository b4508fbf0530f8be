"""Other engines beside ours: where they are installed, and a line protocol to ask them in turn (bench/peers)."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "peers"


def add_peers_option(parser: argparse.ArgumentParser, names: str) -> None:
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", help=f"also measure {names}, installed in this folder where it is new"
    )


def installed(folder: Path) -> Path:
    """`folder` with an environment for each peer and the demo model as a Hugging Face folder; makes what is missing."""
    from export_hf import export

    if not (folder / "vllm-env").exists():
        subprocess.run(["sh", str(SCRIPTS / "install.sh"), str(folder)], check=True)
    if not (folder / "model").exists():
        export(folder / "model")
    return folder


class Peer:
    """A process of another engine, which ends when this one does. Raises RuntimeError when it does not start."""

    def __init__(
        self,
        name: str,
        folder: Path,
        prompts: Path,
        batches: Sequence[int],
        tokens: int,
        kinds: Sequence[str],
        options: Sequence[str] = (),
    ) -> None:
        """name: vllm or transformers. prompts: a file with lists of token ids. kinds: of sampling, to warm up for."""
        script = SCRIPTS / f"{name}_throughput.py"
        command = [str(folder / f"{name}-env" / "bin" / "python"), str(script)]
        command += ["--model", str(folder / "model"), "--prompts", str(prompts), "--tokens", str(tokens)]
        command += ["--sampling", *kinds, "--batch", *map(str, batches), *options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._read().strip() != "ready":
            raise RuntimeError(f"{script.name} did not start; to see why: {' '.join(command)}")

    def ask(self, batch: int, tokens: int, sampling: str, **more: Any) -> float:
        """Output tokens per second."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"batch": batch, "tokens": tokens, "sampling": sampling} | more) + "\n")
        self.process.stdin.flush()
        return float(json.loads(self._read())["tokens_per_s"])

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()
