"""Compilation off the loop: routes, sharing, limits, and workers that die."""

import os
import re
import signal
import threading
import time

import pytest

from jaxserve.structured.compiler import GrammarCompiler
from jaxserve.structured.config import MatcherLimits, StructuredOutputsConfig
from jaxserve.structured.dfa import GrammarLimits
from jaxserve.structured.errors import GrammarError, NoTableError
from jaxserve.structured.json_keywords import ENFORCED_NOWHERE
from jaxserve.structured.matcher import MatcherGrammar
from jaxserve.structured.params import StructuredOutputsParams as Params
from jaxserve.structured.table import TokenTable
from jaxserve.structured.worker import TableWorker
from tests.structured.conftest import EOS, small_vocabulary

STOPS = frozenset({EOS})
CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SLOW = "(a?){9000}b"  # takes longer than any limit set here
TIMEOUT = 120


@pytest.fixture(scope="module")
def compiler():
    made = GrammarCompiler(small_vocabulary(), 320)
    yield made
    made.shutdown()


def compiled(compiler, stops=STOPS, **kinds):
    return compiler.submit(Params(**kinds), stops).result(TIMEOUT)


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        ({"regex": "a+"}, TokenTable),
        ({"choice": ["a", "b.c"]}, TokenTable),
        ({"json": CLOSED}, TokenTable),
        ({"json": {"type": "object", "properties": {"a": {}}}}, MatcherGrammar),
        ({"json_object": True}, MatcherGrammar),
        ({"json": CLOSED, "backend": "llguidance"}, MatcherGrammar),
        ({"json": {"type": "integer", "multipleOf": 2}}, MatcherGrammar),
        ({"regex": r"\p{Lu}+"}, MatcherGrammar),
        ({"regex": "(a{1000}){1000}"}, MatcherGrammar),
        ({"regex": "(a|b)*a(a|b){20}"}, MatcherGrammar),
        ({"choice": [f"choice {i}" for i in range(9000)]}, MatcherGrammar),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, MatcherGrammar),
        ({"grammar": 'start: "a" start | "b"'}, MatcherGrammar),
        ({"json": {"type": "object", "properties": {"n": {"$ref": "#"}}}}, MatcherGrammar),
    ],
)
def test_auto_takes_a_table_where_there_is_one(compiler, kinds, kind):
    compiler.validate(Params(**kinds))
    assert isinstance(compiled(compiler, **kinds), kind)


def test_what_neither_enforces_is_refused_by_name(compiler):
    for keyword, schema in {
        "uniqueItems": {"type": "array", "uniqueItems": True},
        "not": {"$defs": {"n": {"not": {"type": "null"}}}, "$ref": "#/$defs/n"},
        "format": {"type": "string", "format": "uri-template"},
        "x-guidance": {"type": "object", "x-guidance": {"lenient": True}},
    }.items():
        with pytest.raises(GrammarError, match=keyword):
            compiled(compiler, json=schema)


@pytest.mark.parametrize("keyword", sorted(ENFORCED_NOWHERE))
def test_what_is_refused_at_once_is_enforced_nowhere(compiler, keyword):
    """A keyword that llguidance learns must leave the list. Definitions may hold it, where nothing refers to them."""
    array = {"type": "array", "items": {"anyOf": [{keyword: {}}, {"type": "null"}]}}
    tag = {"structures": [{"begin": "<f>", "schema": array, "end": "</f>"}], "triggers": ["<f"]}
    for asked in ({"json": array}, {"structural_tag": tag}):
        with pytest.raises(ValueError, match=f"^structured_outputs.* has the keyword '{re.escape(keyword)}'"):
            Params(**asked)
    unused, used = ({"$defs": {"n": {keyword: {}}}} | rest for rest in ({"type": "null"}, {"$ref": "#/$defs/n"}))
    assert compiled(compiler, json=unused)
    with pytest.raises(GrammarError, match=re.escape(f'Unimplemented keys: ["{keyword}"]')):
        compiled(compiler, json=used)
    assert compiled(compiler, json=array, lenient=True)


