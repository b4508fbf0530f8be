"""The offline interface: a list of prompts in, a list of outputs out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxserve.admission import Prompt
from jaxserve.config import STRUCTURED_OUTPUTS, EngineConfig, ReasoningConfig
from jaxserve.engine import EngineCore
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.stats import SpecDecodingLogger, register_metrics
from jaxserve.structured.config import StructuredOutputsConfig

Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class LLM:
    """A model, ready to generate.

        llm = LLM("path/to/model")
        for output in llm.generate(["Hello", "The capital of France is"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    model: a directory in Hugging Face layout, a .gguf file, or a model object. tokenizer: a path or an object; None
    is the model's own. disable_log_stats=False: what became of drafts is logged ("jaxserve", INFO) every ten seconds
    and at the end of each call. The other arguments are those of EngineConfig. Not thread-safe; AsyncEngine serves
    many callers at once.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory_fraction: float = 0.5,
        tensor_parallel_size: int = 1,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: str = "fcfs",
        watermark: float = 0.01,
        seed: int = 0,
        keep_boundary_hidden: bool = False,
        logits_processors: Sequence[Any] = (),
        max_logprobs: int = 20,
        logprobs_mode: str = "raw_logprobs",
        sampling_implementation: str | None = None,
        attention_implementation: str | None = None,
        reasoning_config: ReasoningConfig | Mapping[str, Any] | str | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        structured_outputs_config: StructuredOutputsConfig | Mapping[str, Any] | None = STRUCTURED_OUTPUTS,
        compilation_cache_dir: str | Path | None = None,
        disable_log_stats: bool = True,
    ) -> None:
        config = EngineConfig(
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory_fraction=kv_cache_memory_fraction,
            tensor_parallel_size=tensor_parallel_size,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            scheduling_policy=scheduling_policy,
            watermark=watermark,
            seed=seed,
            keep_boundary_hidden=keep_boundary_hidden,
            logits_processors=logits_processors,
            max_logprobs=max_logprobs,
            logprobs_mode=logprobs_mode,
            sampling_implementation=sampling_implementation,
            attention_implementation=attention_implementation,
            reasoning_config=reasoning_config,
            speculative_config=speculative_config,
            structured_outputs_config=structured_outputs_config,
            compilation_cache_dir=compilation_cache_dir,
        )
        self.engine = EngineCore.from_model(model, tokenizer, config)
        self._ids = itertools.count()
        self._spec_log = None if disable_log_stats else SpecDecodingLogger(self.engine.stats().speculation)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, the two latter with an
        optional "cache_salt"; or a list of these. sampling_params, priority: one for all or one for each prompt;
        sampling_params None: get_default_sampling_params().
        Raises ValueError before anything runs when a prompt or its parameters cannot be served. An interrupt aborts
        what is outstanding.
        """
        wanted = _as_list(prompts)
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", given, SamplingParams, len(wanted))
        priorities = _one_each("priority", 0 if priority is None else priority, int, len(wanted))
        params = [dataclasses.replace(p, output_kind=RequestOutputKind.FINAL_ONLY) for p in params]
        prepared = [self.engine.prepare(prompt, p) for prompt, p in zip(wanted, params, strict=True)]
        ids = [str(next(self._ids)) for _ in prepared]
        try:
            for name, request, rank in zip(ids, prepared, priorities, strict=True):
                self.engine.add_prepared(name, request, priority=rank)
            return self._run(ids, use_tqdm)
        except BaseException:
            self.engine.abort(ids)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The model's answers to one conversation or a list of them.

        messages: [{"role": "user", "content": "..."}, ...]. chat_template: instead of the tokenizer's own.
        Raises ValueError as generate does, and when there is no template or it refuses the messages.
        """
        conversations = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        tokenizer = self.get_tokenizer()
        texts = [
            render_chat(
                tokenizer,
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        # The template has written the special tokens already: encoding must not add them again.
        prompts = [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts]
        outputs = self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends (SamplingParams.from_generation_config)."""
        return self.engine.default_sampling_params

    def get_tokenizer(self) -> Any:
        """The tokenizer; None for a model without one."""
        return self.engine.tokenizer

    def warmup(self, progress: bool = True) -> None:
        """Compiles everything a request can need. Without it the first requests wait for their compilations."""
        self.engine.warmup(progress)

    def stats(self) -> Any:
        return self.engine.stats()

    def register_metrics(
        self, registry: Any = None, labels: Mapping[str, str] | None = None, prefix: str = "jaxserve:"
    ) -> Any:
        """Prometheus counters of speculation, as jaxserve.speculative.register_metrics makes them."""
        return register_metrics(self.stats().speculation, registry, labels, prefix)

    def shutdown(self) -> None:
        """Frees the device's memory. Later calls raise RuntimeError."""
        self.engine.shutdown()

    def _run(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        waiting, done = set(ids), dict[str, RequestOutput]()
        num_tokens, start = 0, time.perf_counter()
        bar = tqdm(total=len(ids), desc="Prompts", unit="prompt", disable=not use_tqdm)
        with bar, deferred_interrupt() as raise_if_interrupted:
            while self.engine.has_unfinished():
                for output in self.engine.step():
                    if output.request_id not in waiting:  # the end of one that an interrupt aborted earlier
                        continue
                    done[output.request_id] = output
                    num_tokens += sum(len(o.token_ids) for o in output.outputs)
                    bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - start):.1f} tokens/s", refresh=False)
                    bar.update()
                if self._spec_log is not None:
                    self._spec_log.poll(now=not self.engine.has_unfinished())
                raise_if_interrupted()
        return [done[request_id] for request_id in ids]


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C takes effect only where the body calls the function given to it: inside a step it would tear the engine's
    state apart. A second Ctrl-C does not wait. Other threads, and handlers of the program's own, are left alone."""
    pressed = False

    def on_interrupt(signum: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def raise_if_interrupted() -> None:
        if pressed:
            raise KeyboardInterrupt

    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not default or threading.current_thread() is not threading.main_thread():
        yield raise_if_interrupted
        return
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    **kwargs: Any,
) -> str:
    """The text of a conversation by the tokenizer's chat template, or by `chat_template`. kwargs go to the template."""
    if tokenizer is None:
        raise ValueError("chat needs a tokenizer, and this engine has none")
    if chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the tokenizer has no chat template: give chat_template, or use generate")
    if not messages:
        raise ValueError("messages is empty: a conversation needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"a message must be a dict with 'role' and 'content'; got {message!r:.80}")
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **kwargs,
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt in any of its forms becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise ValueError(f"prompts must be a prompt or a list of prompts; got {type(prompts).__name__}")
    if len(prompts) and all(isinstance(token, Integral) for token in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(name: str, values: Any, kind: type, count: int) -> list[Any]:
    if isinstance(values, kind):
        return [values] * count
    if not isinstance(values, Sequence) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"{name} must be a {kind.__name__} or a list of them; got {values!r:.80}")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts: give one for all, or one for each")
    return list(values)
