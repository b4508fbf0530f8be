"""Many coroutines and one real engine: who waits gets what they get alone, who goes leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve import EngineCore, RequestOutputKind
from jaxserve.async_engine import AsyncEngine
from tests.jaxserve.test_engine import CROWDED, SOLITARY, Arrival, check_no_leak, mixed_traffic

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
WAYS = ("stay", "stay", "abort", "leave", "cancel")  # what a consumer does once it has seen a few tokens
FEW = 3


async def consume(engine: AsyncEngine, arrival: Arrival, way: str, seen: list[int], ends: list[str]) -> None:
    await asyncio.sleep(arrival.at / 500)
    params = replace(arrival.params, output_kind=RequestOutputKind.DELTA)
    async with contextlib.aclosing(engine.generate(arrival.prompt, params, arrival.name)) as stream:
        async for output in stream:
            seen += output.outputs[0].token_ids
            if output.finished:
                ends.append(str(output.outputs[0].finish_reason))
            elif way == "stay" or len(seen) < FEW:
                continue
            elif way == "abort":
                await engine.abort(arrival.name)
            elif way == "leave":
                break
            elif (task := asyncio.current_task()) is not None:
                task.cancel()


@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "ngram"])
def test_consumers_of_all_kinds(
    make_engine: Callable[..., EngineCore], generate: Any, random_markov: Any, speculation: dict[str, Any] | None
) -> None:
    model = random_markov(32, eos_token_ids=(0,))
    core, alone = make_engine(model, speculative_config=speculation, **CROWDED), make_engine(model, **SOLITARY)
    arrivals = mixed_traffic(32, 60)
    ways = np.random.default_rng(1).choice(WAYS, len(arrivals))
    seen: list[list[int]] = [[] for _ in arrivals]
    ends: list[list[str]] = [[] for _ in arrivals]

    async def run() -> list[BaseException | None]:
        async with AsyncEngine.from_core(core) as engine:
            tasks = (consume(engine, *args) for args in zip(arrivals, ways, seen, ends, strict=True))
            return await asyncio.gather(*tasks, return_exceptions=True)

    raised = asyncio.run(run())
    check_no_leak(core)
    left = 0
    for i, (arrival, way) in enumerate(zip(arrivals, ways, strict=True)):
        output = generate(alone, arrival.prompt, arrival.params).outputs[0]
        if ends[i] == [output.finish_reason]:
            assert seen[i] == output.token_ids
            continue
        left += way != "abort"
        assert way != "stay"
        assert ends[i] == (["abort"] if way == "abort" else [])
        assert len(seen[i]) >= FEW
        assert seen[i] == output.token_ids[: len(seen[i])]
        assert isinstance(raised[i], asyncio.CancelledError) == (way == "cancel")
    assert left > 10
    assert {type(error) for error in raised} == {type(None), asyncio.CancelledError}