def test_a_table_that_took_all_the_time_leaves_some_for_a_matcher(monkeypatch):
    made = GrammarCompiler(small_vocabulary(), 320, StructuredOutputsConfig(compile_timeout=0.05))

    def no_table(job, deadline):
        time.sleep(0.1)
        raise NoTableError("it took too long")

    monkeypatch.setattr(made, "_table", no_table)
    assert isinstance(compiled(made, regex="a+"), MatcherGrammar)
    with pytest.raises(GrammarError, match=r"uniqueItems.*\s.*no table: it took too long"):
        compiled(made, json={"type": "array", "uniqueItems": True})
    made.shutdown()


def test_lenient_says_what_it_ignores(compiler, caplog):
    """In the log, once: the second request shares the grammar of the first."""
    for _ in range(2):
        grammar = compiled(compiler, json={"type": "array", "uniqueItems": True}, lenient=True)
    assert any("uniqueItems" in warning for warning in grammar.warnings)
    assert compiled(compiler, json={"type": "array"}).warnings == ()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("jaxserve", "WARNING")
    assert "uniqueItems" in record.getMessage()


@pytest.mark.parametrize(
    "kinds",
    [
        {"regex": "(a|b)*a(a|b){20}", "backend": "table"},
        {"json": {"type": "object"}, "backend": "table"},
        {"regex": r"[^\x{0}-\x{10ffff}]"},
        {"grammar": 'start: "a" <|im_end|>'},
        {"grammar": "start: undefined"},
        {"json": {"$ref": "#/$defs/none"}},
        {"json": {"type": "strange"}},
        {"json": {"type": 7}},
        {"json": {"enum": 7}},
        {"json": {"type": "string", "pattern": "("}},
        {"json": {"type": "object", "properties": [], "additionalProperties": False}},
    ],
)
def test_what_fails_fails_alone(compiler, kinds):
    with pytest.raises(GrammarError):
        compiled(compiler, **kinds)
    assert compiled(compiler, regex="ok").num_states


@pytest.mark.parametrize("closed", [True, False])
def test_one_of_two_objects_eight_deep(compiler, closed):
    """Tens of kilobytes. A table where the branches are provably disjoint, else the keyword's name, and both soon."""

    def nested(depth):
        if not depth:
            return {"type": "null"}
        rest = {"additionalProperties": False} if closed else {}
        branches = [
            {"type": "object", "properties": {name: nested(depth - 1)}, "required": [name], **rest} for name in "ab"
        ]
        return {"oneOf": branches}

    schema = nested(8)
    assert len(str(schema)) > 29_000
    if closed:
        assert isinstance(compiled(compiler, json=schema), TokenTable)
    else:
        with pytest.raises(GrammarError, match="oneOf"):
            compiled(compiler, json=schema)
    assert compiled(compiler, regex="next").num_states


def test_equal_grammars_are_compiled_once(compiler):
    futures = [compiler.submit(Params(json=CLOSED, whitespace_pattern="[ ]{0,2}"), STOPS) for _ in range(5)]
    assert len({id(future.result(TIMEOUT)) for future in futures}) == 1
    assert len({id(future) for future in futures}) == 5
    same = compiled(compiler, json=CLOSED, whitespace_pattern="[ ]{0,2}")
    assert same is futures[0].result()
    assert compiled(compiler, frozenset({EOS, 310}), json=CLOSED, whitespace_pattern="[ ]{0,2}") is not same


def test_to_cancel_concerns_nobody_else(compiler):
    one, other = (compiler.submit(Params(regex="cancel|me"), STOPS) for _ in range(2))
    one.cancel()
    assert isinstance(other.result(TIMEOUT), TokenTable)


def test_the_cache_is_bounded():
    config = StructuredOutputsConfig(cache_size=2)
    compiler = GrammarCompiler(small_vocabulary(), 320, config)
    try:
        first = compiled(compiler, regex="a")
        compiled(compiler, regex="b")
        assert compiled(compiler, regex="a") is first
        compiled(compiler, regex="c")  # the least recently used, b, goes
        assert compiled(compiler, regex="a") is first
        assert len(compiler._kept._futures) == 2
    finally:
        compiler.shutdown()


