"""SamplingParams: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve.sampling_params import RequestOutputKind, SamplingParams


def test_defaults() -> None:
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.seed, p.max_tokens) == (1, 1.0, 1.0, 0, 0.0, None, 16)
    assert (p.stop, p.stop_token_ids, p.ignore_eos, p.include_stop_str_in_output) == ([], [], False, False)
    assert (p.detokenize, p.skip_special_tokens, p.spaces_between_special_tokens) == (True, True, True)
    assert (p.logprobs, p.output_kind) == (None, RequestOutputKind.CUMULATIVE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 4),
        ("temperature", 0),
        ("temperature", 1e-6),
        ("temperature", 1000.0),
        ("temperature", np.float32(0.5)),
        ("top_p", 0.9999999),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 10**6),
        ("top_k", np.int64(3)),
        ("min_p", 0),
        ("min_p", 1.0),
        ("seed", 0),
        ("seed", -2),
        ("seed", 2**63 - 1),
        ("max_tokens", 1),
        ("max_tokens", None),
        ("stop_token_ids", [0, 5]),
        ("stop", ["a", "bc"]),
        ("logprobs", 0),
        ("logprobs", None),
        ("output_kind", RequestOutputKind.DELTA),
    ],
)
def test_accepted(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("n", 0, "[1, 16384]"),
        ("n", 1.0, "[1, 16384]"),
        ("n", True, "[1, 16384]"),
        ("n", 10**9, "[1, 16384]"),
        ("temperature", -0.1, ">= 0"),
        ("temperature", math.nan, ">= 0"),
        ("temperature", math.inf, ">= 0"),
        ("temperature", "1", ">= 0"),
        ("temperature", None, ">= 0"),
        ("temperature", True, ">= 0"),
        ("top_p", 0, "(0, 1]"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.0000001, "(0, 1]"),
        ("top_p", -1, "(0, 1]"),
        ("top_p", math.nan, "(0, 1]"),
        ("top_k", -2, "[-1, 2147483647]"),
        ("top_k", 2**31, "2147483647"),
        ("top_k", 1.5, "[-1, 2147483647]"),
        ("top_k", True, "[-1, 2147483647]"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", 1.1, "[0, 1]"),
        ("min_p", math.nan, "[0, 1]"),
        ("seed", 2**63, "9223372036854775807"),
        ("seed", 1.0, "integer"),
        ("seed", False, "integer"),
        ("max_tokens", 0, ">= 1"),
        ("max_tokens", -1, ">= 1"),
        ("max_tokens", 2.0, ">= 1"),
        ("stop", "", "empty"),
        ("stop", ["a", ""], "empty"),
        ("stop", [1], "string"),
        ("stop", 3, "string"),
        ("stop_token_ids", [-1], ">= 0"),
        ("stop_token_ids", [True], ">= 0"),
        ("stop_token_ids", ["a"], ">= 0"),
        ("stop_token_ids", "ab", "list"),
        ("stop_token_ids", 7, "list"),
        ("ignore_eos", 1, "True or False"),
        ("include_stop_str_in_output", None, "True or False"),
        ("detokenize", 0, "True or False"),
        ("skip_special_tokens", "yes", "True or False"),
        ("spaces_between_special_tokens", 1, "True or False"),
        ("logprobs", -2, "an integer >= -1"),
        ("logprobs", False, "an integer >= -1"),
        ("prompt_logprobs", 0.5, "an integer >= -1"),
        ("output_kind", 1, "RequestOutputKind"),
    ],
)
def test_refused_with_field_value_and_range(name: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole message is checked below)
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    message = str(error.value)
    assert message.startswith(name)
    assert expected in message
    if not isinstance(value, list):
        assert repr(value) in message or repr(float(value)) in message  # type: ignore[arg-type]


def test_top_p_zero_only_when_greedy() -> None:
    assert SamplingParams(temperature=0, top_p=0).top_p == 0
    with pytest.raises(ValueError, match=r"top_p is -0.5"):
        SamplingParams(temperature=0, top_p=-0.5)


def test_from_a_generation_config() -> None:
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    others = {"do_sample": True, "eos_token_id": [1, 2], "transformers_version": "4.51.0"}
    params = SamplingParams.from_generation_config(recommended | others | {"max_new_tokens": 2048})
    assert params == SamplingParams(**recommended, max_tokens=2048)
    assert SamplingParams.from_generation_config(others | {"temperature": None}) == SamplingParams()
    with pytest.raises(ValueError, match=r"top_p.*1\.5"):
        SamplingParams.from_generation_config({"top_p": 1.5})


def test_unknown_field() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_a_single_stop_string() -> None:
    assert SamplingParams(stop="END").stop == ["END"]
    assert SamplingParams(stop=None).stop == []  # type: ignore[arg-type]


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop=["a"], detokenize=False)


def test_lists_are_copied_and_fields_are_fixed() -> None:
    ids = [1]
    p = SamplingParams(stop_token_ids=ids)
    ids.append(2)
    assert p.stop_token_ids == [1]
    with pytest.raises(AttributeError):
        p.temperature = 5.0  # type: ignore[misc]


def test_verify() -> None:
    p = SamplingParams(stop_token_ids=[9])
    p.verify(vocab_size=10, max_model_len=8, prompt_len=7)
    with pytest.raises(ValueError, match=r"stop_token_ids holds the token id 9; token ids must be in \[0, 8\]"):
        p.verify(vocab_size=9, max_model_len=8, prompt_len=7)
    with pytest.raises(ValueError, match=r"prompt has 8 tokens; with max_model_len=8 .* at most 7"):
        p.verify(vocab_size=10, max_model_len=8, prompt_len=8)
    with pytest.raises(ValueError, match="prompt is empty"):
        p.verify(vocab_size=10, max_model_len=8, prompt_len=0)
