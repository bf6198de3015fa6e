"""Pages of the console beyond the first: what they show, to whom, and what their forms change."""

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import unescape
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import polars as pl
import pytest
import redis
from answers_contract import row
from api_process import Console, Form, console
from polling import wait_until
from pool_devices import put_devices
from small_backfills import put_backfills
from small_bundles import ONE, TWO, put

from pipeline.drain.templates import Template, pack_template
from pipeline.errors import AnswerCancelled
from pipeline.gpu.pool import Pool
from pipeline.ledger.ledger import Ledger
from pipeline.marks.marks import State, Target
from pipeline.marks.store import Marks
from pipeline.models.bundle import SEQUENCES
from pipeline.models.registry import Registry
from pipeline.records.delivery import Meta
from pipeline.records.left_out import LeftOut
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.redis.connection import connect, now_ms
from pipeline.redis.keys import Keys
from pipeline.service.access.audit import read_audit
from pipeline.service.access.console_sessions import ConsoleSessions
from pipeline.service.access.keys import SenderKeys
from pipeline.service.access.own_key import make_own_key
from pipeline.service.access.snippets import SNIPPETS
from pipeline.service.senders import SenderCounts, SentBy
from pipeline.service.silences import read_silences
from pipeline.service.values import WorkloadRate
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.watching.incidents.live import IncidentEvent, Incidents
from pipeline.watching.rates.rates import Rates
from pipeline.watching.sessions.model import SessionModel, dump
from pipeline.workers.api.changes import ChangeFeed
from pipeline.workers.api.console.asks import the_news
from pipeline.workers.api.console.rates import PARTS, HeatPart, heat_row
from pipeline.workers.api.console.sending import ORDER
from pipeline.workers.api.console.views import console_templates

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]
MARKUP = "<script>alert(1)</script> \x1b[31mred \u202e"
SHOWN = "&lt;script&gt;alert(1)&lt;/script&gt;"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TOKEN = re.compile(r'name="token" value="([0-9a-f]{32})"')
NOW = datetime.now(UTC).replace(microsecond=0)
LONG_AGO = NOW - timedelta(days=40)
# Spans of a URL that end with the newest line: "30m" would count from the moment of the request, which comes
# much later in a long run.
END, HALF, HOUR = (f"{NOW - timedelta(minutes=ago):%Y-%m-%dT%H:%M:%SZ}" for ago in (0, 30, 60))
HALVES = f"a={HALF}..{END}&b={HOUR}..{HALF}"
LIGHT = 160 * 1024  # bytes of a page without its scripts and styles, which are 36 KB when packed


@dataclass(slots=True)
class Person:
    """Somebody who has signed in."""

    console: Console
    cookie: str

    def see(self, path: str) -> tuple[int, str]:
        status, headers, body = self.console.ask(path, Cookie=self.cookie)
        assert "unsafe" not in headers.get("content-security-policy", "unsafe"), (path, status, body[-2_000:])
        return status, body.decode()

    def page(self, path: str) -> str:
        status, body = self.see(path)
        assert status == 200, (path, status, body[-2_000:])
        return body

    def status_of(self, path: str) -> int:
        return self.console.ask(path, Cookie=self.cookie)[0]

    def token(self) -> str:
        found = TOKEN.search(self.page("/"))
        assert found is not None
        return found[1]

    def do(
        self, path: str, *fields: tuple[str, str], token: str | None = None, **headers: str
    ) -> tuple[int, str, str]:
        """The status, where it leads, and the page."""
        form: Form = [("token", self.token() if token is None else token), *fields]
        origin = {"Origin": f"http://127.0.0.1:{self.console.port}", "Cookie": self.cookie} | headers
        status, answered, body = self.console.ask(path, "POST", form, **origin)
        return status, answered.get("location", ""), body.decode()


@dataclass(slots=True)
class Place:
    """A console over a pipeline that has some of everything."""

    console: Console
    settings: Settings
    client: "redis.Redis"

    def person(self, name: str, *scopes: str, only: tuple[str, ...] = ()) -> Person:
        """Signs in with a new key; without scopes as the machine's own user."""
        if not scopes:
            link = ConsoleSessions(self.client, self.settings).link("")
            _, headers, _ = self.console.ask(link)
        else:
            key = SenderKeys(self.client, self.settings).add(name, scopes=scopes, patterns=only)
            wait_for_ring()
            _, headers, _ = self.console.ask("/in", "POST", {"key": key})
        return Person(self.console, headers["set-cookie"].partition(";")[0])

    def actions(self) -> list[tuple[str, str, str]]:
        """(who, what, of which) of the audit log, the newest first."""
        log = read_audit(self.client, self.settings, limit=100, cursor=None)
        return [(one.by, one.action, one.target) for one in log.entries]


def wait_for_ring() -> None:
    time.sleep(1.1)  # as long as an older ring of keys is taken