def test_a_killed_worker_is_replaced():
    worker = TableWorker(small_vocabulary(), GrammarLimits(), TIMEOUT)
    try:
        assert worker.compile(Params(regex="a").key(), STOPS).num_states
        before = worker.pid
        os.kill(before, signal.SIGKILL)
        try:
            table = worker.compile(Params(regex="a").key(), STOPS)
        except NoTableError:  # where it was not dead yet when it was asked
            table = worker.compile(Params(regex="a").key(), STOPS)
        assert table.num_states
        assert worker.pid != before
    finally:
        worker.close()


def test_a_worker_killed_at_work_leaves_the_grammar_to_a_matcher():
    limits = GrammarLimits(max_seconds=60, max_raw_states=1 << 22)
    compiler = GrammarCompiler(small_vocabulary(), 320, StructuredOutputsConfig(limits=limits))
    try:
        compiled(compiler, regex="warm")
        future = compiler.submit(Params(regex=SLOW), STOPS)
        (worker,) = compiler._workers
        threading.Timer(0.5, lambda: os.kill(worker.pid, signal.SIGKILL)).start()
        assert isinstance(future.result(TIMEOUT), MatcherGrammar)
        assert isinstance(compiled(compiler, regex="next"), TokenTable)
    finally:
        compiler.shutdown()


@pytest.mark.parametrize(
    ("limits", "timeout", "why"),
    [
        ({"max_seconds": 0.3}, TIMEOUT, "CPU time"),
        ({"max_seconds": 60}, 0.5, "took longer than 0.5 s"),
        ({"max_seconds": 60, "max_bytes": 1 << 20}, TIMEOUT, "Memory|ended the process"),
    ],
)
def test_limits_of_a_worker(limits, timeout, why):
    worker = TableWorker(small_vocabulary(), GrammarLimits(max_raw_states=1 << 22, **limits), timeout)
    try:
        with pytest.raises(NoTableError, match=why):
            worker.compile(Params(regex=SLOW).key(), STOPS)
        assert worker.compile(Params(regex="a").key(), STOPS).num_states
    finally:
        worker.close()


def test_after_shutdown_everything_fails_at_once():
    compiler = GrammarCompiler(small_vocabulary(), 320)
    compiled(compiler, regex="a")
    (worker,) = compiler._workers
    compiler.shutdown()
    assert worker.pid is None
    with pytest.raises(GrammarError, match="shut down"):
        compiled(compiler, regex="b")


def test_an_engine_of_tables_only_says_so_at_once():
    compiler = GrammarCompiler(small_vocabulary(), 320, StructuredOutputsConfig(backend="table"))
    with pytest.raises(ValueError, match="tables only"):
        compiler.validate(Params(json_object=True))
    compiler.shutdown()


def test_bad_grammars_are_refused_at_once(compiler):
    for text, why in {'root ::= "a" other': "other", "rule ::= 'a'": "understood", 'a ::= "b"': "root"}.items():
        with pytest.raises(ValueError, match=why):
            compiler.validate(Params(grammar=text))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"backend": "xgrammar"}, "backend"), ({"num_workers": 0}, "num_workers"), ({"cache_size": True}, "cache_size"),
        ({"compile_timeout": 0}, "compile_timeout"), ({"limits": 3}, "limits"), ({"nothing": 1}, "nothing"),
        ({"limits": {"nothing": 1}}, "nothing"), ({"limits": {"max_masks": 0}}, "max_masks"),
        ({"matcher_limits": {"step_max_items": 0}}, "step_max_items"), ({"num_forced_tokens": -1}, "num_forced_tokens"),
    ],
)  # fmt: skip
def test_configuration_names_the_field(fields, name):
    with pytest.raises(ValueError, match=name):
        StructuredOutputsConfig.from_dict(fields)


def test_configuration_from_dicts():
    config = StructuredOutputsConfig.from_dict({"limits": {"max_masks": 9}, "matcher_limits": {"step_max_items": 8}})
    assert config.limits == GrammarLimits(max_masks=9)
    assert config.matcher_limits == MatcherLimits(step_max_items=8)
