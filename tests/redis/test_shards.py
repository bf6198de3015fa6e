"""Several writers of templates side by side: each learns its workloads, gives its own ids, and knows what the
others know."""

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import redis

from pipeline.drain.learner import Learner, read_templates
from pipeline.drain.templates import Template, pack_template
from pipeline.drain.verdicts import Verdicts
from pipeline.errors import BadSetting, LeaseRefused
from pipeline.records.verdict import Verdict
from pipeline.redis.keys import Keys
from pipeline.redis.leases import DRAIN, Leases, granted
from pipeline.redis.shards import IDS, ids_of, of_shard, shard_named, shard_of
from pipeline.settings import MAX_SHARDS, Settings
from pipeline.workers.roles import placed


def of(shard: int, shards: int, n: int = 0) -> str:
    """The n-th workload of a shard."""
    return [w for i in range(2_000) if shard_of(w := f"shop/app{i}", shards) == shard][n]


# ---- names and numbers -------------------------------------------------------------------------------


def test_a_workload_is_of_the_same_shard_in_every_process_and_build() -> None:
    assert [shard_of(name, 4) for name in ("shop", "bank", "prod/own/x", "", "größe", "\ud800")] == [
        2, 2, 3, 0, 1, 0,
    ]  # fmt: skip
    assert {shard_of(name, 1) for name in ("shop", "bank", "")} == {0}


def test_workloads_are_spread_evenly() -> None:
    for shards in (2, 3, 4, 16):
        found = Counter(shard_of(f"cluster-1/shop/service-{i}", shards) for i in range(shards * 200))
        assert set(found) == set(range(shards))
        assert max(found.values()) < 280


def test_a_shard_is_read_back_from_its_name_and_from_no_other() -> None:
    for shard in range(MAX_SHARDS):
        assert shard_named(of_shard("drain", shard), "drain") == shard
    for text in (
        "drain.0",
        "drain.01",
        "drain.64",
        "drain.999",
        "drain.",
        "drain.x",
        "drains",
        "drain.²",
        "store",
        "",
    ):
        assert shard_named(text, "drain") is None, text


def test_no_two_shards_give_the_same_id_and_every_reader_can_hold_them() -> None:
    every = [ids_of(shard) for shard in range(MAX_SHARDS)]
    assert every[0].start == 1, "0 is unclassified"
    for before, after in itertools.pairwise(every):
        assert before.stop <= after.start
    assert every[-1].stop < 2**53, "JSON readers have floats"


def test_a_worker_is_told_its_shard_by_its_role(settings: Settings) -> None:
    three = settings.replace(drain_shards=3)
    assert [placed(text, three) for text in ("store", "drain", "drain.2")] == [
        ("store", 0),
        ("drain", 0),
        ("drain", 2),
    ]
    for text, why in (
        ("drain.3", "drain_shards = 3"),
        ("drain.0", "not a worker role"),
        ("x", "not a worker role"),
    ):
        with pytest.raises(BadSetting, match=why):
            placed(text, three)


# ---- learning ----------------------------------------------------------------------------------------


def judge(row: Mapping[str, Any], template_id: int) -> Verdict:
    return Verdict(template_id=template_id, score=0.1, anomalous=False, reasons=())


def key_of(text: str) -> int:
    return hash(text) & (2**63 - 1)


class Writer:
    """A drain process of one shard."""

    def __init__(self, client: "redis.Redis", settings: Settings, shard: int = 0) -> None:
        self.leases, self.shard = Leases(client, settings), shard
        self.settings = settings
        self.verdicts = Verdicts(client, settings)
        self.learner = Learner(client, settings, self.verdicts, shard=shard)

    def lease(self) -> int:
        resource = of_shard(DRAIN, self.shard)
        return granted(self.leases.request(resource, f"w{id(self)}"), resource).token

    def learn(self, *lines: str, workload: str = "", token: int | None = None) -> list[int]:
        workload = workload or of(self.shard, self.settings.drain.shards)
        rows = [{"key": key_of(text), "masked": text, "severe": False} for text in lines]
        answers = self.learner.learn(
            rows,
            version="m1",
            workload=workload,
            token=self.lease() if token is None else token,
            judge=judge,
        )
        return [answers[row["key"]].template_id for row in rows]

    def end(self) -> None:
        self.leases.client.delete(self.leases.keys.lease(of_shard(DRAIN, self.shard)))


@pytest.fixture
def two(settings: Settings) -> Settings:
    """Two shards, and a tree whose answers can be foretold."""
    return settings.replace(drain_shards=2, drain_similarity=0.5)


def texts(client: "redis.Redis", settings: Settings) -> dict[int, str]:
    return {t.template_id: t.text for t in read_templates(client, Keys(settings.redis.key_prefix))}


def test_each_shard_gives_ids_of_its_own(client: "redis.Redis", two: Settings) -> None:
    first, second = Writer(client, two), Writer(client, two, 1)
    assert first.learn("alpha", "beta") == [1, 2]
    assert second.learn("gamma", "delta") == [IDS + 1, IDS + 2]
    assert first.learn("epsilon") == [3]
    assert second.learner.newest_id == IDS + 2
    second.end()
    again = Writer(client, two, 1)
    assert again.learn("zeta", "gamma") == [IDS + 3, IDS + 1]
    assert len(texts(client, two)) == 6


