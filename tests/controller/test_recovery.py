"""A Redis that comes up empty gets back what the store has, and says what is lost."""

from datetime import timedelta

import pytest
import redis

from pipeline.controller.recovery import copy_decisions, enter
from pipeline.controller.watchlist import Watchlist
from pipeline.drain.journal import Journal, Kept
from pipeline.drain.learner import read_templates
from pipeline.drain.templates import Template, pack_template
from pipeline.errors import StoreUnavailable
from pipeline.marks.marks import State, Target
from pipeline.marks.store import Marks
from pipeline.observe.losses import recent_loss
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.store.choose import open_store
from pipeline.store.objects import Objects


@pytest.fixture
def objects(settings: Settings) -> Objects:
    return open_store(settings.data.store)


def worked(client: "redis.Redis", settings: Settings, objects: Objects) -> None:
    """A pipeline that has learnt a template, and whose operators have decided something."""
    enter(client, settings, objects, "one")
    template = Template(template_id=1, text="job <*> done", severe=False, workload="shop")
    Journal(objects).append({1: Kept(pack_template(template), "shop")})
    Marks(client, settings).put(
        Target.template(1), State.NORMAL, text="job one done", lasts=timedelta(days=1)
    )
    Watchlist(client, settings).add("shop")
    copy_decisions(client, settings, objects)


def emptied(client: "redis.Redis", settings: Settings) -> None:
    client.delete(*client.scan_iter(f"{Keys(settings.redis.key_prefix)('')}*"))


def test_templates_marks_and_the_watchlist_come_back(
    client: "redis.Redis", settings: Settings, objects: Objects
) -> None:
    worked(client, settings, objects)
    marks = Marks(client, settings)
    before = marks.look()
    emptied(client, settings)
    assert not marks.normal([1], "shop")
    for _ in range(2):  # two machines that come up, or one that was interrupted
        enter(client, settings, objects, "one")
    assert [t.text for t in read_templates(client, marks.keys)] == ["job <*> done"]
    assert marks.look().marks == before.marks
    assert marks.normal([1], "shop") == {1}, "a process that knew the empty list reads the marks again"
    assert Watchlist(client, settings).look().patterns == ("shop",)


def test_the_loss_says_what_came_back_and_what_did_not(
    client: "redis.Redis", settings: Settings, objects: Objects
) -> None:
    worked(client, settings, objects)
    assert recent_loss(client, settings) is None
    emptied(client, settings)
    enter(client, settings, objects, "one")
    loss = recent_loss(client, settings)
    assert loss is not None
    assert "1 template, 1 mark, 1 watched name came back" in loss.sentence
    assert "incidents" in loss.sentence and "models promote" in loss.sentence


def test_a_first_start_on_an_empty_store_is_no_loss(
    client: "redis.Redis", settings: Settings, objects: Objects
) -> None:
    enter(client, settings, objects, "one")
    copy_decisions(client, settings, objects)
    emptied(client, settings)
    enter(client, settings, objects, "one")
    assert recent_loss(client, settings) is None


def test_an_empty_redis_does_not_replace_the_copy(
    client: "redis.Redis", settings: Settings, objects: Objects
) -> None:
    worked(client, settings, objects)
    emptied(client, settings)
    copy_decisions(client, settings, objects)
    enter(client, settings, objects, "one")
    assert len(Marks(client, settings).look().marks) == 1


def test_a_decision_that_was_taken_back_does_not_return(
    client: "redis.Redis", settings: Settings, objects: Objects
) -> None:
    worked(client, settings, objects)
    Marks(client, settings).revoke([Target.template(1)])
    copy_decisions(client, settings, objects)
    emptied(client, settings)
    enter(client, settings, objects, "one")
    assert not Marks(client, settings).look().marks


def test_what_was_decided_since_the_loss_stays(
    client: "redis.Redis", settings: Settings, objects: Objects
) -> None:
    worked(client, settings, objects)
    emptied(client, settings)
    marks = Marks(client, settings)
    marks.put(Target.template(1), State.ANOMALOUS, text="job one done", by="later")
    assert not marks.normal([1], "shop")
    enter(client, settings, objects, "one")
    assert [mark.by for mark in marks.look().marks] == ["later"]
    assert Watchlist(client, settings).look().patterns == ("shop",)


def test_a_damaged_copy_is_a_fault_of_the_store_and_names_it(
    client: "redis.Redis", settings: Settings, objects: Objects
) -> None:
    worked(client, settings, objects)
    emptied(client, settings)
    objects.put("decisions/copy", b"damaged")
    with pytest.raises(StoreUnavailable, match="decisions/copy"):
        enter(client, settings, objects, "one")
    assert not client.exists(Keys(settings.redis.key_prefix).store), "the recovery begins again"