@pytest.fixture(scope="module")
def place(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("pages")
    settings = Settings(redis_url=redis_url, key_prefix="tpages", data_dir=folder / "data")
    settings.data.dir.mkdir(parents=True)
    make_own_key(settings.data.dir)
    client = connect(settings)
    _fill(settings, client)
    with console(settings) as found:
        yield Place(found, settings, client)


@pytest.fixture(scope="module")
def local(place: Place) -> Person:
    return place.person("local")


def _fill(settings: Settings, client: "redis.Redis") -> None:
    rows = [
        row(
            n, f"k{n % 3}", timestamp=NOW - timedelta(seconds=2 * n), workload=f"shop/{'web' if n % 2 else 'db'}",
            template_id=1 if n < 900 else 2, message=f"line {n} {MARKUP} trace_id={TRACE if n % 700 == 0 else n}",
            anomalous=n == 7, reasons=["never-said:900 line"] if n == 7 else ["rare:1/9"],
        )
        for n in range(2_500)
    ]  # fmt: skip
    parquet_of(settings).write("older", pl.DataFrame(rows, schema=RESULT_SCHEMA))
    heavy = [
        row(n, "long", timestamp=LONG_AGO, workload=f"heavy/{n % 2}", template_id=1_000 + n, message=f"{n} <b>{'log text ' * 300}")
        for n in range(345)
    ]  # fmt: skip
    parquet_of(settings).write("heavy", pl.DataFrame(heavy, schema=RESULT_SCHEMA))
    state = Incidents()
    at = NOW - timedelta(minutes=5)
    state.add(
        [
            IncidentEvent(
                event_id="1", workload="shop/web", cause="rate-silence:1", kind="rate-silence", first=at, last=at,
                count=5, score=0.9, severity=2, text=f"T1 has stopped {MARKUP}", source="", line=0,
            )
        ]
    )  # fmt: skip
    client.set(Keys(settings.redis.key_prefix).watching("incidents"), state.pack())
    put_devices(Pool(client, settings))
    registry = Registry(client, settings)
    learnt = dump({"shop/db\0trace": SessionModel.fit([(1, 2, 2, 3)] * 60)})
    put(registry, ONE, TWO, workloads=("shop/db",), more={SEQUENCES: learnt})
    for version in (ONE, TWO):
        registry.promote(version, at=NOW)
    rates = Rates()
    for minute in range(61):
        rates.detector.step(NOW.toordinal() * 1_440 + minute, {1: 1}, judged=False)
    client.hset(Keys(settings.redis.key_prefix).watching("rates"), "shop/web", rates.pack())
    counts = SenderCounts()
    counts.heard(SentBy(protocol="bulk", key="", peer="10.0.0.7"), lines=5)
    for peer, lines in (("10.0.0.8", 7), ("10.0.0.9", 0)):
        counts.heard(SentBy(protocol="loki", key="web", peer=peer), lines=lines, refused=not lines)
    counts.heard(SentBy(protocol="loki", key="", peer="10.0.0.10"), lines=9)
    counts.push(client, settings)
    put_backfills(settings, client)
    keys = Ledger(client, settings).keys
    client.sadd(keys.workloads, "sent/now")
    client.hset(keys.totals("sent/now"), mapping={"accepted": 2_000, "stored": 1_500})


def put_dead_batches(place: Place, *ids: str) -> None:
    ledger = Ledger(place.client, place.settings)
    for n, batch_id in enumerate(ids):
        meta = Meta(
            source="a.log", source_key="a", purpose="score", arrived=NOW, formats=(), zone="UTC",  # type: ignore[arg-type]
        )  # fmt: skip
        entry: dict[Any, Any] = {
            "state": "dead", "workload": "shop/web", "lines": 3, "records": 3, "bytes": 0, "kind": "",
            "meta": meta.dump(), "dead_ms": n, "error": MARKUP,
        }  # fmt: skip
        place.client.hset(ledger.keys.batch(batch_id), mapping=entry)
        place.client.zadd(ledger.keys.dead, {batch_id: n})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/", ("Never said before (1)", "line 7 ", "never seen in 900 lines; usually “line”", "/lines/k1-7?at=")),
        ("/compare", ('name="a" value="1h"',)),
        ("/compare?{HALVES}", ("4 patterns compared", "shop/web", "New", "Gone")),
        ("/compare?{HALVES}&workload=shop/web&other=shop/db", ("shop/web", "2 patterns compared")),
        ("/compare?a=2025-01-01..2025-01-02", ("No line lies in A or in B",)),
        ("/rates", ("shop/web", "1,250", "cell", "has stopped")),
        ("/rates?workload=shop/web", ("The course of shop/web", "data-high=", "; usual: ")),
        ("/rates?workload=shop/db", ("The course of shop/db", "No band")),
        ("/rates?since=2025-01-01&until=2025-01-02", ("No line of the last", "show that day")),
        ("/units?by=workload&since={HOUR}&until={END}", ("Which unit is unusual?", "shop/web", "shop/db", "2 units")),
        ("/units?since=2025-01-01&until=2025-01-02", ("No line of this span names a service", "show that day")),
        ("/sessions", ("No odd session", "block ids of HDFS")),
        (f"/sessions?key={TRACE}", ("4 records in 1 workload", "No verdict is stored", TRACE, "nearest normal session of shop/db", "missing", "60 learnt sessions")),
        ("/sessions?key=nothing-has-it", ("No stored record of the last 7d holds",)),
        ("/learning", (TWO, ONE, "Roll back …", "Promote …", "Nothing is watched", "Nothing is marked")),
        (f"/learning/promote?version={ONE}", (f"Make {ONE} live?", "Verdicts that are stored stay", "Why")),
        ("/learning/rollback", (f"Go back to {ONE}?", f"<b>{TWO}</b> answers now")),
        ("/learning/trainings", ('id="trainings"',)),
        ("/pipeline", ('id="senders"', "10.0.0.7", "Heartbeat", "every batch could be processed")),
        ("/pipeline/moving", ("On their way", "10.0.0.7", "reading 50 %", 'value="50.0"', "1 of 2", "no reader is at work", "complete", "its size is not known yet", "2,000 lines accepted so far, 500 on their way")),
        ("/pipeline/discard", ("There are no dead letters",)),
        ("/gpu", ("Made-up 16", "No lease lives", "Nobody waits", "logweir", "No lease has ended")),
        ("/gpu/now", ("Made-up 16",)),
        ("/send", ("curl --fail", "Audit log", "nothing by its protocol (lines) yet")),
        ("/send?how=loki", ("Senders by this protocol", "10.0.0.8 (key web)", "7 lines", "10.0.0.10")),
        ("/send?how=vector", ("/es]", "heard: 5 lines by the protocol bulk from 10.0.0.7")),
    ],
)  # fmt: skip
def test_a_page_shows_what_is_known(local: Person, path: str, words: tuple[str, ...]) -> None:
    body = local.page(path.format(HALVES=HALVES, HOUR=HOUR, END=END))
    assert [word for word in words if word not in body] == [], body
    assert "<script>alert" not in body and "\x1b" not in body and "\u202e" not in body
    assert " style=" not in body and not re.search(r"\son[a-z]+=", body)
    for head in re.findall(r"<table.*?</thead>", body, re.DOTALL):
        assert "<caption" in head and "<th>" not in head and 'scope="col"' in head, path


