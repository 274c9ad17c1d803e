"""Pages of docs/ list what the code has: metrics, environment variables, routes and their fields, messages, reasons."""

from __future__ import annotations

import ast
import functools
import json
import os
import pathlib
import re
import types

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vlcache_jax import CacheConfig
from vlcache_jax.cache.lookups import CacheStats, Event, Meter, TierStats
from vlcache_jax.cache.record import Why
from vlcache_jax.engine.completions import RequestMetrics
from vlcache_jax.engine.engine import EngineStats
from vlcache_jax.protocol.answers import Counts
from vlcache_jax.protocol.anthropic_requests import ABSENT_IN_MESSAGES
from vlcache_jax.protocol.responses import ABSENT_IN_RESPONSES
from vlcache_jax.protocol.retrieval import ABSENT_IN_EMBEDDINGS, ABSENT_IN_RERANK, ABSENT_IN_SCORE
from vlcache_jax.protocol.schema import ABSENT_IN_CHAT, ABSENT_IN_TEXT
from vlcache_jax.server.metrics import ServerMetrics
from vlcache_jax.server.openapi import document

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vlcache_jax"
TROUBLE = "guides/troubleshooting.md"


def tables(page):
    """The rows of all tables of a page, each as a dict from column to cell without marks of code."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = (re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines())
        for row in rows:
            yield {name.strip(): cell.strip() for name, cell in zip(head, row, strict=True)}


def codes(cell):
    return re.findall(r"`([^`]+)`", cell)


def metrics():
    """Type and labels by name of all metrics of a server with compression and a disk that has answered a request."""
    stats = types.SimpleNamespace(**dict.fromkeys(EngineStats.__dataclass_fields__, 1))
    meter = Meter()
    meter.also(lambda: CacheStats(whys={"evicted": 1}, tiers={"disk": TierStats()}))
    for event in Event.__args__:
        meter.count("disk", event)
    meter.move("disk", "in", 1)
    with meter.timing("disk", "read"):
        pass
    cache = types.SimpleNamespace(registry=meter.registry, stats=CacheStats)
    config = types.SimpleNamespace(cache=CacheConfig(), enable_prefix_caching=True)
    service = types.SimpleNamespace(
        config=config, device=types.SimpleNamespace(runner=types.SimpleNamespace(dtype="float32"))
    )
    engine = types.SimpleNamespace(stats=lambda: stats, cache=cache, service=service)
    room = types.SimpleNamespace(coming=0, nbytes=0)
    server = ServerMetrics("m", engine, room, types.SimpleNamespace(counts=lambda: (0, 0)))
    server.answered(Counts(1, 1, 1, 1, 1), RequestMetrics())
    server.ended("stop")
    found = {}
    for family in text_string_to_metric_families(server.page().decode()):
        if not family.name.endswith("_created"):
            suffix = "_total" if family.type == "counter" else ""
            found[family.name + suffix] = family.type, {name for one in family.samples for name in one.labels} - {"le"}
    return found


def test_the_metrics_are_those_that_the_server_exports():
    listed = {}
    for row in tables("reference/metrics.md"):
        if "metric" in row:
            [name] = codes(row["metric"])
            own = codes(row["labels"]) if "labels" in row else ["model_name", *codes(row["other labels"])]
            assert row["unit"], name
            assert row["meaning"], name
            listed[name] = row["type"], set(own)
    assert listed == metrics()
    events = [
        name for row in tables("reference/metrics.md") if "event" not in row for name in codes(row.get("`event`", ""))
    ]
    assert sorted(events) == sorted(Event.__args__)


@functools.cache
def trees():
    """The package's modules, without benchmarks, which are tools of development."""
    paths = [pathlib.Path(folder, name) for folder, _, files in os.walk(PACKAGE, followlinks=True) for name in files]
    own = [path for path in paths if path.suffix == ".py" and path.relative_to(PACKAGE).parts[0] != "benchmarks"]
    return [ast.parse(path.read_text(encoding="utf-8")) for path in own]


def read_variables():
    """Variables that the package names: in calls on `os.environ`, as `envvar=`, and all that begin with VLCACHE_."""
    return set().union(*map(_variables, trees()))


def _variables(tree):
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if re.fullmatch(r"VLCACHE_\w+", text):
                found.add(text)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ")), args=[first, *_]):
                found |= _names(first)
            case ast.Compare(left=left, comparators=[ast.Attribute(attr="environ")]):
                found |= _names(left)
            case ast.keyword(arg="envvar", value=value):
                found |= _names(value)
    return found


