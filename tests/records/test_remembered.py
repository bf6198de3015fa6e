"""Caches of texts that senders write keep short keys only, so that nobody fills the memory of a process."""

import ast
import importlib
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from pipeline.records.remembered import MOST_TEXT, remembered

ROOT = Path(__file__).resolve().parents[2] / "pipeline"
# Caches whose keys no sender writes, and why.
OWN_KEYS = {
    "gpu/leasing/wire.py:_decoded": "texts that scripts of the pool wrote",
    "gpu/leasing/wire.py:_decoder": "our classes",
    "messages/app.py:app_of": "settings of this process",
    "records/traces.py:pattern_of": "kinds of lines that our table names",
    "redis/connection.py:_answering": "classes of clients",
    "redis/scripts.py:script_text": "names of our scripts",
    "settings/listeners.py:_is_loopback": "addresses of the settings",
    "sources/formats.py:_together": "the known formats, and those that the user declared",
    "tasks/frames.py:_loaded": "a folder that the caller's own program names",
    "watching/sessions/joint.py:joint_event": "names of workloads, which have 200 characters at most",
    "workers/api/console/app.py:_packed": "names of our files",
    "workers/api/console/views.py:static_file": "names of our files; others raise",
    "workers/api/console/views.py:static_url": "names of our files",
}
# Caches that are made by hand, or of cachetools without `getsizeof`: why their keys and values are short.
BY_HAND = {
    "drain/templates.py:_exact": "digests and ids",
    "drain/verdicts.py:_local": "versions of models",
    "drain/verdicts.py:local": "ids; a verdict has a few words of 64 characters at most",
    "gpu/policy/node_rooms.py:_shapes": "shapes of devices",
    "gpu/policy/outlook.py:_unusable": "ids of devices",
    "gpu/policy/packing.py:_gpus": "devices of one snapshot",
    "gpu/policy/packing.py:_resolved": "needs of one snapshot",
    "gpu/pool.py:_open": "needs of settings and models",
    "messages/spent.py:_until": "names of our queues, and ids of batches that the filter has checked",
    "sources/pushed.py:_entries": "names of workloads, which have 200 characters at most",
    "tasks/loaded.py:_expected": "versions of models",
    "tasks/loaded.py:_knowledge": "versions of models",
    "tasks/loaded.py:_networks": "versions of models",
    "tasks/loaded.py:_sessions": "versions of models",
    "watching/state.py:_starting": "ids of templates",
    "watching/values/sampling.py:_having": "ids of templates",
    "workers/api/sharing.py:_asked": "questions of at most MOST_QUESTION; an answer goes when it is not fresh",
    "workers/intake/bodies.py:body": "one body, within its share of the bounded memory",
    "workers/intake/small_requests.py:_heads": "heads of at most MOST_HEAD, and addresses, which are cut",
    "workers/serve/desk.py:_wanted": "names of models that are registered",
}
LRU = {"LRUCache", "TTLCache", "LFUCache", "RRCache", "FIFOCache", "TLRUCache"}
MOST_MIB = 64


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def caches_by_hand(tree: ast.Module) -> Iterator[str]:
    """Names of what gives places up when it has too many, and of caches that count their entries alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            by_count = not any(keyword.arg == "getsizeof" for keyword in node.value.keywords)
            if name_of(node.value.func) in LRU and by_count:
                yield name_of(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            oldest = (
                node.func.attr == "pop" and node.args and ast.unparse(node.args[0]).startswith("next(iter(")
            )
            if node.func.attr == "popitem" or oldest:
                yield name_of(node.func.value)
        elif isinstance(node, ast.If):
            for call in (one for part in node.body for one in ast.walk(part)):
                if isinstance(call, ast.Call) and name_of(call.func) == "clear":
                    place = call.func.value  # type: ignore[attr-defined]
                    if f"len({ast.unparse(place)})" in ast.unparse(node.test):
                        yield name_of(place)


def test_every_cache_that_is_made_by_hand_says_why_it_is_small() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{name}"
        for path in ROOT.rglob("*.py")
        for name in caches_by_hand(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(BY_HAND), "bound the bytes of a new cache, and say here by what"


@pytest.mark.parametrize(
    "text",
    [
        "self._seen: LRUCache[str, str] = LRUCache(100)",
        "self._seen.popitem(last=False)",
        "self._seen.pop(next(iter(self._seen)))",
        "if len(self._seen) >= 100:\n    self._seen.clear()",
    ],
)
def test_the_walk_finds_a_new_cache(text: str) -> None:
    assert list(caches_by_hand(ast.parse(text))) == ["_seen"]


def test_the_walk_leaves_a_cache_that_counts_its_bytes() -> None:
    assert not list(caches_by_hand(ast.parse("self._seen = LRUCache(100, getsizeof=len)")))


def plain_caches() -> set[str]:
    """Functions with parameters that functools remembers, in all packages."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and ast.unparse(node.args):
                names = {ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}
                if names & {"cache", "lru_cache"}:
                    found.add(f"{path.relative_to(ROOT)}:{node.name}")
    return found