def test_a_silenced_incident_stands_apart_until_somebody_ends_that(place: Place, local: Person) -> None:
    assert "silenced" not in local.page("/") and "T1 has stopped" in local.page("/")
    for fields, words in (
        ([("workload", "shop/web"), ("lasts", "2y"), ("why", "w")], "is no length of a silence"),
        ([("workload", "shop/web"), ("lasts", "2h"), ("why", "")], "needs a reason"),
    ):
        status, _, body = local.do("/do/silence", *fields)
        assert status == 400 and words in body
    flower = {"Origin": f"http://127.0.0.1:{place.console.port + 1}"}  # a page of another port of this host
    assert local.do("/do/silence", ("workload", "a"), ("lasts", "2h"), ("why", "w"), **flower)[0] == 403
    why = f"maintenance {'<b>'}"
    status, where, _ = local.do("/do/silence", ("workload", "shop/web"), ("lasts", "2h"), ("why", why))
    assert (status, where) == (303, "/")
    now, listed, kept = local.page("/"), local.page("/incidents?state=silenced"), local.page("/silences")
    assert "1 incident silenced" in now and "T1 has stopped" not in now
    assert "Calm" in now and "1 incident silenced or snoozed" in now and "the last incident ended" not in now
    assert (
        "T1 has stopped" in listed
        and "maintenance &lt;b&gt;" in kept
        and '<td class="num" data-name="Incidents">1<' in kept
    )
    name = re.search(r"/do/silence/([0-9a-f]{8})/end", kept)
    assert name is not None
    reader = place.person("only-reads", "read")
    assert f"/do/silence/{name[1]}/end" not in reader.page("/silences") and "silenced" in reader.page("/")
    assert reader.do(f"/do/silence/{name[1]}/end")[0] == 403
    assert place.person("some", "mark", only=("shop/*",)).status_of("/silences") == 403
    assert local.do(f"/do/silence/{name[1]}/end", ("x", ""), **{"HX-Request": "true"})[0] == 200
    assert "T1 has stopped" in local.page("/") and "Ended within a week" in local.page("/silences")
    assert [action for _, action, _ in place.actions()][:2] == ["silence.end", "silence.begin"]


