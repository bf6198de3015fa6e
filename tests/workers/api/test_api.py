"""The API in front of a real stack: every route, keys, hostile input, and verbs that ask through it."""

import asyncio
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl
import pytest
import redis
import schemathesis
from answers_contract import row
from command_line import Verb, command_line
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from polling import wait_until
from pool_devices import put_devices
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from pipeline import Client
from pipeline.errors import BadInput, NotFound, SourceUnavailable
from pipeline.gpu.pool import Pool
from pipeline.ledger.ledger import Ledger
from pipeline.records.delivery import Meta
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.service import client as client_module
from pipeline.service.access.keys import SenderKeys
from pipeline.service.access.own_key import own_key_file
from pipeline.service.gpu import add_tenant, remove_tenant
from pipeline.service.local import Local
from pipeline.service.questions import LinesAsked, PatternsAsked
from pipeline.service.stored.values import ChangeKind
from pipeline.service.values import Action, Line
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.watching.incidents.live import IncidentEvent, Incidents
from pipeline.workers.api import app as api_module
from pipeline.workers.api.app import specified_app
from pipeline.workers.stack.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[3]
MARKUP = "<script>alert(1)</script> \x1b[31mred\x1b[0m \u202e"
BEGIN = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Asked:
    """A stack whose API answers."""

    stack: Stack
    settings: Settings
    redis: "redis.Redis"
    key: str

    @property
    def url(self) -> str:
        url = self.stack.api_url
        assert url is not None
        return url

    @property
    def client(self) -> Client:
        return Client(self.url, self.key)

    def ask(
        self, path: str, method: str = "GET", *, body: Any = None, key: str | None = None, **headers: str
    ) -> Answer:
        """`headers`: with _ for -."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        key = self.key if key is None else key
        if key:
            sent["Authorization"] = f"Bearer {key}"
        payload = None
        if body is not None:
            payload = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        with closing(http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)) as connection:
            connection.request(method, path, payload, sent)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())

    def get(self, path: str, **how: Any) -> Any:
        answer = self.ask(f"/api/v1{path}", **how)
        assert answer.status == 200, answer
        return answer.json

    def new_key(self, name: str, *scopes: str, only: tuple[str, ...] = ()) -> str:
        return SenderKeys(self.redis, self.settings).add(name, scopes=scopes, patterns=only)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("api")
    settings = Settings(
        data_dir=folder / "data", api="http://127.0.0.1:0", gpu_agent=False, flower=False, metrics=False, intake="",
        ingest_processes=1, reader_processes=0,
    )  # fmt: skip
    with Stack(settings, api=True) as stack:
        found = stack.settings
        key = own_key_file(found.data.dir).read_text().strip()
        asked = Asked(stack, found, connect(found), key)
        _fill(asked)
        assert wait_until(lambda: _answers(asked), timeout_s=60), asked.stack.sidecars.pids("api")
        yield asked


def _answers(asked: Asked) -> bool:
    try:
        return asked.ask("/healthz").status == 200 and asked.client.status().workloads != {}
    except (OSError, SourceUnavailable):
        return False


def _fill(asked: Asked) -> None:
    """Lines by way of the pipeline; older ones, incidents, dead letters and devices as they would be."""
    producer = asked.stack.producer()
    lines = [f"2026-11-20T10:00:{n:02}Z ERROR payment {n} failed: {MARKUP}" for n in range(20)]
    producer.send(lines, workload="shop/web", batch_id="sent")
    rows = [
        row(
            n, f"k{n % 3}", timestamp=BEGIN + timedelta(seconds=n // 2), workload=f"shop/{'web' if n % 2 else 'db'}",
            message=f"line {n} {MARKUP}", level="error" if n % 50 == 0 else "info", anomalous=n % 50 == 0 or n == 7,
            reasons=["never-said:900 line"] if n == 7 else ["rare:1/9"],
        )
        for n in range(2_500)
    ]  # fmt: skip
    parquet_of(asked.settings).write("older", pl.DataFrame(rows, schema=RESULT_SCHEMA))
    state = Incidents()
    for number in range(3):
        at = BEGIN + timedelta(minutes=15 * number)
        state.add(
            [
                IncidentEvent(
                    event_id=str(number), workload="shop/web" if number else "other", cause=f"template:{number + 1}",
                    kind="template", first=at, last=at, count=5, score=0.9, severity=3, text=MARKUP,
                    source="a.log", line=1,
                )
            ]
        )  # fmt: skip
        state.close(at + timedelta(minutes=14))
    keys = Keys(asked.settings.redis.key_prefix)
    asked.redis.set(keys.watching("incidents"), state.pack())
    asked.redis.hset(keys.watching(), "round", "of this test")  # the watcher keeps the incidents of its own
    ledger = Ledger(asked.redis, asked.settings)
    _put_dead(asked, *(f"d{n}" for n in range(5)))
    put_devices(Pool(asked.redis, asked.settings))
    assert wait_until(lambda: ledger.state("sent") == "done", timeout_s=60), ledger.state("sent")


def _put_dead(asked: Asked, *ids: str) -> None:
    ledger = Ledger(asked.redis, asked.settings)
    for n, batch_id in enumerate(ids):
        meta = Meta(
            source="a.log", source_key="a", purpose="score", arrived=BEGIN, formats=(), zone="UTC",  # type: ignore[arg-type]
        )  # fmt: skip
        entry: dict[Any, Any] = {
            "state": "dead", "workload": "shop/web", "lines": 1, "records": 1, "bytes": 0, "kind": "",
            "meta": meta.dump(), "dead_ms": n, "error": MARKUP,
        }  # fmt: skip
        asked.redis.hset(ledger.keys.batch(batch_id), mapping=entry)
        asked.redis.zadd(ledger.keys.dead, {batch_id: n})


def test_every_reading_route_answers_what_the_specification_says(asked: Asked) -> None:
    lines = asked.get("/lines?limit=5&workload=shop/*")
    assert len(lines["lines"]) == 5 and lines["next"]
    assert {line["workload"] for line in lines["lines"]} <= {"shop/web", "shop/db"}
    one = next(line for line in asked.get("/lines?text=line%201200")["lines"])
    around = asked.get(
        f"/lines/{one['record_id']}/context?records=2&at={one['timestamp'].replace('+', '%2B')}"
    )
    assert [line["hit"] for line in around["lines"]].count(True) == 1 and len(around["lines"]) >= 3
    patterns = asked.get("/patterns?since=1d&order=count&workload=shop/*")["patterns"]
    assert sum(one["records"] for one in patterns) == 2_500
    units = asked.get("/units?by=workload&since=1d&workload=shop/*")
    assert {one["unit"] for one in units["ranking"]["units"]} == {"shop/web", "shop/db"}
    rates = asked.get("/rates?since=1d&buckets=12&workload=shop/*")
    assert {one["workload"]: sum(one["trend"]) for one in rates["workloads"]} == {
        "shop/web": 1_250, "shop/db": 1_250
    }  # fmt: skip
    incidents = asked.get("/incidents")
    assert [len(incidents["incidents"]), incidents["kept"]] == [3, 3]
    name = incidents["incidents"][0]["id"]
    assert asked.get(f"/incidents/{name}")["incident"]["causes"][0]["text"] == MARKUP
    status = asked.get("/status")
    assert status["workloads"]["shop/web"]["accepted"] == 20 and status["api"] == asked.url
    assert "api" in {worker["role"] for worker in status["workers"]}
    assert asked.get("/models") == [] and isinstance(asked.get("/trainings"), list)
    assert {one["workload"] for one in asked.get("/watchlist")["unwatched"]} == {"shop/web"}
    assert asked.get("/dead-letters")["total"] == 5
    assert asked.get("/dead-letters/d3")["reason"] == MARKUP
    assert asked.get("/senders") == {"senders": [], "next": None}
    put_devices(Pool(asked.redis, asked.settings))  # a node that was silent for long lends nothing
    assert asked.get("/gpu")["summary"]["devices"] == 2 and asked.get("/gpu/leases") == []
    # Other tests may have left tenants, records and keys.
    assert "logweir" in {one["tenant"] for one in asked.get("/gpu/tenants")["tenants"]}
    assert isinstance(asked.get("/gpu/usage")["usage"], list)
    can = asked.get("/gpu/can-infer", method="POST")
    assert can["can_infer"] is False and can["queue"] == "infer.cpu" and "no worker" in can["why"]
    assert isinstance(asked.get("/keys"), list) and asked.ask("/readyz", key="").status == 200


def test_pages_hold_every_line_once_while_others_are_stored(asked: Asked) -> None:
    stop = threading.Event()

    def store() -> None:
        sink = parquet_of(asked.settings)
        for n in range(40):
            at = datetime.now(UTC)
            newer = row(n, f"new{n}", timestamp=at, workload="busy", message="newer")
            sink.write(f"new{n}", pl.DataFrame([newer], schema=RESULT_SCHEMA))
            if stop.wait(0.05):
                return

    def walk(_: int) -> list[dict[str, Any]]:
        found, cursor = [], ""
        for _ in range(20):
            page = asked.get(f"/lines?limit=100&workload=shop/*&since=1d{cursor}")
            found += page["lines"]
            if page["next"] is None or len(found) >= 1_000:
                break
            cursor = f"&cursor={page['next']}"
        return found

    writer = threading.Thread(target=store)
    writer.start()
    with ThreadPoolExecutor(20) as readers:
        walks = list(readers.map(walk, range(20)))
    stop.set()
    writer.join()
    for found in walks:
        ids = [line["record_id"] for line in found]
        assert len(ids) == len(set(ids)) == 1_000
        assert all(a["timestamp"] >= b["timestamp"] for a, b in pairwise(found))
    assert len({json.dumps([line["record_id"] for line in found]) for found in walks}) == 1


def test_rows_stream_and_a_client_that_leaves_frees_its_place(asked: Asked) -> None:
    answer = asked.ask("/api/v1/lines?limit=5000&since=1d&workload=shop/*", Accept="application/x-ndjson")
    rows = [json.loads(line) for line in answer.body.splitlines()]
    assert answer.headers["content-type"].startswith("application/x-ndjson") and len(rows) == 2_500
    host, port = asked.url.removeprefix("http://").split(":")
    for _ in range(12):  # more than there are engines
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(
                b"GET /api/v1/lines?limit=100000&text=never%20there HTTP/1.1\r\nHost: localhost\r\n"
                b"Accept: application/x-ndjson\r\nAuthorization: Bearer " + asked.key.encode() + b"\r\n\r\n"
            )
    began = time.monotonic()
    assert asked.get("/lines?limit=1")["lines"] and time.monotonic() - began < 30


def test_errors_are_problems_of_one_sentence(asked: Asked) -> None:
    for path, status, words in (
        ("/lines?cursor=nonsense", 400, "is none of ours"),
        ("/lines?limit=0", 400, "limit"),
        ("/lines?limit=5000", 400, "is more than a page"),
        ("/lines?levle=error", 400, "levle"),
        ("/lines?since=yesterday", 400, "is neither a span nor a time"),
        ("/lines?workload=" + "a" * 300, 400, "workload"),
        ("/patterns?since=1h&until=2h", 400, "is not after"),
        ("/lines/nothing/context", 404, "no stored line has the id"),
        ("/incidents/nothing", 404, "there is no incident"),
        ("/models/nothing", 404, "there is no model"),
        ("/dead-letters/nothing", 404, "there is no dead batch"),
        ("/nothing", 404, "openapi.json lists"),
        ("/lines?text=" + "a" * 20_000, 414, "16,384 bytes"),
        ("/lines?" + "&".join(f"k{n}=1" for n in range(1_000)), 400, "k0"),
    ):
        answer = asked.ask(f"/api/v1{path}")
        assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json"), answer
        assert words in answer.json["detail"] and answer.json["status"] == status, answer.json
        assert "\n" not in answer.json["detail"] and "Traceback" not in answer.json["detail"]
    page = asked.get("/lines?limit=5&workload=shop/web")
    other = asked.ask(f"/api/v1/lines?limit=5&workload=shop/db&cursor={page['next']}")
    assert other.status == 400 and "belongs to another question" in other.json["detail"]
    keys = asked.ask("/api/v1/watchlist", "POST", body={f"k{n}": n for n in range(10_000)})
    assert keys.status == 400
    large = asked.ask("/api/v1/marks", "POST", body=b"x" * (300 << 10))
    assert large.status == 413
    with closing(http.client.HTTPConnection(asked.url.removeprefix("http://"), timeout=20)) as connection:
        head = {"Authorization": f"Bearer {asked.key}", "Content-Type": "application/json"}
        connection.request("POST", "/api/v1/marks", iter([b"x" * 4096] * 75), head, encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 413 and b"262,144 bytes" in answer.read()


def test_an_etag_spares_the_answer(asked: Asked) -> None:
    first = asked.ask("/api/v1/watchlist")
    again = asked.ask("/api/v1/watchlist", If_None_Match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")


def test_a_key_does_what_its_scopes_and_workloads_allow(asked: Asked) -> None:
    sends, reads, marks, operates, narrow = (
        asked.new_key("sends", "send"), asked.new_key("reads", "read"), asked.new_key("marks", "mark"),
        asked.new_key("operates", "operate"), asked.new_key("narrow", "read", only=("shop/web",)),
    )  # fmt: skip
    time.sleep(1.1)  # as long as an older ring of keys is taken
    assert asked.ask("/api/v1/status", key="").status == 401
    assert asked.ask("/api/v1/status", key="lw_wrong").status == 401
    assert asked.ask("/api/v1/status", key=sends).status == 403
    assert asked.ask("/api/v1/status", key=reads).status == 200
    assert asked.ask("/api/v1/status", key="", X_API_Key=reads).status == 200
    assert (
        asked.ask("/api/v1/marks", "POST", key=reads, body={"pattern": "1", "state": "normal"}).status == 403
    )
    assert asked.ask("/api/v1/watchlist", "POST", key=marks, body={"add": ["a"]}).status == 403
    assert asked.ask("/api/v1/watchlist", "POST", key=operates, body={"add": ["a"]}).status == 200
    assert asked.ask("/api/v1/audit", key=operates).status == 403
    assert asked.ask("/api/v1/audit").status == 200
    for path in ("/lines?limit=100", "/lines?limit=100&workload=shop/db", "/lines?limit=10&context=2"):
        found = asked.get(path, key=narrow)["lines"]
        assert {line["workload"] for line in found} <= {"shop/web"}
    assert {one["workload"] for one in asked.get("/patterns?since=1d", key=narrow)["patterns"]} == {
        "shop/web"
    }
    assert {one["workload"] for one in asked.get("/rates?since=1d", key=narrow)["workloads"]} == {"shop/web"}
    assert asked.get("/incidents", key=narrow)["kept"] == 2
    hidden = next(line for line in asked.get("/lines?limit=9&workload=shop/db")["lines"])["record_id"]
    assert asked.ask(f"/api/v1/lines/{hidden}/context", key=narrow).status == 404
    assert "sees only shop/web" in asked.ask("/api/v1/status", key=narrow).json["detail"]
    assert asked.ask("/api/v1/keys", key=operates).status == 403
    assert asked.ask("/api/v1/backfills", key=narrow).status == 403
    for name in ("sends", "reads", "marks", "operates", "narrow"):
        assert asked.ask(f"/api/v1/keys/{name}", "DELETE").status == 200


def test_a_key_of_some_workloads_marks_their_patterns_and_no_others(asked: Asked) -> None:
    narrow = asked.new_key("marks-some", "mark", only=("shop/*",))
    assert wait_until(lambda: asked.ask("/api/v1/rates", key=narrow).status == 200, timeout_s=5)

    def mark(pattern: str, workload: str) -> Answer:
        body = {"pattern": pattern, "state": "normal", "workload": workload}
        return asked.ask("/api/v1/marks", "POST", key=narrow, body=body)

    for workload in ("", "other"):
        refused = mark("T1", workload)
        assert refused.status == 404 and "marks patterns of shop/* alone" in refused.json["detail"]
        assert asked.ask(f"/api/v1/marks/T1?workload={workload}", "DELETE", key=narrow).status in (400, 404)
    assert asked.ask("/api/v1/marks/T1", "DELETE", key=narrow).status == 404
    assert "such as T17" in mark("payment 1 failed", "shop/web").json["detail"]
    made = mark("T1", "shop/web")
    assert (made.status, made.json["workload"], made.json["by"], made.json["text"]) == (
        201,
        "shop/web",
        "marks-some",
        "",
    )

    def held() -> list[tuple[int, bool]]:
        return [
            (m["template_id"], bool(m["text"]))
            for m in asked.get("/marks")["marks"]
            if m["by"] == "marks-some"
        ]

    assert held() == [(1, True)]
    (back,) = asked.ask("/api/v1/marks/T1?workload=shop/web", "DELETE", key=narrow).json
    assert back["text"] == "" and held() == []
    assert asked.ask("/api/v1/keys/marks-some", "DELETE").status == 200


def test_a_parameter_that_a_route_does_not_have_is_refused(asked: Asked) -> None:
    for path in (
        "/units?sincee=1h",
        "/events/log?typ=model.*",
        "/gpu/jobs?limit=2",
        "/lines?limt=5",
        "/patterns?x=1",
    ):
        refused = asked.ask(f"/api/v1{path}")
        name = path.partition("?")[2].partition("=")[0]
        assert (refused.status, name in refused.json["detail"]) == (400, True), refused
    assert "use by, limit, normal, since, until, workload" in asked.ask("/api/v1/units?a=b").json["detail"]
    assert asked.ask("/api/v1/sessions?since=1h&until=2h").status == 400


def test_pages_of_other_origins_and_other_hosts_are_refused(asked: Asked) -> None:
    assert asked.ask("/api/v1/status", Origin="http://evil.example").status == 403
    assert asked.ask("/api/v1/status", Host="evil.example").status == 421
    for refused in (asked.ask("/<b>x</b>"), asked.ask("/<b>x</b>", Host="evil.example")):
        assert refused.status in (404, 421) and refused.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in refused.headers["content-security-policy"]
    host = asked.url.removeprefix("http://")
    assert asked.ask("/api/v1/status", Origin=f"http://{host}").status == 200


def test_changes_happen_and_are_in_the_audit_log_without_secrets(asked: Asked) -> None:
    earlier = {entry["id"] for entry in asked.get("/audit?limit=100")["entries"]}  # of other tests
    marked = asked.ask(
        "/api/v1/marks",
        "POST",
        body={"pattern": f"payment 1 failed: {MARKUP}", "state": "normal", "lasts": "1h"},
    )
    assert marked.status == 201, marked
    pattern = marked.json["pattern_id"]
    assert pattern in [one["pattern_id"] for one in asked.get("/marks")["marks"]]
    assert asked.get(f"/marks/{pattern}", method="DELETE")[0]["state"] == "normal"
    assert asked.ask(f"/api/v1/marks/{pattern}", "DELETE").status == 404
    assert asked.ask("/api/v1/watchlist", "POST", body={"add": ["prod/*"], "remove": []}).status == 200
    assert asked.ask("/api/v1/watchlist", "POST", body={"remove": ["prod/*"]}).json[0]["changed"] == [
        "prod/*"
    ]
    _put_dead(asked, "gone")
    assert asked.ask("/api/v1/dead-letters/gone/discard", "POST").json["batches"] == ["gone"]
    assert asked.ask("/api/v1/dead-letters/gone/retry", "POST").status == 404
    made = asked.ask("/api/v1/keys", "POST", body={"name": "made", "scopes": ["read"], "lasts": "1h"})
    assert made.status == 201
    assert [one["expires"] is None for one in asked.get("/keys") if one["name"] == "made"] == [False]
    training = asked.ask("/api/v1/trainings", "POST", body={"workloads": ["shop/*"]})
    assert training.status == 202, training
    asked.ask(f"/api/v1/trainings/{training.json['request_id']}/cancel", "POST")
    ended = {"cancelled", "failed", "completed"}
    assert wait_until(lambda: asked.get("/trainings")[0]["state"] in ended, timeout_s=60)
    assert asked.ask("/api/v1/models/rollback", "POST", body={}).status == 400
    assert asked.ask("/api/v1/models/v1/promote", "POST", body={}).status == 404
    put_devices(Pool(asked.redis, asked.settings))  # a silent node lends nothing
    lease = asked.ask("/api/v1/gpu/leases", "POST", body={"holder": "me", "name": "job", "memory_mib": 1_000})
    assert lease.status == 201, lease
    token = {"token": lease.json["token"]}
    assert asked.ask("/api/v1/gpu/leases/job/renew", "POST", body=token).json["lease"] == "job"
    reads = asked.new_key("reader", "read")
    time.sleep(1.1)  # as long as an older ring of keys is taken
    for found in (asked.get("/gpu/leases", key=reads), asked.get("/gpu", key=reads)["leases"]):
        assert found[0]["lease"] == "job" and (found[0]["token"], found[0]["parts"][0]["token"]) == (
            None,
            None,
        )
    assert asked.get("/gpu/leases")[0]["token"] == token["token"]
    SenderKeys(asked.redis, asked.settings).revoke("reader")
    assert asked.ask("/api/v1/gpu/leases/job/release", "POST", body={"token": 0}).status == 400
    assert asked.ask("/api/v1/gpu/leases/job/release", "POST", body=token).json == {"released": "job"}
    assert asked.ask("/api/v1/keys/made", "DELETE").status == 200
    log = asked.get("/audit?limit=50")
    actions = [entry["action"] for entry in log["entries"]]
    assert actions[:3] == ["key.revoke", "gpu.release", "gpu.request"]
    assert {
        "mark.normal", "mark.revoke", "watchlist.add", "watchlist.remove", "dead_letter.discard", "key.add",
        "training.request",
    } <= set(actions)  # fmt: skip
    mine = [entry for entry in log["entries"] if entry["id"] not in earlier]
    assert {entry["by"] for entry in mine} <= {"local", "operates"}
    page = asked.get("/audit?limit=2")
    rest = asked.get(f"/audit?limit=2&cursor={page['next']}")
    assert [e["id"] for e in page["entries"] + rest["entries"]] == [e["id"] for e in log["entries"][:4]]
    secret = made.json["key"]
    logs = "".join(path.read_text(errors="replace") for path in (asked.settings.data.dir / "logs").iterdir())
    assert secret not in logs + json.dumps(log) and asked.key not in logs
    assert own_key_file(asked.settings.data.dir).stat().st_mode & 0o077 == 0


def test_a_key_of_a_tenant_takes_no_other_name_and_reaches_no_lease_of_others(asked: Asked) -> None:
    pool = Pool(asked.redis, asked.settings)
    put_devices(pool)
    keys = {
        name: add_tenant(asked.redis, asked.settings, name, 1.0, by="test").key
        for name in ("red", "red.team", "blue")
    }
    reader = asked.new_key("gpu-reader", "read")
    time.sleep(1.1)  # as long as an older ring of keys is taken, and an older list of tenants

    def take(key: str, **body: Any) -> Answer:
        return asked.ask("/api/v1/gpu/leases", "POST", body={"memory_mib": 100, **body}, key=key)

    got = take(keys["red"], holder="me", name="job")
    assert got.status == 201 and got.json["lease"] == "red.job", got
    lease = next(one for one in pool.snapshot().leases if one.lease_id == "red.job")
    assert (lease.need.tenant, lease.holder, lease.need.kind) == ("red", "red/me", "user")
    token = {"token": got.json["token"]}
    # Another tenant knows name, holder and token, and takes the place of the first.
    for body in ({"tenant": "red"}, {"tenant": "logweir"}, {"priority": 1}):
        refused = take(keys["blue"], holder="me", name="job", **body)
        assert refused.status == 403 and "blue" in refused.json["detail"], refused
    assert take(keys["blue"], holder="red/me", name="job").json["lease"] == "blue.job"
    assert take(keys["red.team"], holder="me", name="x").json["lease"] == "red.team.x"
    squat = take(keys["red"], holder="me", name="team.x")
    assert squat.status == 409 and "belongs to red.team/me" in squat.json["detail"], squat
    for name in ("red.job", "red.team.x"):
        for action in ("renew", "release"):
            stolen = asked.ask(f"/api/v1/gpu/leases/{name}/{action}", "POST", body=token, key=keys["blue"])
            assert stolen.status == 404, stolen
    mine = asked.get("/gpu/leases", key=keys["blue"])
    assert [(one["lease"], one["token"] is None) for one in mine] == [("blue.job", False)]
    assert all(one["token"] is None for one in asked.get("/gpu/leases", key=reader))
    assert take(reader, holder="me", name="job").status == 403
    for path in (
        "/gpu",
        "/gpu/tenants",
        "/gpu/jobs",
        "/status",
        "/lines?limit=1",
        "/keys",
        "/audit",
        "/watchlist",
    ):
        assert asked.ask(f"/api/v1{path}", key=keys["blue"]).status == 403, path
    made = asked.ask("/api/v1/keys", "POST", body={"name": "x", "scopes": ["admin"]}, key=keys["blue"])
    assert made.status == 403
    assert asked.ask("/api/v1/gpu/leases/red.job/renew", "POST", body=token, key=keys["red"]).status == 200
    assert asked.ask("/api/v1/gpu/leases/red.job/release", "POST", body=token, key=keys["red"]).status == 200
    for name in keys:
        remove_tenant(asked.redis, asked.settings, name, by="test")
    assert wait_until(lambda: take(keys["red"], holder="me", name="job").status == 401, timeout_s=5)
    for one in pool.snapshot().leases:
        pool.release(one)
    SenderKeys(asked.redis, asked.settings).revoke("gpu-reader")


def test_events_name_what_changed_also_to_a_client_that_was_away(asked: Asked) -> None:
    events = asked.client.events()
    begin = next(events)
    assert begin.changed == "begin" and begin.id

    def until(wanted: str, stream: Iterator[Any]) -> Any:
        return next(event for event in stream if event.changed == wanted)

    asked.ask("/api/v1/watchlist", "POST", body={"add": ["event/*"]})
    seen = until("watchlist", events)
    events.close()
    asked.ask("/api/v1/watchlist", "POST", body={"remove": ["event/*"]})
    again = asked.client.events(seen.id)
    assert until("watchlist", again).changed == "watchlist"
    again.close()


def test_the_log_of_events_is_read_in_pages_and_followed(asked: Asked) -> None:
    def put(version: str) -> str:
        fields: Any = {"type": "model.live", "subject": version, "data": json.dumps({"version": version})}
        return str(asked.redis.xadd(Keys(asked.settings.redis.key_prefix).events, fields), "ascii")

    ids = [put(f"m{n}") for n in range(4)]
    page = asked.get(f"/events/log?since={ids[0]}&limit=2&type=model.*")
    assert [one["id"] for one in page["events"]] == ids[1:3] and page["last"] == ids[2] and not page["gap"]
    assert page["events"][0]["time"].endswith("Z") and page["events"][0]["data"] == {"version": "m1"}
    assert [one.id for one in asked.client.event_log(limit=2, types=["model.live"]).events] == ids[2:]
    assert asked.ask("/api/v1/events/log?type=modle").status == 400
    limited = asked.new_key("of-events", "read", only=("shop/*",))
    try:
        assert wait_until(lambda: asked.ask("/api/v1/events/log", key=limited).status == 403, timeout_s=5)
    finally:
        assert asked.ask("/api/v1/keys/of-events", "DELETE").status == 200
    headers = {"Authorization": f"Bearer {asked.key}", "Last-Event-ID": ids[2]}
    with closing(http.client.HTTPConnection(asked.url.removeprefix("http://"), timeout=30)) as connection:
        connection.request("GET", "/api/v1/events/log?follow=true&type=model.*", headers=headers)
        answer = connection.getresponse()
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        heard = []
        while len(heard) < 2:
            field, _, value = answer.readline().decode().strip().partition(": ")
            if field == "id":
                heard.append(value)
            if heard == ids[3:]:
                ids.append(put("m4"))  # one that happens while it is followed
        assert heard == ids[3:5]


@pytest.fixture
def both(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: "pytest.CaptureFixture[str]", tmp_path: Path
) -> Iterator[tuple[Verb, Verb]]:
    """The command on the machine of the stack, and the one of a machine that knows only the API."""
    key = tmp_path / "key"
    key.write_text(f"{asked.key}\n")
    own = asked.settings.replace(supervisor_pid=0)
    with command_line(own, monkeypatch, capsys, columns=400) as here:

        def there(*args: object) -> Any:
            with monkeypatch.context() as patch:
                for name in ("REDIS_URL", *own.to_environ()):
                    patch.delenv(name)
                return here("--url", asked.url, "--key", f"@{key}", *args)

        yield here, there


@pytest.mark.parametrize(
    "verb",
    [
        "results --limit 7", "results --limit 1500 --workload shop/* --json", "results --text nowhere",
        "results --since 2025-12-01 --until 2026-01-01", "results --level error --limit 5 --context 2 --json",
        "results --workload nothing", "results --news --since 2026-01-01 --until 2026-11-30T23:00", "results --news --json --since 2026-01-01 --until 2026-11-30T23:00 --workload shop/*", "results --news --level info", "results --template T1 --limit 3 --anomalous",
        "patterns --since 2026-01-01 --until 2026-11-30T23:00", "patterns --since 2026-01-01 --json --until 2026-11-30T23:00",
        "patterns --template T1 --values --since 2026-01-01 --until 2026-11-30T23:00", "patterns --values",
        "patterns --template T1 --values --json --since 2026-01-01 --until 2026-11-30T23:00",
        "units --by workload --since 2026-01-01 --until 2026-11-30T23:00",
        "units --by session --since 2026-01-01 --until 2026-11-30T23:00 --normal 2025-12-01 --json",
        "incidents", "incidents --json", "incidents --open", "incidents nothing",
        "silence --list", "silence --list --json", "models list", "models list --json", "models show", "train --list", "watch list", "watch list --json",
        "mark --list", "mark --list --json", "dead list", "dead list --json", "dead list --limit 2",
        "dead show d1", "dead show nothing", "senders", "senders --json",
        "gpu leases", "gpu tenants", "gpu usage", "gpu usage --json --since 2026-01-01 --until 2026-11-25",
        "gpu usage --csv", "gpu jobs", "gpu jobs --json", "gpu models", "gpu models --json", "gpu logs nothing", "events --limit 3",
        "health", "health nothing", "keys list", "keys list --json", "backfill --list", "backfill --list --json",
        "rates --since 2026-01-01 --until 2026-11-30T23:00", "rates --json --since 2026-01-01 --until 2026-11-30T23:00 --workload shop/*",
        "compare 2026-10-01..2026-11-30T23:00 --workload shop/*", "compare 2026-10-01..2026-11-30T23:00 --json --kind new",
        "compare soon", "sessions", "sessions --since 2026-01-01 --until 2026-11-30T23:00 --json", "sessions --since 1h --until 2h",
        "sessions payment --since 2026-01-01 --until 2026-11-30T23:00", "sessions line --json --limit 3 --since 2026-01-01 --until 2026-11-30T23:00", "events --since 1h --type model.* --json", "events --since never",
    ],
)  # fmt: skip
def test_a_verb_prints_the_same_through_the_api(both: tuple[Verb, Verb], verb: str) -> None:
    here, there = (run(*verb.split()) for run in both)
    # Any message of a pattern may be its sample.
    outs = [re.sub(r'"sample": .*', "", said.out) for said in (there, here)]
    assert (outs[0], there.code, there.err) == (outs[1], here.code, here.err)
    assert here.out or here.code


def test_an_export_through_the_api_holds_the_rows_of_a_local_one(
    asked: Asked, both: tuple[Verb, Verb], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "AGAIN_S", (0.0,))
    asks = Client._sent
    seen: list[str] = []

    def cut(self: Client, method: str, path: str, *how: Any) -> Any:
        """Every second request for a page finds no API."""
        seen.append(path)
        if path.startswith("/export") and len(seen) % 2:
            raise SourceUnavailable("cut")
        return asks(self, method, f"{path}&limit=700", *how)

    monkeypatch.setattr(Client, "_sent", cut)
    chosen = ("--workload", "shop/*", "--since", "2026-01-01", "--text", "line")
    for kind in ("csv", "parquet", "delta"):
        files = [tmp_path / f"{where}.{kind}" for where in ("here", "there")]
        for run, file in zip(both, files, strict=True):
            said = run("export", f"--{kind}", file, *chosen, "--json")
            assert (said.code, json.loads(said.out or "{}").get("lines")) == (0, 2_500), said
        read: Any = {"csv": pl.read_csv, "parquet": pl.read_parquet, "delta": pl.read_delta}[kind]
        here, there = (read(str(file)).sort("record_id") for file in files)
        assert here.equals(there) and here.schema == there.schema
    assert len(seen) == 3 * 4 * 2  # pages of 700, each at the second try
    monkeypatch.setattr(client_module, "AGAIN_S", ())
    said = both[1]("export", "--csv", tmp_path / "cut.csv", *chosen)
    assert (said.code, "cut off after 0: cut; ask again" in said.err) == (1, True), said
    assert not [path for path in tmp_path.iterdir() if "cut" in path.name or path.name.startswith(".")]


def test_an_answer_says_that_files_of_the_store_are_gone_also_through_the_api(
    asked: Asked, both: tuple[Verb, Verb], tmp_path: Path
) -> None:
    sink = parquet_of(asked.settings)
    part = max(sink.parts(), key=lambda one: one.live)
    file = sink.files.file(part)
    aside = file.with_name("aside")
    file.rename(aside)
    try:
        for where, run in zip(("here", "there"), both, strict=True):
            for verb in (
                "results --limit 9000 --since 2026-01-01",
                f"patterns --since 2026-01-01 --workload {part.workloads[0]}",
                f"export --since 2026-01-01 --csv {tmp_path}/{where}.csv",
            ):
                said = run(*verb.split())
                words = f"files with {part.live:,} stored lines are not in the store any more; restore them"
                assert (said.code, words in said.err) == (1, True), (where, verb, said)
    finally:
        aside.rename(file)
    assert both[1]("export", "--since", "2026-01-01", "--csv", tmp_path / "whole.csv").code == 0


def test_what_was_never_said_before_is_listed_for_those_who_see_it(asked: Asked) -> None:
    page = asked.get("/news?since=1d")
    (one,) = page["news"]
    assert (one["workload"], one["why"]) == ("shop/web", "never seen in 900 lines; usually “line”")
    found = asked.get(f"/lines/{quote(one['record_id'])}/context?at={quote(one['at'])}&records=0")["lines"]
    assert [line["message"] for line in found] == [one["message"]]
    assert asked.client.news(BEGIN - timedelta(hours=1), datetime.now(UTC), "shop/db").news == []
    narrow = asked.new_key("news", "read", only=("shop/db",))
    assert wait_until(lambda: asked.ask("/api/v1/news", key=narrow).status == 200, timeout_s=5)
    assert asked.get("/news?since=1d", key=narrow)["news"] == []
    assert asked.ask("/api/v1/news?level=info").status == 400
    assert asked.ask("/api/v1/keys/news", "DELETE").status == 200


def test_pages_of_an_export_are_one_file_and_show_no_other_workload(asked: Asked) -> None:
    narrow = asked.new_key("exports", "read", only=("shop/web",))
    path, text = "/api/v1/export?since=1d&limit=1000", ""
    assert wait_until(lambda: asked.ask(path, key=narrow).status == 200, timeout_s=5)
    while path:
        page = asked.ask(path, key=narrow)
        text += page.body.decode()
        path = page.headers.get("link", "").partition(">")[0].removeprefix("<")
        assert page.headers["content-type"].startswith("text/csv") and bool(path) == (
            "x-next" in page.headers
        )
    rows = pl.read_csv(text.encode())
    assert (rows.height, rows["workload"].unique().to_list()) == (1_250, ["shop/web"])
    for wrong in ("format=delta", "limit=10001", "context=1", "cursor=x"):
        assert asked.ask(f"/api/v1/export?{wrong}").status == 400
    assert asked.ask("/api/v1/keys/exports", "DELETE").status == 200


def test_notes_are_written_and_read_by_those_who_see_the_incident(
    asked: Asked, both: tuple[Verb, Verb]
) -> None:
    names = {one.workloads[0]: one.id for one in asked.client.incidents().incidents}
    writes, reads = (asked.new_key(f"note-{scope}", scope, only=("shop/web",)) for scope in ("mark", "read"))
    own, other = (f"/api/v1/incidents/{names[name]}/notes" for name in ("shop/web", "other"))
    assert wait_until(lambda: asked.ask(own, key=reads).status == 200, timeout_s=5)
    note = {"text": f"the disk was full {MARKUP}"}
    made = asked.ask(own, "POST", key=writes, body=note)
    assert (made.status, made.json["by"], made.json["text"]) == (201, "note-mark", note["text"]), made
    assert asked.ask(own, "POST", key=reads, body=note).status == 403
    for key in (writes, reads):
        assert asked.ask(other, key=key).status == 404
    assert asked.ask(other, "POST", key=writes, body=note).status == 404
    for wrong in ({"text": " "}, {"text": "x" * 2_001}, {"text": ""}, {}, {"text": "a", "by": "me"}):
        assert asked.ask(own, "POST", body=wrong).status == 400
    listed = asked.ask(own, "POST", body=["a"])
    assert listed.json["detail"] == "the body is no JSON object; send one with Content-Type: application/json"
    asked.client.write_note(names["shop/web"][:8], "calm again")
    texts = [one.text for one in asked.client.incident_notes(names["shop/web"][:8])]
    assert texts == [note["text"], "calm again"]
    here, there = (run("incidents", names["shop/web"][:8]) for run in both)
    assert here.out == there.out and "notes, the oldest first:" in here.out and "\x1b" not in here.out
    said = both[0]("incidents", names["shop/web"][:8], "--note", "from the machine", "--json")
    assert json.loads(said.out)["text"] == "from the machine"
    assert "of one incident" in both[0]("incidents", "--note", "x").err
    audit = asked.get("/audit?limit=3")["entries"]
    assert [one["action"] for one in audit] == ["incident.note"] * 3
    assert audit[2]["by"] == "note-mark" and "full" not in json.dumps(audit)
    for name in ("note-mark", "note-read"):
        assert asked.ask(f"/api/v1/keys/{name}", "DELETE").status == 200


def test_status_and_gpu_top_print_the_same_but_for_the_moment(both: tuple[Verb, Verb]) -> None:
    for verb in (("status",), ("gpu", "top", "--once")):
        here, there = (run(*verb) for run in both)
        assert there.code == here.code == 0
        first = [line.split()[:1] for line in here.out.splitlines()]
        assert [line.split()[:1] for line in there.out.splitlines()] == first
    tenants = [json.loads(run("gpu", "tenants", "--json").out) for run in both]
    assert tenants[0][0].keys() == tenants[1][0].keys() and tenants[0][0]["tenant"] == tenants[1][0]["tenant"]
    here, there = (json.loads(run("status", "--json").out) for run in both)
    assert here.keys() == there.keys() and here["workloads"] == there["workloads"]


def test_a_verb_that_changes_things_says_that_it_works_on_the_machine(both: tuple[Verb, Verb]) -> None:
    for verb in ("train", "watch add a", "mark 1 normal", "dead retry all", "gpu release a --token 1", "up",
                 "models rollback", "results files", "keys revoke a", "backfill s3://b/p", "silence a --for 1h --why w",
                 "incidents a --note b", "store"):  # fmt: skip
        said = both[1](*verb.split())
        assert (said.code, "leave out --url" in said.err) == (2, True), said


def test_a_client_says_in_one_sentence_what_is_wrong(asked: Asked) -> None:
    with pytest.raises(NotFound, match="there is no incident"):
        asked.client.incident("nothing")
    with pytest.raises(BadInput, match="key is not known"):
        Client(asked.url, "lw_wrong").status()
    with pytest.raises(SourceUnavailable, match="does not answer"):
        Client("http://127.0.0.1:9", "lw_wrong").status()
    for url in ("127.0.0.1:4380", "ftp://host", "http://host:port", "http://"):
        with pytest.raises(BadInput, match="is no address of an API"):
            Client(url)
    page = asked.client.lines(LinesAsked(limit=1_200, workload="shop/*", since=BEGIN - timedelta(hours=1)))
    assert len(page.lines) == 1_200 and isinstance(page.lines[0], Line) and page.next is not None
    now = datetime.now(UTC)
    patterns = asked.client.patterns(PatternsAsked(since=now - timedelta(days=1), until=now, limit=1))
    assert len(patterns.patterns) == 1 and patterns.patterns[0].first.tzinfo is not None
    assert asked.client.rates(now - timedelta(days=1), now, "shop/web").workloads[0].records == 1_250


def test_a_client_asks_beside_and_decides(asked: Asked) -> None:
    now, here = datetime.now(UTC), Local(asked.settings)
    span = (BEGIN - timedelta(hours=1), now)
    for reader in (asked.client, here):
        found = reader.compare(f"{BEGIN.isoformat()}..{now.isoformat()}", workload="shop/*")
        assert (found.lines, found.differences[0].kind) == ((2_500, 0), ChangeKind.NEW)
        fewer = reader.compare("1d", workload="shop/*", other="nothing", kind=ChangeKind.GONE)
        assert fewer.differences == []
        assert reader.sessions(*span) == []
        session = reader.session("line 1200", *span)
        assert [line.line for line in session.lines] == [1_200] and session.key == "line 1200"
        values = reader.values(1, *span, workload="shop/db", lines=20)
        assert (values.lines, values.levels) == (20, {"info": 20})
    name = asked.client.incidents().incidents[0].id
    decided = asked.client.decide(name[:8], Action.SNOOZE, lasts="2h", why="a test")
    assert (decided.id, decided.state, decided.decision and decided.decision.why) == (
        name,
        "snoozed",
        "a test",
    )
    with pytest.raises(BadInput, match="'9x' is no length of a snooze"):
        asked.client.decide(name, Action.SNOOZE, lasts="9x")
    assert asked.client.decide(name, Action.REOPEN).decision is None
    made = asked.client.silence("other", lasts="1h", why="a test", template="T1")
    assert [one.id for one in here.silences()] == [made.id] and asked.client.silences()[0].incidents == 1
    states = {one.workloads[0]: one.state for one in asked.client.incidents().incidents}
    assert states["other"] == "silenced" and "silenced" not in states["shop/web"]
    assert asked.client.end_silence(made.id[:6]).expired
    with pytest.raises(NotFound, match="no silence"):
        asked.client.end_silence("nothing")


def test_a_client_that_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(_message: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(api_module, "SEND_S", 0.05)
    with pytest.raises(TimeoutError):
        asyncio.run(api_module._patient(stuck)({"type": "http.response.body"}))


def test_the_specification_is_the_one_in_the_repository(asked: Asked) -> None:
    served = asked.ask("/api/v1/openapi.json", key="").json
    kept = json.loads((ROOT / "docs" / "openapi.json").read_text(encoding="utf-8"))
    assert served == kept, "run scripts/openapi"


# Without an endless stream of names; the one of events is asked without `follow`.
SPECIFICATION = schemathesis.openapi.from_dict(specified_app().openapi()).exclude(path="/api/v1/events")
OPERATIONS = [found.ok() for found in SPECIFICATION.get_all_operations()]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda found: found.label)
def test_what_a_machine_makes_up_from_the_specification_breaks_nothing(
    operation: Any, asked: Asked, share: float
) -> None:
    keys = SenderKeys(asked.redis, asked.settings)
    known = {one.name for one in keys.look()}

    # A training that is asked for begins, and imports torch.
    few = (
        3 if (operation.method, operation.path) == ("post", "/api/v1/trainings") else max(3, round(8 * share))
    )

    @examples(max_examples=few, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def holds(case: Any) -> None:
        (case.query or {}).pop("follow", None)
        answer = case.call(base_url=asked.url, headers={"Authorization": f"Bearer {asked.key}"}, timeout=60)
        case.validate_response(
            answer,
            checks=[
                not_a_server_error, status_code_conformance, content_type_conformance,
                response_schema_conformance,
            ],
        )  # fmt: skip

    try:
        holds()
    finally:  # other tests find the trainings and the keys that were there
        for one in asked.get("/trainings?limit=50") if operation.path == "/api/v1/trainings" else ():
            asked.ask(f"/api/v1/trainings/{one['request_id']}/cancel", "POST")
        for name in {one.name for one in keys.look()} - known:
            keys.revoke(name)
    assert wait_until(lambda: not _trains(asked), timeout_s=60)


def _trains(asked: Asked) -> bool:
    states = [one["state"] for one in asked.get("/trainings?limit=50")]
    return any(state not in ("cancelled", "failed", "completed") for state in states)
