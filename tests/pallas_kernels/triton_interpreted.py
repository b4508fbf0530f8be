"""Run the Triton kernel in Triton's interpreter and print its tokens. Arrays are torch's: Triton has none itself."""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch

from pallas_kernels.cases import sampling_case
from pallas_kernels.triton.kernel import sample_kernel
from pallas_kernels.triton.sample import kernel_constants, scalars


def tokens(vocab: int) -> list[int]:
    case = sampling_case(vocab)
    rows, constants = len(case.names), kernel_constants(vocab)
    floats, ints = (torch.from_numpy(np.array(x)) for x in scalars(case.filters, None, vocab))
    words = torch.from_numpy(case.words.view(np.int32)).view(torch.uint32)
    token, top = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)
    sums = torch.zeros(rows, constants["TILES"])
    logits = torch.from_numpy(case.logits)
    sample_kernel[(rows,)](logits, floats, ints, words, vocab, token, top, sums, **constants)
    return token.tolist()


if __name__ == "__main__":
    print(json.dumps([tokens(int(vocab)) for vocab in sys.argv[1:]]))