def test_an_incident_takes_notes_of_people_and_leaves_as_markdown(place: Place, local: Person) -> None:
    (name,) = set(re.findall(r'href="/incidents/([0-9a-z-]+)"', local.page("/incidents")))
    path = f"/do/note/{name}"
    text = "<b>looked</b> at it\n```\n# seen"
    assert "Nobody has written one yet" in local.page(f"/incidents/{name}")
    assert local.do(path, ("text", text))[0] == 303
    page = local.page(f"/incidents/{name}")
    assert "&lt;b&gt;looked&lt;/b&gt; at it" in page and "<b>looked" not in page
    assert place.actions()[0][1:] == ("incident.note", name)
    for wrong in ("", " ", "n" * 2_001):
        assert local.do(path, ("text", wrong))[0] == 400
    snooze = f"/do/incident/{name}/snooze"
    assert local.do(snooze, ("more", "some"))[0] == local.do(snooze, ("more", "0"))[0] == 400
    assert local.do(snooze, ("lasts", "1d"), ("more", "7"))[0] == 303
    assert ", or 12 lines" in local.page(f"/incidents/{name}")  # it has five
    assert local.do(f"/do/incident/{name}/reopen")[0] == 303
    other = place.person("other", "mark", only=("other/*",))
    assert other.do(path, ("text", "n"))[0] == other.status_of(f"/incidents/{name}/incident.md") == 404
    status, headers, body = place.console.ask(f"/incidents/{name}/incident.md", Cookie=local.cookie)
    assert status == 200 and headers["content-type"].startswith("text/markdown")
    assert headers["content-disposition"] == f'attachment; filename="incident-{name}.md"'
    found = body.decode()
    assert found.startswith(f"# Incident {name}\n") and "T1 has stopped" in found and "\x1b" not in found
    assert f"````text\n{text}\n````" in found and f"/incidents/{name}>" in found


def test_pages_of_much_text_are_cut_with_links_to_the_rest(place: Place, local: Person) -> None:
    span = f"since={LONG_AGO - timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}&until={LONG_AGO + timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"
    lines = local.page(f"/lines?{span}")
    assert len(lines) < LIGHT and lines.count('<li class="line ') == 100
    assert re.search("All 2,70[567] characters", lines) and "Long lines are cut after 750 characters" in lines
    link = re.search(r'class="more" href="([^"]+)"', lines)
    assert link and local.page(unescape(link[1])).count("log text") >= 300
    when = span.replace("since=", "").replace("&until=", "..")
    spans = f"a={when}&b={when}&workload=heavy/0&other=heavy/1"
    found: set[str] = set()
    for page in range(1, 7):
        body = local.page(f"/compare?{spans}&all=true&page={page}")
        assert len(body) < LIGHT and f"Page {page} of 6" in body
        found |= set(re.findall(r"/patterns/(T1\d{3})", body))
    assert len(found) == 345 and 'page=1#new">page 1</a>' in body


def test_lines_of_a_broken_clock_stand_behind_a_link(place: Place, local: Person) -> None:
    made = [
        row(n, "clock", timestamp=NOW + timedelta(days=3 * n), workload="late/clock", message=f"tick {n}")
        for n in range(2)
    ]
    parquet_of(place.settings).write("clock", pl.DataFrame(made, schema=RESULT_SCHEMA))
    try:
        page = local.page("/lines?workload=late/clock")
        link = re.search(r'more than a day ahead of the clock. <a href="([^"]*)"', page)
        assert link and "tick 0" in page and "tick 1" not in page
        there = local.page(unescape(link[1]))
        assert "tick 1" in there and "ahead of the clock" not in there
    finally:
        parquet_of(place.settings).remove("clock", "late/clock")
    assert "ahead of the clock" not in local.page("/lines?workload=shop/web")


def test_lines_of_a_filter_are_downloaded(place: Place, local: Person) -> None:
    page = local.page("/lines?workload=shop/web&anomalous=false&since=6h")
    link = re.search(r'href="(/lines\.ndjson[^"]*)" download', page)
    assert link
    for person, count in ((local, 1_250), (place.person("narrow-file", "read", only=("shop/db",)), 0)):
        status, headers, body = place.console.ask(unescape(link[1]), Cookie=person.cookie)
        assert (status, len(body.splitlines())) == (200, count)
        assert headers["content-disposition"] == 'attachment; filename="lines.ndjson"'
        assert headers["content-type"].startswith("application/x-ndjson")
    assert place.console.ask("/lines.ndjson")[0] == 303
    followed = local.page("/lines?follow=true&q=line")
    assert 'data-live="status"' in followed and "data-tail" in followed
    assert "data-tail" not in local.page("/lines?follow=true&since=2h&until=1h")


