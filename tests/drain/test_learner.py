"""The single writer of the template tree: fenced, and never wiser than Redis."""

import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import redis

from pipeline.drain.journal import Journal, Kept
from pipeline.drain.learner import Learner, read_templates
from pipeline.drain.templates import Template, pack_template, unpack_template
from pipeline.drain.verdicts import Verdicts
from pipeline.errors import BadPayload, LeaseRefused, RedisUnavailable, StoreUnavailable, TooNew
from pipeline.records.verdict import UNCLASSIFIED, Verdict
from pipeline.redis.keys import Keys
from pipeline.redis.leases import DRAIN, Leases, granted
from pipeline.settings import Settings
from pipeline.store.choose import open_store


def judge(row: Mapping[str, Any], template_id: int) -> Verdict:
    return Verdict(template_id=template_id, score=0.1, anomalous=False, reasons=())


class Process:
    """A drain worker: its own connection state, tree and near cache."""

    def __init__(self, client: "redis.Redis", settings: Settings, name: str) -> None:
        self.leases, self.name = Leases(client, settings), name
        self.verdicts = Verdicts(client, settings)
        self.learner = Learner(client, settings, self.verdicts)

    def lease(self) -> int:
        return granted(self.leases.request(DRAIN, self.name), DRAIN).token

    def learn(
        self, *lines: str, token: int | None = None, workload: str = "shop", judge: Any = judge
    ) -> list[int]:
        rows = [{"key": hash_of(text), "masked": text, "severe": False} for text in lines]
        token = self.lease() if token is None else token
        answers = self.learner.learn(rows, version="m1", workload=workload, token=token, judge=judge)
        assert set(answers) == {row["key"] for row in rows}
        return [answers[row["key"]].template_id for row in rows]


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode()[:8].ljust(8), "little")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """With a tree whose answers can be foretold, whatever the defaults are."""
    return settings.replace(drain_similarity=0.5)


def expire(process: Process) -> None:
    process.leases.client.hset(process.leases.keys.lease(DRAIN), "deadline", 1)


@pytest.fixture
def first(client: "redis.Redis", settings: Settings) -> Process:
    return Process(client, settings, "first")


@pytest.fixture
def second(client: "redis.Redis", settings: Settings) -> Process:
    return Process(client, settings, "second")


def stored(process: Process) -> dict[int, str]:
    return {t.template_id: t.text for t in read_templates(process.leases.client, process.leases.keys)}


def test_what_is_learnt_is_stored_with_its_answers(first: Process) -> None:
    assert first.learn("job one done", "job two done", "alpha") == [1, 1, 2]
    assert stored(first) == {1: "job <*> done", 2: "alpha"}
    assert first.learn("alpha", "beta") == [2, 3]
    counts: Any = first.leases.client.hgetall(first.leases.keys.template_counts)
    assert counts == {b"shop": b"3"}
    assert set(first.verdicts.lookup("m1", [hash_of("alpha"), hash_of("beta")])) == {
        hash_of("alpha"),
        hash_of("beta"),
    }


def test_whoever_takes_over_knows_everything_and_the_one_before_can_write_nothing(
    first: Process, second: Process
) -> None:
    stale = first.lease()
    first.learn("job one done", "alpha", token=stale)
    expire(first)
    assert second.learn("job two done", "alpha", "beta") == [1, 2, 3]
    before = stored(second)
    with pytest.raises(LeaseRefused, match="taken over"):
        first.learn("gamma", token=stale)
    assert stored(second) == before
    assert second.verdicts.lookup("m1", [hash_of("gamma")]) == {}
    expire(second)
    assert first.learn("gamma", "beta", "job x done") == [4, 3, 1], "it reads back what the other one learnt"
    assert stored(first) == {1: "job <*> done", 2: "alpha", 3: "beta", 4: "gamma"}


def test_an_id_keeps_its_words_when_redis_loses_its_last_second(first: Process) -> None:
    token = first.lease()
    assert first.learn("alpha", "beta", "gamma", token=token) == [1, 2, 3]
    assert first.learn("job one done", token=token) == [4]
    keys = first.leases.keys
    before = first.leases.client.dump(keys.templates), first.leases.client.dump(keys.templates_journal)
    assert first.learn("job two done", "delta", token=token) == [4, 5]
    for key, content in zip((keys.templates, keys.templates_journal), before, strict=True):
        first.leases.client.restore(key, 0, content or b"", replace=True)
    assert first.learn("epsilon", "delta", token=token) == [6, 5]
    assert stored(first)[4] == "job <*> done"
    assert stored(first)[5] == "delta"


def test_an_empty_redis_gets_every_template_back(first: Process, second: Process) -> None:
    """A new REDIS_URL, a lost volume, FLUSHALL while the learner works: ids go on above the store's."""
    token = first.lease()
    first.learn("job one done", "job two done", "alpha", token=token)
    before = stored(first)
    keys = first.leases.keys
    first.leases.client.delete(keys.templates, keys.template_counts, keys.templates_journal)
    assert first.learn("beta", "alpha", token=token) == [3, 2], "the same process, the same token"
    assert stored(first) == {**before, 3: "beta"}
    first.leases.client.delete(keys.templates, keys.template_counts, keys.templates_journal)
    expire(first)
    assert second.learn("gamma", "beta", "job x done") == [4, 3, 1], "another process"
    assert stored(second) == {**before, 3: "beta", 4: "gamma"}
    counts: Any = first.leases.client.hgetall(keys.template_counts)
    assert counts == {b"shop": b"4"}


