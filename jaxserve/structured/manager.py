"""Structured output as the engine sees it: checks what a request asks, and has its grammar compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxserve.sampling.thinking import Markers
from jaxserve.structured.config import StructuredOutputsConfig
from jaxserve.structured.constraint import Constraint, thinking_is_over
from jaxserve.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxserve.request import Request
    from jaxserve.structured.compiler import GrammarCompiler


class StructuredOutputs:
    """config: None where the engine was made without. markers: of thinking sections, None where it knows none."""

    def __init__(
        self, tokenizer: Any | None, vocab_size: int, config: StructuredOutputsConfig | None, markers: Markers | None
    ) -> None:
        self._tokenizer, self._vocab_size, self._config = tokenizer, vocab_size, config
        self._compiler: GrammarCompiler | None = None
        self._markers = None if config is None or config.enable_in_reasoning else markers

    def validate(self, params: StructuredOutputsParams) -> None:
        """Raises ValueError for what this engine cannot do."""
        if self._config is None:
            why = "has no tokenizer" if self._tokenizer is None else "was made with structured_outputs_config=None"
            raise ValueError(f"structured_outputs.{params.kind} was given, and this engine {why}")
        self._workers().validate(params)

    def constraint(self, request: Request, params: StructuredOutputsParams) -> Constraint:
        """Start compiling; the request's output is held to the grammar once there is one."""
        end = None
        if self._markers is not None:
            markers = self._markers
            over = thinking_is_over(request.prompt_token_ids, markers.start, markers.end)
            end = None if over else markers.end
        return Constraint(self._workers().submit(params, request.stop_ids), end)

    def shutdown(self) -> None:
        """Stop the workers that compile."""
        if self._compiler is not None:
            self._compiler.shutdown()

    def _workers(self) -> GrammarCompiler:
        """Made for the first request that needs them: engines that never see a grammar load none of it."""
        if self._compiler is None:
            from jaxserve.structured.compiler import GrammarCompiler

            assert self._config is not None
            self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size, self._config)
        return self._compiler