def test_a_line_that_one_shard_knows_has_its_id_in_all_of_them(client: "redis.Redis", two: Settings) -> None:
    """Under a new model the cache is empty, and whichever shard meets a line first answers it for all
    workloads."""
    first, second = Writer(client, two), Writer(client, two, 1)
    assert second.learn("gamma") == [IDS + 1], "it has read everything that there is"
    assert first.learn("job one done", "job two done", "alpha") == [1, 1, 2]
    assert second.learn("job one done", "job six done", "alpha") == [1, 1, 2]
    counts: Any = client.hgetall(Keys(two.redis.key_prefix).template_counts)
    assert counts == {of(0, 2).encode(): b"2", of(1, 2).encode(): b"1"}


def test_a_shard_never_widens_what_is_of_another_one(client: "redis.Redis", two: Settings) -> None:
    first, second = Writer(client, two), Writer(client, two, 1)
    second.learn("gamma")
    assert first.learn("job one done") == [1]
    assert second.learn("job two done") == [IDS + 2], "it is alike, but not covered"
    assert second.learn("job six done") == [IDS + 2]
    assert texts(client, two) == {1: "job one done", IDS + 1: "gamma", IDS + 2: "job <*> done"}
    assert first.learn("job ten done") == [IDS + 2], "and the other way round"
    assert first.learn("job one done") == [1]


def test_a_template_that_another_shard_has_made_for_ours_is_ours_to_widen(
    client: "redis.Redis", settings: Settings
) -> None:
    # A batch that was handed to the wrong one: Redis was away when its shard was asked for.
    two = settings.replace(drain_shards=2, drain_similarity=0.5)
    first, second = Writer(client, two), Writer(client, two, 1)
    ours = of(1, 2)
    (template,) = first.learn("job one ran on alpha", workload=ours)
    assert second.learn("job two ran on alpha", workload=ours) == [template]
    assert texts(client, two)[template] == "job <*> ran on alpha"
    assert first.learn("job one ran on beta") != [template]
    assert texts(client, two)[template] == "job <*> ran on alpha"


def test_an_id_that_was_given_meanwhile_is_given_to_no_other_template(
    client: "redis.Redis", two: Settings
) -> None:
    # A writer of a build that knew no shards counts from the highest id there is.
    writer = Writer(client, two)
    (newest,) = writer.learn("alpha beta gamma delta")
    foreign = Template(template_id=newest + 1, text="zulu yankee xray", severe=False, workload="elsewhere")
    client.hset(Keys(two.redis.key_prefix).templates, str(newest + 1), pack_template(foreign))
    with pytest.raises(LeaseRefused):
        writer.learn("one two three four five")
    assert writer.learn("one two three four five") == [newest + 2]
    assert texts(client, two)[newest + 1] == "zulu yankee xray"


def test_twins_of_one_moment_are_one_from_the_next_batch_on(client: "redis.Redis", two: Settings) -> None:
    first, second = Writer(client, two), Writer(client, two, 1)
    first.learn("one"), second.learn("two")
    # Neither has seen what the other does: as if both wrote within one batch.
    follow = second.learner._follow
    second.learner._follow = lambda: None  # type: ignore[method-assign]
    assert first.learn("started in time") == [2]
    assert second.learn("started in time") == [IDS + 2]
    second.learner._follow = follow  # type: ignore[method-assign]
    for _ in range(2):
        assert first.learn("started in time") == second.learn("started in time") == [2]
        second.end()
        second = Writer(client, two, 1)


def test_with_one_shard_nobody_is_told_of_changes(client: "redis.Redis", settings: Settings) -> None:
    Writer(client, settings).learn("alpha")
    assert not client.exists(Keys(settings.redis.key_prefix).template_changes)


def test_the_token_of_another_shard_opens_nothing(client: "redis.Redis", two: Settings) -> None:
    first, second = Writer(client, two), Writer(client, two, 1)
    token = first.lease()
    for _ in range(3):  # tokens of the two leases are counted apart; none of these is the one of shard 1
        with pytest.raises(LeaseRefused, match="taken over"):
            second.learn("gamma", token=token + 1)
    second.end()
    with pytest.raises(LeaseRefused, match="taken over"):
        second.learn("gamma", token=token)
    assert texts(client, two) == {}
    assert second.verdicts.lookup("m1", [key_of("gamma")]) == {}
    assert first.learn("alpha", token=token) == [1], "the other shard goes on"


def test_more_or_fewer_shards_change_no_id_and_give_none_twice(
    client: "redis.Redis", settings: Settings
) -> None:
    own = settings.replace(drain_similarity=0.5)
    workloads = [f"shop/app{i}" for i in range(12)]
    given: dict[tuple[str, str], int] = {}
    fresh: set[int] = set()
    for round_, shards in enumerate((1, 3, 2, 64, 1)):
        now = own.replace(drain_shards=shards)
        writers = {shard: Writer(client, now, shard) for shard in range(shards)}
        for workload in workloads:
            writer = writers[shard_of(workload, shards)]
            for (whose, text), before in given.items():
                if whose == workload:
                    assert writer.learn(text, workload=workload) == [before], (shards, workload, text)
            text = "abcdefghijkl"[workloads.index(workload)] * 3 + "pqrst"[round_]
            (new,) = writer.learn(text, workload=workload)
            assert new in ids_of(writer.shard) and new not in fresh
            given[workload, text] = new
            fresh.add(new)
        for writer in writers.values():
            writer.end()
    assert set(texts(client, own)) == fresh
    counts: Any = client.hgetall(Keys(own.redis.key_prefix).template_counts)
    assert counts == {workload.encode(): b"5" for workload in workloads}