def _names(node):
    """A constant, or a text with parts that are not: the constant part of it."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return {part.value for part in parts if isinstance(part, ast.Constant)}


def test_the_variables_are_those_that_the_package_reads():
    listed = {
        name
        for row in tables("reference/environment_variables.md")
        if "read by" in row or "set by" in row
        for name in codes(row["variable"])
    }
    read = read_variables()
    assert {"VLCACHE_API_KEY", "NPROC", "XDG_CACHE_HOME", "_ALLOW_HTTP"} <= read
    missing = {name for name in read if not any(name in one for one in listed)}
    assert not missing
    unread = {one for one in listed if not any(name in one for name in read) and not one.startswith("XLA_")}
    assert not unread


def schemas():
    return document(["m"])["components"]["schemas"]


def test_every_route_stands_on_the_page():
    listed = {
        (method, path)
        for row in tables("reference/server_api.md")
        if "route" in row and "purpose" in row
        for method, path in (one.split() for one in codes(row["route"]))
    }
    told = {(method.upper(), path) for path, own in document(["m"])["paths"].items() for method in own}
    assert listed == told


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("ChatRequest", "Chat completions"),
        ("CompletionRequest", "Completions"),
        ("ResponseRequest", "Responses"),
        ("MessageRequest", "Anthropic messages"),
        ("CountTokensRequest", "Count tokens"),
        ("EmbeddingRequest", "Embeddings"),
        ("RerankRequest", "Rerank"),
        ("ScoreRequest", "Score"),
        ("TokenizeRequest", "Tokenize and detokenize"),
        ("DetokenizeRequest", "Tokenize and detokenize"),
    ],
)
def test_every_field_stands_in_its_section_or_in_one_that_it_names(name, heading):
    text = (ROOT / "docs" / "reference" / "server_api.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"(?ms)^#{2,3} ([^\n]+)\n(.*?)(?=^#{2,3} |\Z)", text))
    anchors = {title: re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in sections}
    own = sections[heading]
    own += "".join(body for title, body in sections.items() if f"(#{anchors[title]})" in sections[heading])
    missing = [field for field in schemas()[name]["properties"] if f"`{field}`" not in own]
    assert not missing


@pytest.mark.parametrize(
    ("route", "absent"),
    [
        ("chat", ABSENT_IN_CHAT),
        ("completions", ABSENT_IN_TEXT),
        ("responses", ABSENT_IN_RESPONSES),
        ("messages", ABSENT_IN_MESSAGES),
        ("embeddings", ABSENT_IN_EMBEDDINGS),
        ("rerank", ABSENT_IN_RERANK),
        ("score", ABSENT_IN_SCORE),
    ],
)
def test_the_values_that_ask_for_nothing_are_those_that_the_server_takes(route, absent):
    listed = {}
    for row in tables("reference/server_api.md"):
        if "accepted values" in row:
            routes = re.split(r", ", row["routes"].partition(";")[0])
            if route in routes or (routes == ["all"] and route in ("embeddings", "rerank", "score")):
                [name] = codes(row["field"])
                listed[name] = [json.loads(one) for one in codes(row["accepted values"])]
    assert listed == {name: [one for one in values if one is not None] for name, values in absent.items()}


def templates():
    """Texts of the package: constants, and the constant parts of those with values in them."""
    for node in (node for tree in trees() for node in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def covered(message, runs):
    """The fraction of a message's words that stand in runs of three words that the package has, too."""
    words = [word for word in plain_words(message) if word != "*"]
    hit = set()
    for i in range(len(words) - 2):
        if tuple(words[i : i + 3]) in runs:
            hit |= {i, i + 1, i + 2}
    return len(hit) / len(words)


def plain_words(text):
    """Words without punctuation; "*" is a value."""
    text = re.sub(r"\.\.\.|'[^'\n]*'|%\w", " * ", text)
    return ["*" if re.search(r"\d", word) else word for word in re.findall(r"[\w*.=-]+", text)]


def test_the_reasons_are_all_that_there_are():
    listed = [name for row in tables(TROUBLE) for name in codes(row.get("`why`", ""))]
    assert sorted(listed) == sorted(why.value for why in Why)


def test_the_messages_in_troubleshooting_are_those_of_the_code():
    text = (ROOT / "docs" / TROUBLE).read_text(encoding="utf-8")
    shown = re.findall(r"(?ms)^```text\n(.*?)^```", text)  # these have names and sizes of a machine
    messages = [one for row in tables(TROUBLE) for one in codes(row.get("message", ""))]
    assert len(messages) > 40
    runs = set()
    for template in templates():
        words = [word for word in plain_words(template) if word != "*"]
        runs |= set(zip(words, words[1:], words[2:], strict=False))
    assert not {one for one in shown if covered(one, runs) < 0.25}
    assert not {one for one in messages if covered(one.removesuffix(": Address already in use"), runs) < 0.885}
