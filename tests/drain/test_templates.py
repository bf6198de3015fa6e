"""The template tree: ids that never change, one tree per severity, a limit per workload."""

import math
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from drain3.drain import Drain, LogCluster, Node
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.drain.templates import DEPTH, Change, Template, Templates
from pipeline.drain.tree import WILDCARD, Tree
from pipeline.records.verdict import UNCLASSIFIED
from pipeline.settings import Settings

words = st.sampled_from(["open", "close", "user", "<NUM>", "<IP>", "x1", "failed", "to", "disk"])
line = st.lists(words, min_size=1, max_size=6).map(" ".join)
learnt = st.lists(st.tuples(line, st.booleans(), st.sampled_from(["shop", "bank"])), max_size=40)


# (similarity, depth): one whose answers can be foretold, and what is shipped
SHAPES = [(0.5, 5), (Settings().drain.similarity, DEPTH)]


def tree(per_workload: int = 1000, shape: tuple[float, int] = SHAPES[0]) -> Templates:
    return Templates(similarity=shape[0], depth=shape[1], per_workload=per_workload)


def put(templates: Templates, text: str, *, severe: bool = False, workload: str = "shop") -> Template:
    template, _ = templates.learn(text, severe=severe, workload=workload)
    assert template is not None
    return template


def newest(found: Iterable[Template]) -> list[Template]:
    """The last state of every template."""
    return list({t.template_id: t for t in found}.values())


def test_lines_of_one_shape_share_a_template_whose_text_gains_wildcards() -> None:
    templates = tree()
    first, how = templates.learn("session of ann opened", severe=False, workload="shop")
    assert first is not None
    assert (first.template_id, first.text, how) == (1, "session of ann opened", Change.CREATED)
    second, how = templates.learn("session of bob opened", severe=False, workload="bank")
    assert second is not None
    assert (second.template_id, second.text, how) == (1, "session of <*> opened", Change.CHANGED)
    assert second.workload == "shop", "a template belongs to the workload that created it"
    assert templates.learn("session of eve opened", severe=False, workload="shop")[1] is Change.NONE
    assert templates.learn("session of ann opened", severe=False, workload="shop") == (second, Change.NONE)
    assert len(templates) == templates.newest_id == 1


def test_severe_and_plain_lines_never_share_a_template() -> None:
    templates = tree()
    plain, severe = put(templates, "payment <NUM> done"), put(templates, "payment <NUM> done", severe=True)
    assert plain.template_id != severe.template_id
    assert plain.text == severe.text == "payment <NUM> done"
    assert put(templates, "payment <NUM> done").template_id == plain.template_id