def remembering() -> dict[str, Any]:
    """The functions of modules that `remembered` decorates."""
    found = {}
    for path in ROOT.rglob("*.py"):
        if "@remembered(" in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
            module = importlib.import_module(name)
            found |= {f"{name}.{key}": one for key, one in vars(module).items()
                      if hasattr(one, "longest") and one.__module__ == name}  # fmt: skip
    return found


def test_no_cache_outside_remembered_has_keys_that_senders_write() -> None:
    assert plain_caches() == set(OWN_KEYS)


def test_a_long_text_is_answered_and_not_kept() -> None:
    asked: list[str] = []

    @remembered(8, 4)
    def answer(text: str) -> int:
        asked.append(text)
        return len(text)

    assert [answer("four"), answer("four"), answer("seven"), answer("seven")] == [4, 4, 5, 5]
    assert asked == ["four", "seven", "seven"]
    assert answer.cache_info().currsize == 1


def test_the_bound_is_one_of_all_texts_of_a_call() -> None:
    @remembered(8, 4)
    def joined(*texts: str) -> str:
        return "".join(texts)

    assert [joined("ab", "cd"), joined("ab", "cde"), joined()] == ["abcd", "abcde", ""]
    assert joined.cache_info().currsize == 2


def test_more_text_than_a_cache_may_hold_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="take fewer"):
        remembered(1_024, MOST_TEXT // 1_024 + 1)


def labels(size: int) -> str:
    return "{" + ",".join(f'a{n:x}=""' for n in range(size // 6))[: size - 2].rpartition(",")[0] + "}"


def resource(size: int) -> bytes:
    attributes = [{"key": f"{n:x}", "value": {"string_value": "a"}} for n in range(size // 12)]
    return Resource(attributes=attributes).SerializeToString()[:size]


def layout(size: int) -> str:
    return "csv:comma:time," + ",".join(f"={n:012x}" for n in range(99))


# Texts with many small parts, whose answers take many times the memory of the text.
WORST: dict[str, Callable[[int], Any]] = {
    "pipeline.sources.protocols.labels.parsed_labels": labels,
    "pipeline.sources.protocols.otlp._facts_of": resource,
    "pipeline.sources.formats_delimited.read_layout": layout,
}


@pytest.mark.parametrize("name", WORST)
def test_answers_to_the_worst_texts_take_little_memory(name: str) -> None:
    module, _, function = name.rpartition(".")
    asked = getattr(importlib.import_module(module), function)
    key = WORST[name](asked.longest)
    assert 0.7 * asked.longest < len(key) <= asked.longest
    asked.__wrapped__(key)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    answers: Sequence[Any] = [asked.__wrapped__(key) for _ in range(10)]
    each = (tracemalloc.get_traced_memory()[0] - before) / len(answers) + len(key)
    tracemalloc.stop()
    assert each * asked.places < MOST_MIB << 20
