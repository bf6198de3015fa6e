"""The template tree: ids that never change, one tree per severity, a limit per workload."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.drain.templates import UNCLASSIFIED, Change, Template, Templates
from pipeline.settings import Settings

words = st.sampled_from(["open", "close", "user", "<NUM>", "<IP>", "x1", "failed", "to", "disk"])
line = st.lists(words, min_size=1, max_size=6).map(" ".join)
learnt = st.lists(st.tuples(line, st.booleans(), st.sampled_from(["shop", "bank"])), max_size=40)


# (similarity, depth): one whose answers can be foretold, and what is shipped
SHAPES = [(0.5, 5), (Settings().drain_similarity, Settings().drain_depth)]


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