def test_an_empty_journal_is_filled_from_redis(first: Process, second: Process) -> None:
    """A new store that an operator has adopted, or one whose disk was replaced."""
    first.learn("job one done", "job two done", "alpha")
    shutil.rmtree(first.learner.settings.data.dir / "templates")
    expire(first)
    assert second.learn("beta") == [3]
    assert {i: unpack_template(i, one.packed).text for i, one in second.learner.journal.read().items()} == {
        1: "job <*> done", 2: "alpha", 3: "beta",
    }  # fmt: skip


def test_an_older_journal_does_not_undo_what_redis_has_learnt(first: Process, second: Process) -> None:
    """A backup of the store is restored beside a Redis that lived on."""
    folder = first.learner.settings.data.dir / "templates"
    first.learn("job one done")
    shutil.copytree(folder, folder.with_name("backup"))
    first.learn("job two done", "alpha")
    shutil.rmtree(folder)
    folder.with_name("backup").rename(folder)
    expire(first)
    assert second.learn("beta") == [3]
    assert stored(second) == {1: "job <*> done", 2: "alpha", 3: "beta"}


def test_lines_of_known_templates_cost_no_write_to_the_store(
    first: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.learn("alpha", "beta")
    written: list[object] = []
    monkeypatch.setattr(first.learner.journal, "append", written.append)
    assert first.learn("beta", "alpha") == [2, 1]
    assert not written


def test_a_store_that_is_away_names_no_template_in_redis(
    first: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.learn("alpha")

    def away(*_: object) -> bool:
        raise StoreUnavailable("the disk is away")

    with monkeypatch.context() as patch:
        patch.setattr(first.learner.journal.objects, "create", away)
        with pytest.raises(StoreUnavailable):
            first.learn("beta")
    assert stored(first) == {1: "alpha"}
    assert first.learn("gamma") == [2]


class Lost(Exception):
    """The judge of a test fails."""


@pytest.mark.parametrize("fault", ["redis", "judge"])
def test_what_was_not_written_is_not_known_either(
    first: Process, second: Process, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    token = first.lease()
    first.learn("alpha", token=token)

    def fails(*_: object, **__: object) -> Any:
        raise RedisUnavailable("away") if fault == "redis" else Lost

    with monkeypatch.context() as patch:
        if fault == "redis":
            patch.setattr(first.verdicts, "learn", fails)
        with pytest.raises(RedisUnavailable if fault == "redis" else Lost):
            first.learn("beta", token=token, judge=judge if fault == "redis" else fails)
    (given,) = first.learn("beta", token=token)
    assert stored(first)[given] == "beta", "an id that is given out is stored"
    expire(first)
    assert second.learn("beta", "gamma")[0] == given


def test_an_id_that_was_given_meanwhile_is_given_to_no_other_template(
    first: Process, settings: Settings
) -> None:
    (newest,) = first.learn("alpha beta gamma delta")
    foreign = Template(template_id=newest + 1, text="zulu yankee xray", severe=False, workload="elsewhere")
    other = Journal(open_store(settings.data.store))  # of a learner that ours has overtaken
    other.read()
    other.append({newest + 1: Kept(pack_template(foreign), "elsewhere")})
    keys = Keys(settings.redis.key_prefix)
    first.leases.client.hset(keys.templates, str(newest + 1), pack_template(foreign))
    with pytest.raises(LeaseRefused):
        first.learn("one two three four five")
    assert first.learn("one two three four five") == [newest + 2]
    assert stored(first)[newest + 1] == "zulu yankee xray"


def test_past_its_limit_a_workload_is_unclassified_and_others_go_on(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.drain.learner.PER_WORKLOAD", 2)
    process = Process(client, settings, "p")
    assert process.learn("alpha", "beta", "gamma") == [1, 2, UNCLASSIFIED]
    assert process.learn("gamma", workload="bank") == [3]
    assert len(stored(process)) == 3


def test_a_stored_template_comes_back_unchanged() -> None:
    template = Template(template_id=3, text="a <*> ü", severe=True, workload="shop/x")
    assert unpack_template(3, pack_template(template)) == template


@pytest.mark.parametrize(
    "blob",
    [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x92\x01\x93\xa1a\x05\xa1w", b"\x92\x63\x93\xa1a\xc2\xa1w"],
    ids=repr,
)
def test_a_template_that_cannot_be_read_is_named(
    client: "redis.Redis", settings: Settings, blob: bytes
) -> None:
    keys = Keys(settings.redis.key_prefix)
    client.hset(keys.templates, "7", blob)
    newer = b"\x63" in blob  # wire version 99: its own build reads it, whatever its form is by then
    with pytest.raises(TooNew if newer else BadPayload, match="template 7"):
        read_templates(client, keys)


def test_a_redis_that_is_away_is_said_so(settings: Settings) -> None:
    client = redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None)
    learner = Learner(client, settings, Verdicts(client, settings))
    with pytest.raises(RedisUnavailable, match="does not answer"):
        learner.learn([], version="m1", workload="shop", token=1, judge=judge)