def test_patterns_are_filtered_by_level_and_by_mark(place: Place, local: Person) -> None:
    def shown(filters: str) -> set[str]:
        page = local.page(f"/patterns?since=6h&{filters}")
        return set(re.findall(r'name="pattern" value="(T\d+ [^"]+)"', page))

    keys, all_of_them = Keys(place.settings.redis.key_prefix), shown("")
    for number in (1, 2):
        text = pack_template(Template(template_id=number, text="a", severe=number == 2, workload="shop/web"))
        place.client.hset(keys.templates, str(number), text)
    assert shown("level=error") == {one for one in all_of_them if one.startswith("T2 ")} != all_of_them
    assert shown("marked=marked") == set()
    assert local.do("/do/mark", ("pattern", "T1 shop/web"), ("state", "normal"))[0] == 303
    assert shown("marked=marked") == shown("marked=normal") == {"T1 shop/web"}
    assert shown("marked=anomalous") == shown("marked=normal&level=error") == set()
    assert shown("marked=unmarked") == all_of_them - {"T1 shop/web"}
    assert local.do("/do/mark", ("pattern", "T1 shop/web"), ("state", ""))[0] == 303
    place.client.delete(keys.templates)


def test_several_patterns_are_silenced_at_once(place: Place, local: Person) -> None:
    path, chosen = "/do/silence-patterns", [("pattern", "T1 shop/web"), ("pattern", "T2 shop/db")]
    assert 'formaction="/do/silence-patterns"' in local.page("/patterns?since=6h")
    for fields in (
        [*chosen, ("silence_for", "2y"), ("silence_why", "w")],
        [*chosen, ("silence_for", "2h")],
        [("pattern", "T1"), ("silence_for", "2h"), ("silence_why", "w")],
        [*chosen * 11, ("silence_for", "2h"), ("silence_why", "w")],
    ):
        assert local.do(path, *fields)[0] == 400
    assert local.do(path, *chosen, ("silence_for", "2h"), ("silence_why", "moved"))[0] == 303
    kept = {
        (one.workload, one.template): one
        for one in read_silences(place.client, place.settings, NOW)
        if not one.expired
    }
    assert {("shop/web", "T1"), ("shop/db", "T2")} <= set(kept)
    for one in kept.values():
        assert local.do(f"/do/silence/{one.id}/end")[0] == 303


def test_a_page_that_is_written_once_has_a_nonce_and_a_token_for_each(place: Place) -> None:
    two = [place.person("local") for _ in range(2)]
    nonces, tokens = set(), set()
    for path in ("/", "/incidents", "/strip"):
        for person in two:
            _, headers, body = place.console.ask(path, Cookie=person.cookie)
            found = re.findall(r'nonce="([^"]+)"', body.decode())
            policy = headers["content-security-policy"]
            assert len(set(found)) == 1 and f"'nonce-{found[0]}'" in policy, path
            nonces.add(found[0])
            tokens.update(TOKEN.findall(body.decode()))
    assert len(nonces) == 6 and tokens == {person.token() for person in two} and len(tokens) == 2


def test_log_text_is_shown_as_text(local: Person) -> None:
    for path in (f"/compare?{HALVES}", "/rates", f"/sessions?key={TRACE}"):
        body = local.page(path)
        assert SHOWN in body and "&lt;U+202E&gt;" in body, path


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/compare?a=yesterday", 400, "neither a span nor a time"),
        ("/units?since=1h&normal=1m", 400, "not after"),
        ("/sessions?key=ab", 400, "characters"),
        ("/rates?since=1h&until=2h", 400, "not after"),
        ("/learning/promote?version=nothing", 404, "there is no model"),
        (f"/learning/promote?version={TWO}", 400, "is the live version already"),
        ("/learning/rollback?model=nothing", 404, "there is no live model"),
        ("/pipeline/dead/nothing", 404, "there is no dead batch"),
        ("/send?how=telex", 404, "there is no snippet"),
        ("/send/revoke?name=nothing", 404, "there is no key"),
    ],
)
def test_a_wrong_question_is_answered_in_a_sentence(
    local: Person, path: str, status: int, words: str
) -> None:
    code, body = local.see(path)
    assert (code, words in body) == (status, True), body


def test_scopes_decide_what_is_seen_and_done(place: Place) -> None:
    reads = place.person("reads", "read")
    assert "Roll back" not in reads.page("/learning") and "Ask for a training" not in reads.page("/learning")
    send = reads.page("/send")
    assert "need the scope <code>admin</code>" in send and "Audit log" not in send
    assert reads.see("/learning/rollback")[0] == reads.see("/send/revoke?name=reads")[0] == 403
    forms = (
        ("/do/training", ()), ("/do/model/rollback", ()), ("/do/model/promote", (("version", ONE),)),
        ("/do/watch", (("action", "add"), ("pattern", "a"))), ("/do/unmark", (("target", "T1"),)), ("/do/note/a", (("text", "n"),)),
        ("/do/dead/retry", (("batch", "all"),)), ("/do/key", (("name", "x"), ("scope", "admin"))),
        ("/do/key/revoke", (("name", "reads"),)),
    )  # fmt: skip
    before = place.actions()
    for path, fields in forms:
        assert reads.do(path, *fields)[0] == 403, path
    operates = place.person("operates", "operate")
    for path, fields in forms[-2:]:
        assert operates.do(path, *fields)[0] == 403, path
    assert place.actions() == before
    for name in ("reads", "operates"):
        SenderKeys(place.client, place.settings).revoke(name)


