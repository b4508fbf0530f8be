"""Which logits processors an engine has: its own, those installed packages offer, those its user names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from jaxserve.sampling.builtin import BUILTIN
from jaxserve.sampling.processor import LogitsProcessor, ProcessorConfig, check_traceable, checked_row
from jaxserve.sampling_params import SamplingParams

ENTRY_POINT_GROUP = "jaxserve.logits_processors"


def make_processors(named: Sequence[Any], config: ProcessorConfig) -> tuple[LogitsProcessor, ...]:
    """All processors in the order they are applied: built-in, from entry points by name, then `named`.

    named: classes, or "module:Class". Raises ValueError naming the one that cannot be loaded, made or compiled.
    """
    installed = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
    others = [_class(name) for name in (*(point.value for point in installed), *named)]
    classes: list[type[LogitsProcessor]] = [*BUILTIN, *others]
    return tuple(_make(kind, config) for kind in classes)


def _class(name: Any) -> type[LogitsProcessor]:
    found = _import(name) if isinstance(name, str) else name
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ValueError(
            f"logits_processors holds {name!r}; it must be a subclass of LogitsProcessor or 'module:Class'"
        )
    return found


def _import(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(f"logits_processors holds {name!r}; a name must be of the form 'module:Class'")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"logits_processors holds {name!r}, which cannot be loaded: {error}") from error
    return found


def _make(kind: type[LogitsProcessor], config: ProcessorConfig) -> LogitsProcessor:
    try:
        processor = kind(config)
    except Exception as error:
        raise ValueError(f"logits processor {kind.__name__} cannot be made: {type(error).__name__}: {error}") from error
    check_traceable(processor, config.max_model_len)
    return processor


def rows_of(processors: Sequence[LogitsProcessor], params: SamplingParams) -> tuple[Any | None, ...]:
    """A request's parameters for each processor, None for those it does not use.

    Raises ValueError for what a processor refuses, or none of them reads.
    """
    known = {name for processor in processors for name in processor.arguments}
    if unknown := sorted(set(params.extra_args or ()) - known):
        raise ValueError(f"extra_args has the keys {unknown}; the logits processors here read {sorted(known)}")
    return tuple(_row(processor, params) for processor in processors)


def _row(processor: LogitsProcessor, params: SamplingParams) -> Any | None:
    try:
        processor.validate(params)
        return checked_row(processor, params)
    except ValueError:
        raise
    except Exception as error:  # of a processor that somebody else wrote
        name = type(processor).__name__
        raise ValueError(f"logits processor {name} refuses the request: {type(error).__name__}: {error}") from error
