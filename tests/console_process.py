"""The API as its own process with a console that has something to show, and no stack behind it.

Every text that comes from senders is an attack: HOSTILE stands in every field of some lines, in templates,
incidents, dead letters and names of senders."""

import http.client
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import polars as pl
import redis
from answers_contract import row
from intake_process import free_port
from polling import wait_until
from pool_devices import put_devices
from small_backfills import put_backfills

from pipeline.drain.templates import Template, pack_template
from pipeline.gpu.pool import Pool
from pipeline.ledger.ledger import Ledger
from pipeline.records.delivery import Meta
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.service.access.console_sessions import ConsoleSessions
from pipeline.service.access.keys import SenderKeys
from pipeline.service.access.own_key import make_own_key
from pipeline.service.silences import put_silence
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.watching.incidents.live import IncidentEvent, Incidents
from pipeline.watching.rates.rates import Rates

START_S = 60.0
HOSTILE = (
    "<script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
    '<b hx-get="/out" hx-trigger=load onclick=window.pwned=1>\'"` {{ 7*7 }} ${7*7} {% if 1 %}'
    "\x1b[31mred\x1b[0m \u202egnp.exe\u2066 \x07"
)
NAME = "w/<script>window.pwned=1</script>"  # names of workloads are printable
# What of it a page may never hold as it is.
OBEYED = ("\x1b", "\u202e", "\u2066", "\x07")
PLAIN = "disk /dev/sda1 is full, 0 bytes left of 4096"
TEMPLATE, HOSTILE_TEMPLATE = 1, 2
LINES, RECENT = 1_200, 40  # stored, and of the last hour: few, for axe looks at each


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: str

    @property
    def cookie(self) -> str:
        """The pair of the cookie that it sets, "" without one."""
        return self.headers.get("set-cookie", "").partition(";")[0]


@dataclass(slots=True, kw_only=True)
class Console:
    """A console that answers at `url`."""

    settings: Settings
    redis: "redis.Redis"
    url: str
    began: datetime  # of the first line
    incidents: Incidents

    def link(self) -> str:
        """A link to it, good once."""
        return ConsoleSessions(self.redis, self.settings).link(self.url)

    def ask(
        self, path: str, *, cookie: str = "", form: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """`form`: fields of a POST."""
        sent = {"Cookie": cookie} if cookie else {}
        body = None if form is None else urlencode(form, doseq=True)
        if body is not None:
            sent["Content-Type"] = "application/x-www-form-urlencoded"
        with closing(http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)) as connection:
            connection.request("GET" if body is None else "POST", path, body, sent | (headers or {}))
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, text)

    def enter(self) -> str:
        """The cookie of a new session of the machine's own user."""
        return self.ask(self.link().removeprefix(self.url)).cookie

    def new_key(self, name: str, *scopes: str, only: tuple[str, ...] = ()) -> str:
        return SenderKeys(self.redis, self.settings).add(name, scopes=scopes, patterns=only)

    def add_incident(self, text: str, *, workload: str = "shop/web", cause: int = TEMPLATE) -> None:
        """An incident that begins now."""
        now = datetime.now(UTC)
        event = IncidentEvent(
            event_id=uuid.uuid4().hex, workload=workload, cause=f"template:{cause}", kind="template", first=now,
            last=now, count=3, score=0.97, severity=3, text=text, source="a.log", line=1,
        )  # fmt: skip
        self.incidents.add([event])
        self._put_incidents()

    def _put_incidents(self) -> None:
        self.redis.set(Keys(self.settings.redis.key_prefix).watching("incidents"), self.incidents.pack())


@contextmanager
def running_console(redis_url: str, folder: Path) -> Iterator[Console]:
    """On keys of its own, with lines of the last hour, incidents, dead letters and devices."""
    url = f"http://127.0.0.1:{free_port()}"
    settings = Settings(
        redis_url=redis_url, key_prefix=f"t{uuid.uuid4().hex[:12]}", data_dir=folder / "data", api=url
    )
    settings.data.dir.mkdir(parents=True)
    make_own_key(settings.data.dir)
    began = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=50)
    console = Console(settings=settings, redis=connect(settings), url=url, began=began, incidents=Incidents())
    _fill(console)
    with (folder / "api.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.workers.api"],
            env=os.environ | settings.to_environ(), stdout=log, stderr=log,
        )  # fmt: skip
    try:
        said = folder / "api.log"
        assert wait_until(lambda: _answers(console), timeout_s=START_S), said.read_text()
        yield console
        assert "Traceback" not in said.read_text(), said.read_text()
    finally:
        process.terminate()
        process.wait(30)