def test_the_page_of_the_pipeline_says_what_was_lost_and_whose_lines_were_left_out(
    place: Place, local: Person
) -> None:
    keys = Keys(place.settings.redis.key_prefix)
    key = keys.watching("left_out")
    place.client.hset(keys.counts, "source_lost", 7)
    place.client.hset(key, "shop/web", LeftOut(ahead=12, lead=120).pack(now_ms(place.client)))
    sentence = "shop/web: 12 lines are up to 2.0 h ahead of the clock; is it the time zone?"
    try:
        # Pages share an answer for a moment.
        assert wait_until(lambda: sentence in local.page("/pipeline/moving"), timeout_s=10)
        lost = "Lost so far: 7 records that Kafka or NATS removed before they were read."
        assert lost in local.page("/pipeline/moving")
    finally:
        place.client.delete(key)
        place.client.hdel(keys.counts, "source_lost")


def test_a_key_of_some_workloads_sees_these_alone(place: Place, local: Person) -> None:
    narrow = place.person("narrow", "read", only=("shop/web",))
    for path in ("/learning", "/pipeline", "/pipeline/moving", "/gpu", "/gpu/now"):
        assert narrow.see(path)[0] == 403, path
    for path in ("/compare", "/rates", f"/sessions?key={TRACE}", "/sessions"):
        assert "shop/db" not in narrow.page(path), path
    # A piece that asks again by itself stays where it is, and the refusal is a note.
    _, headers, _ = place.console.ask("/pipeline/moving", Cookie=narrow.cookie, Hx_Request="true")
    assert (headers["hx-retarget"], headers["hx-reswap"]) == ("#toasts", "beforeend")
    page = narrow.page("/patterns/T2?workload=shop/web")
    for hidden in ("/learning", "/pipeline", "/gpu"):
        assert f'href="{hidden}"' not in page, hidden
    texts = Keys(place.settings.redis.key_prefix).templates
    other = Template(template_id=77, text="words of shop/db alone", severe=False, workload="shop/db")
    place.client.hset(texts, "77", pack_template(other))
    assert other.text in local.page("/patterns/T77")
    assert other.text not in (refused := narrow.see("/patterns/T77"))[1] and refused[0] == 404
    place.client.hdel(texts, "77")
    assert "1,250" in narrow.page("/rates") and "10.0.0.7" not in narrow.page("/send?how=vector")
    SenderKeys(place.client, place.settings).revoke("narrow")


def test_a_form_needs_the_token_of_its_session_and_its_own_origin(place: Place, local: Person) -> None:
    before = place.actions()
    fields = (("action", "add"), ("pattern", "prod/*"))
    assert local.do("/do/watch", *fields, token="0" * 32)[0] == 403
    assert local.do("/do/watch", *fields, token="ü" * 32)[0] == 403
    assert local.do("/do/watch", *fields, Origin="http://evil.example")[0] == 403
    assert local.do("/do/key", ("name", "x"), ("scope", "admin"), token="")[0] == 403
    # A session that has ended: the way in leads to the page of the form, and not to the form.
    ended, own = Person(place.console, "lw_1=ended"), f"http://127.0.0.1:{place.console.port}"
    for page, way in (
        (f"{own}/learning?zone=UTC", "/in?next=%2Flearning%3Fzone%3DUTC"),
        ("http://evil/x", "/in"),
    ):
        assert ended.do("/do/watch", *fields, token="x", Referer=page)[:2] == (303, way)
    assert place.actions() == before


def test_the_watchlist_and_trainings_change_by_forms(place: Place, local: Person) -> None:
    status, _, toast = local.do(
        "/do/watch", ("action", "add"), ("pattern", "prod/* shop/web"), Hx_Request="true"
    )
    assert status == 200 and "prod/*, shop/web is watched" in toast and 'value="remove"' in toast
    body = local.page("/learning")
    assert "nothing that has come yet" in body and "No longer watch prod/*" in body
    status, to, _ = local.do("/do/watch", ("action", "remove"), ("pattern", "prod/* shop/web"))
    assert (status, to) == (303, "/")
    status, to, _ = local.do("/do/training", ("since", "7d"), ("exclude", "disk full"))
    assert (status, to) == (303, "/learning?done=asked#trainings")
    body = local.page("/learning?done=asked")
    assert "The training waits" in body and "queued" in body and "asked by local" in body
    (training,) = set(re.findall(r"/do/training/([0-9a-f]+)/cancel", body))
    assert local.do(f"/do/training/{training}/cancel", Hx_Request="true")[0] == 200
    assert "cancelled" in local.page("/learning/trainings")
    assert [action for _, action, _ in place.actions()[:6]] == [
        "training.cancel", "training.request", "watchlist.remove", "watchlist.remove", "watchlist.add",
        "watchlist.add",
    ]  # fmt: skip