@pytest.mark.parametrize(
    ("one", "other"),
    [("connected", "disconnected"), ("<NUM>", "done"), ("task a failed", "task b finished")],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_says_how_grave_a_line_is_does_not_make_two_lines_alike(
    one: str, other: str, shape: tuple[float, int]
) -> None:
    templates = tree(shape=shape)
    assert put(templates, one).template_id != put(templates, other).template_id


def test_a_workload_past_its_limit_gets_no_new_template_but_keeps_the_known_ones() -> None:
    templates = tree(per_workload=2)
    known = put(templates, "a one"), put(templates, "b two")
    assert templates.learn("c three", severe=False, workload="shop") == (None, Change.NONE)
    assert templates.learn("c three", severe=False, workload="shop") == (None, Change.NONE)
    assert (put(templates, "a one"), put(templates, "b two")) == known
    other = put(templates, "c three", workload="bank")
    assert other.template_id == 3
    assert put(templates, "c three").template_id == 3, "another workload's template is a template"
    assert UNCLASSIFIED not in {t.template_id for t in (*known, other)}


def test_the_limit_counts_what_was_restored() -> None:
    templates = tree(per_workload=1)
    templates.restore([Template(template_id=9, text="a one", severe=False, workload="shop")])
    assert templates.learn("b two", severe=False, workload="shop") == (None, Change.NONE)
    assert put(templates, "b two", workload="bank").template_id == 10


def test_skipped_ids_are_never_given() -> None:
    templates = tree()
    templates.skip_ids(40)
    assert put(templates, "a one").template_id == 41
    templates.skip_ids(3)
    assert put(templates, "b two").template_id == 42


@settings(max_examples=60, deadline=None)
@given(learnt, st.sampled_from(SHAPES))
def test_an_id_stays_with_its_template_and_every_line_with_its_id(
    lines: list[tuple[str, bool, str]], shape: tuple[float, int]
) -> None:
    templates = tree(per_workload=5, shape=shape)
    ids: dict[tuple[str, bool], int] = {}
    owner: dict[int, tuple[bool, str]] = {}
    for text, severe, workload in lines:
        template, how = templates.learn(text, severe=severe, workload=workload)
        if template is None:
            continue
        assert ids.setdefault((text, severe), template.template_id) == template.template_id
        assert (how is Change.CREATED) == (template.template_id not in owner)
        assert owner.setdefault(template.template_id, (severe, workload)) == (severe, template.workload)
        assert all(a in (b, "<*>") for a, b in zip(template.text.split(), text.split(), strict=True))
    assert sorted(owner) == list(range(1, templates.newest_id + 1))
    for workload in ("shop", "bank"):
        assert sum(w == workload for _, w in owner.values()) <= 5


@settings(max_examples=60, deadline=None)
@given(learnt, learnt, st.sampled_from(SHAPES))
def test_a_restored_tree_knows_what_the_stored_templates_say(
    lines: list[tuple[str, bool, str]], more: list[tuple[str, bool, str]], shape: tuple[float, int]
) -> None:
    first = tree(shape=shape)
    stored = newest(t for text, severe, w in lines if (t := first.learn(text, severe=severe, workload=w)[0]))
    second, third = tree(shape=shape), tree(shape=shape)
    second.restore(reversed(stored))
    third.restore(stored)
    assert len(second) == len(first)
    assert second.newest_id == first.newest_id
    for text, severe, workload in lines:
        template, how = second.learn(text, severe=severe, workload=workload)
        assert how is not Change.CREATED, "every line still fits a template that it fitted before"
        assert template is not None
        assert third.learn(text, severe=severe, workload=workload) == (template, how)
    for text, severe, workload in more:
        assert second.learn(text, severe=severe, workload=workload) == third.learn(
            text, severe=severe, workload=workload
        )


def test_a_restored_tree_gives_every_line_the_id_it_had() -> None:
    lines = [
        *(f"user {name} logged in from <IP>" for name in ("ann", "bob", "eve")),
        *(f"disk {name} is full" for name in ("sda", "sdb")),
        "started", "stopped", "x1 y", "x2 z",
    ]  # fmt: skip
    first, second = tree(), tree()
    for text in lines:
        for severe in (False, True):
            put(first, text, severe=severe)
    second.restore(newest(put(first, text, severe=s) for text in lines for s in (False, True)))
    for text in lines:
        for severe in (False, True):
            assert put(second, text, severe=severe) == put(first, text, severe=severe)


class Plain(Drain):  # type: ignore[misc] # drain3 publishes no types
    """The tree that every search goes all through: drain3's own, but for the likeness of ours."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, param_str=WILDCARD)

    def fast_match(
        self, cluster_ids: Iterable[int], tokens: Sequence[str], sim_th: float, include_params: bool
    ) -> LogCluster | None:
        assert not include_params
        words = len(tokens) - 1
        found = []
        for cluster_id in cluster_ids:
            cluster = self.id_to_cluster[cluster_id]
            own = cluster.log_template_tokens[1:]
            wild = own.count(WILDCARD)
            equal = sum(a == b != WILDCARD for a, b in zip(own, tokens[1:], strict=True))
            if equal >= math.ceil(sim_th * words):
                found.append((equal, wild, -cluster_id, cluster))
        return max(found)[-1] if found else None


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_a_search_of_many_templates_finds_what_going_through_all_of_them_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr("pipeline.drain.tree._FEW", rng.choice([0, 3, 32]))
    monkeypatch.setattr("pipeline.drain.tree._CELLS", rng.choice([1, 100, 1 << 20]))
    similarity, depth = rng.choice([(0.4, 4), (0.7, 4), (0.7, 6), (1.0, 4)])
    first_words = rng.choice([2, 150, 400])  # more than 200 go into one leaf
    words = rng.choice([3, 20, 400])

    def text() -> str:
        chosen = [_word(rng.randrange(words)) for _ in range(rng.choice([2, 7, 8]))]
        return " ".join([_word(rng.randrange(first_words)), *chosen, WILDCARD][: 8 + seed % 2])

    def grown(make: Callable[..., Any]) -> Templates:
        with monkeypatch.context() as patched:
            patched.setattr("pipeline.drain.templates.Tree", make)
            return Templates(similarity=similarity, depth=depth, per_workload=10_000)

    ours, plain = grown(Tree), grown(Plain)
    seen: set[int] = set()
    for _ in range(1_500):
        line, severe = text(), rng.random() < 0.1
        workload = rng.choice(["shop", "bank", "far"])
        answer = ours.place(line, severe=severe, workload=workload)
        assert answer == plain.place(line, severe=severe, workload=workload)
        other = text()
        assert ours.match(other, severe=severe) == plain.match(other, severe=severe)
        seen.add(answer[0])
    assert [ours.template(i) for i in sorted(seen)] == [plain.template(i) for i in sorted(seen)]
    assert _shape(ours) == _shape(plain)


def _word(number: int) -> str:
    """Letters for most numbers; a digit stays in some, which drain3 takes for a parameter in front."""
    return (
        f"x{number}"
        if number % 7 == 0
        else f"{number:03}".translate(str.maketrans("0123456789", "abcdefghij"))
    )


def _shape(templates: Templates) -> dict[str, Any]:
    def below(node: Node) -> dict[str, Any]:
        return {"ids": list(node.cluster_ids)} | {k: below(n) for k, n in node.key_to_child_node.items()}

    return below(templates._drain.root_node)


@pytest.mark.long
def test_twenty_thousand_templates_of_one_leaf_are_put_there_and_searched_in_time() -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=9)) for _ in range(5_000)]
    stored = [
        Template(template_id=i, text=" ".join(rng.choices(words, k=10)), severe=False, workload="shop")
        for i in range(1, 20_001)
    ]
    templates = tree(per_workload=10, shape=SHAPES[1])
    began = time.process_time()
    templates.restore(stored)
    found = [templates.match(template.text, severe=False) for template in stored[:2_000]]
    spent = time.process_time() - began
    assert found == [template.template_id for template in stored[:2_000]]
    assert spent < 5, "one by one these searches take 16 s, and as long again to put them there"


def test_exact_repeats_of_long_lines_are_found_without_keeping_the_lines() -> None:
    templates = tree(per_workload=1)
    put(templates, "one " + "x" * 200)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for n in range(200):
        templates.place(f"one {n:05}" + "x" * 20_000, severe=False, workload="shop")
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept < 200 * 1_000
    assert templates.place("one 00007" + "x" * 20_000, severe=False, workload="shop")[1] is Change.NONE