def _answers(console: Console) -> bool:
    try:
        return console.ask("/healthz").status == 200
    except OSError:
        return False


def _fill(console: Console) -> None:
    began, keys = console.began, Keys(console.settings.redis.key_prefix)
    rows = [
        row(
            n, "calm", timestamp=began + timedelta(minutes=n) if n < RECENT else began - timedelta(days=2, seconds=n), workload=f"shop/{'web' if n % 3 else 'db'}",
            message=f"disk /dev/sd{'abc'[n % 3]}1 is full, {n % 7} bytes left of 4096", host=f"host-{n % 2}",
            level="error" if n % 20 == 0 else "info", anomalous=n % 20 == 0, template_id=TEMPLATE,
            p_value=0.0004 if n % 20 == 0 else 0.4, reasons=["unlikely-tokens:full"] if n % 20 == 0 else [],
            score=0.97 if n % 20 == 0 else 0.1, model_version="20261101T000000-made",
        )
        for n in range(LINES)
    ]  # fmt: skip
    rows.append(
        row(
            0, "said", timestamp=began + timedelta(minutes=30), workload=NAME, message=f"array is lost {HOSTILE}",
            template_id=HOSTILE_TEMPLATE, pattern_id=1, score=0.5, anomalous=True,
            reasons=[f"never-said:900 {HOSTILE}"],
        )
    )  # fmt: skip
    beside = {HOSTILE: HOSTILE, "trace_id": HOSTILE, "msg": HOSTILE, "level": "error"}
    rows += [
        row(
            n, f"k{HOSTILE[:60]}", timestamp=began + timedelta(minutes=40, seconds=n), workload=NAME,
            source=HOSTILE, message=HOSTILE, host=HOSTILE, service=HOSTILE, process=HOSTILE,
            level="error" if n % 2 else HOSTILE, raw=json.dumps(beside), anomalous=True, score=0.99, p_value=1e-6,
            template_id=HOSTILE_TEMPLATE, reasons=[f"unlikely-tokens:{HOSTILE}", HOSTILE], model_version=HOSTILE,
        )
        for n in range(6)
    ]  # fmt: skip
    parquet_of(console.settings).write("older", pl.DataFrame(rows, schema=RESULT_SCHEMA))
    for number, text, workload in (
        (TEMPLATE, "disk <*> is full, <NUM> bytes left of <NUM>", "shop/web"),
        (HOSTILE_TEMPLATE, f"{HOSTILE} <*>", NAME),
    ):
        packed = pack_template(Template(template_id=number, text=text, severe=True, workload=workload))
        console.redis.hset(keys.templates, str(number), packed)
    for minutes, text, workload, number in (
        (5, PLAIN, "shop/web", TEMPLATE),
        (40, HOSTILE, NAME, HOSTILE_TEMPLATE),
    ):
        at = began + timedelta(minutes=minutes)
        event = IncidentEvent(
            event_id=str(number), workload=workload, cause=f"template:{number}", kind="template", first=at,
            last=began + timedelta(minutes=49), count=5, score=0.9, severity=3, text=text, source=HOSTILE, line=1,
        )  # fmt: skip
        console.incidents.add([event])
        console.incidents.close(at + timedelta(minutes=6))
    console._put_incidents()
    _put_dead(console)
    put_devices(Pool(console.redis, console.settings))
    put_backfills(console.settings, console.redis)
    rates = Rates()
    for minute in range(61):
        rates.detector.step(round(began.timestamp()) // 60 + minute, {TEMPLATE: 1}, judged=False)
    console.redis.hset(keys.watching("rates"), "shop/web", rates.pack())
    console.new_key("sender <b>", "send")
    put_silence(console.redis, console.settings, "nothing/*", lasts="1h", why=NAME, by=NAME)
    ledger = Ledger(console.redis, console.settings)
    console.redis.sadd(ledger.keys.workloads, "shop/web")
    console.redis.hset(ledger.keys.totals("shop/web"), mapping={"accepted": LINES, "stored": LINES})


def _put_dead(console: Console) -> None:
    ledger = Ledger(console.redis, console.settings)
    meta = Meta(
        source=HOSTILE, source_key="a", purpose="score", arrived=console.began, formats=(), zone="UTC"
    )  # type: ignore[arg-type]
    entry: dict[Any, Any] = {
        "state": "dead", "workload": "shop/web", "lines": 1, "records": 1, "bytes": 0, "kind": "",
        "meta": meta.dump(), "dead_ms": 1, "error": HOSTILE,
    }  # fmt: skip
    console.redis.hset(ledger.keys.batch("d1"), mapping=entry)
    console.redis.zadd(ledger.keys.dead, {"d1": 1})