def test_models_change_after_a_question(place: Place, local: Person) -> None:
    status, to, _ = local.do("/do/model/rollback", ("model", "shared"), ("reason", "it alerts on everything"))
    assert (status, to) == (303, "/learning?done=rolled-back")
    assert f"<b>{ONE}</b>" in local.page("/learning?done=rolled-back").partition("is-good")[0]
    status, to, _ = local.do("/do/model/promote", ("version", TWO), ("reason", "better"))
    assert (status, to) == (303, "/learning?done=promoted")
    registry = Registry(place.client, place.settings)
    live = registry.current()
    assert live is not None and live.version == TWO
    assert [one[1] for one in place.actions()[:2]] == ["model.promoted", "model.rolled-back"]


def test_a_mark_is_listed_with_its_person_and_taken_back(place: Place, local: Person) -> None:
    Marks(place.client, place.settings).put(
        Target.pattern(99), State.NORMAL, text=MARKUP, workload="shop/web", lasts=timedelta(days=1), by="ann", why="known"
    )  # fmt: skip
    body = local.page("/learning")
    assert "ann, " in body and "known" in body and SHOWN in body
    status, _, toast = local.do("/do/unmark", ("target", "99"), ("workload", "shop/web"), Hx_Request="true")
    assert status == 200 and "The mark of 99 is taken back" in toast
    assert place.actions()[0] == ("local", "mark.revoke", "99")
    assert "ann, " not in local.page("/learning")
    assert 'action="/do/remark"' in toast and SHOWN in toast
    fields = re.findall(r'name="([a-z]+)" value="([^"]*)"', toast.partition('action="/do/remark"')[2])
    again = [(name, unescape(value)) for name, value in fields if name != "token"]
    assert local.do("/do/remark", *again)[0] == 303
    assert place.actions()[0] == ("local", "mark.normal", "99")
    (mark,) = Marks(place.client, place.settings).look().marks
    assert (mark.workload, mark.why, mark.by) == ("shop/web", "known", "local") and mark.until is not None
    gone = [(name, "2026-01-01T00:00:00Z" if name == "until" else value) for name, value in again]
    assert local.do("/do/remark", *gone)[0] == 400
    local.do("/do/unmark", ("target", "99"), ("workload", "shop/web"))


def test_dead_letters_are_read_retried_and_discarded(place: Place, local: Person) -> None:
    put_dead_batches(place, "d/1", "d2", "d3")
    body = local.page("/pipeline")
    assert SHOWN in body and "/pipeline/dead/d/1" in body and "Discard all …" in body
    assert "Its records" in local.page(f"/pipeline/dead/{quote('d/1', safe='')}")
    assert "Discard all 3 dead letters?" in local.page("/pipeline/discard")
    assert local.do("/do/dead/discard", ("batch", "d/1"))[1] == "/pipeline?done=discard#dead"
    assert local.see("/pipeline/dead/d/1")[0] == 404
    assert local.do("/do/dead/discard", ("batch", "all"))[1] == "/pipeline?done=discard#dead"
    assert "every batch could be processed" in local.page("/pipeline?done=discard")
    assert {one[2] for one in place.actions()[:3]} == {"d/1", "d2", "d3"}


def test_a_key_is_shown_once_and_revoked_after_a_question(place: Place, local: Person) -> None:
    place.client.delete(Keys(place.settings.redis.key_prefix).sender_keys)
    wait_for_ring()
    assert "There is no key" in local.page("/send")
    fields = (("name", "till"), ("scope", "send"), ("only", "shop/*, prod/*"), ("lasts", "90d"))
    status, _, body = local.do("/do/key", *fields)
    secret = re.search(r"lw_[A-Za-z0-9_-]{20,}", body)
    assert status == 200 and secret is not None and "every request over HTTP" in body
    wait_for_ring()
    page = local.page("/send")
    assert secret[0] not in page and "shop/*, prod/*" in page and "Authorization: Bearer KEY" in page
    assert local.do("/do/key", *fields)[0] == 400
    assert local.do("/do/key", ("name", "none"))[0] == 400
    assert "last one that may send" in local.page("/send/revoke?name=till")
    assert local.do("/do/key/revoke", ("name", "till"))[1] == "/send?done=revoked#keys"
    assert place.actions()[:2] == [("local", "key.revoke", "till"), ("local", "key.add", "till")]
    assert "key.revoke" in local.page("/send?done=revoked") and secret[0] not in str(place.actions())


def test_an_incident_of_rates_has_a_page(local: Person) -> None:
    def found() -> set[str]:
        return set(re.findall(r"/incidents/[0-9a-f]+", local.page("/rates")))

    assert wait_until(lambda: len(found()) == 1, timeout_s=5)  # pages share a list of incidents for a moment
    (link,) = found()
    assert "rate silence" in local.page(link) or "has stopped" in local.page(link)


def test_an_incident_of_two_workloads_says_where_it_likely_began(place: Place, local: Person) -> None:
    state, first = Incidents(), NOW - timedelta(minutes=4)
    state.add(
        [
            IncidentEvent(
                event_id=workload, workload=workload, cause="template:7", kind="template", first=at, last=at, count=5,
                score=0.9, severity=3, text=f"boom {MARKUP}", source="", line=0,
            )
            for workload, at in (("shop/db", first), ("shop/web", first + timedelta(seconds=40)))
        ]
    )  # fmt: skip
    key, (incident,) = Keys(place.settings.redis.key_prefix).watching("incidents"), state.all()
    before, path = cast("bytes", place.client.get(key)), f"/incidents/{incident.id}"
    try:
        place.client.set(key, state.pack())
        # Pages share what they know of incidents for half a second.
        assert wait_until(lambda: local.status_of(path) == 200, timeout_s=5)
        body = local.page(path)
    finally:
        place.client.set(key, before)  # all tests here share one place
        assert wait_until(lambda: local.status_of(path) == 404, timeout_s=5)
    assert "<h2>Likely began in shop/db</h2>" in body and "Likely first:" not in body
    assert "<b>shop/db</b>: its first cause came first" in body


def test_every_link_of_a_page_leads_somewhere(local: Person) -> None:
    paths = ("/compare", "/rates", "/units", "/sessions", "/learning", "/pipeline", "/gpu", "/send")
    found = {link for path in paths for link in re.findall(r'href="(/[^"#]*)', local.page(path))}
    wanted = {link.replace("&amp;", "&") for link in found if not link.startswith("/static")}
    one_each = {re.sub(r"=[^&]*", "=", link): link for link in sorted(wanted)}
    # Pages of a pattern without a template and API answers are others' tests.
    wrong = [link for link in one_each.values() if local.status_of(link) not in (200, 401)]
    assert wrong == []


def test_a_heat_row_shows_gaps_and_silence() -> None:
    parts = [
        HeatPart(since=NOW + timedelta(hours=n), until=NOW + timedelta(hours=n + 1)) for n in range(PARTS)
    ]

    def shades(trend: dict[int, int]) -> tuple[str, datetime | None]:
        values = [trend.get(n, 0) for n in range(PARTS)]
        rate = WorkloadRate(workload="a", records=sum(values), anomalous=0, severe=0, trend=values)
        found = heat_row(rate, parts)
        return " ".join(cell.shade for cell in found.cells), found.silent

    shown, silent = shades({2: 1, 3: 100, 5: 25, PARTS - 2: 7})
    assert shown.startswith("before before h1 h6 gap h3 gap") and shown.endswith("h2 none") and silent is None
    shown, silent = shades({0: 5, 1: 5})
    assert shown.split()[2:] == ["gap"] * (PARTS - 2) and silent == parts[1].until
    assert shades({})[0].split() == ["before"] * PARTS


def test_the_first_page_does_not_fail_where_news_take_too_long() -> None:
    async def cancelled(*_: object, **_how: object) -> None:
        raise AnswerCancelled("the answer takes longer than 30 s")

    api: Any = SimpleNamespace(client=None, settings=None, shared_stored=cancelled)
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(api=api)))
    visitor: Any = SimpleNamespace(asker=SimpleNamespace(only=()))
    assert asyncio.run(the_news(request, visitor)) is None
    bits = console_templates().get_template("_bits.html").module
    assert "is not known now" in bits.not_known("What was never said before")  # type: ignore[attr-defined]


def test_the_page_of_sending_has_each_snippet() -> None:
    assert set(ORDER) == set(SNIPPETS) and len(ORDER) == len(SNIPPETS)


def test_a_new_sender_is_a_change_that_open_pages_hear_of(place: Place) -> None:
    feed, counts = ChangeFeed(place.client, place.settings), SenderCounts()
    before = feed._look()
    counts.heard(SentBy(protocol="relp", key="", peer="10.0.0.11"), lines=1)
    counts.push(place.client, place.settings)
    after = feed._look()
    assert {name for name in after if after[name] != before[name]} == {"status"}
