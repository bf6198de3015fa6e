"""The console over a week of stored lines: time of each page, memory, and what pages cost that stay open.

A process of the API with a Redis of its own and nothing else, asked over HTTP with the cookie of a session,
warm. Each request asks the store: spans, keys and lines differ from request to request, because open pages
share an answer for seconds. The figures of shared answers are those with `_shared`. Of a kept store the
process takes the time of the newest line for now."""

import argparse
import http.client
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from statistics import quantiles
from typing import Any, Final
from urllib.parse import quote, urlsplit

import psutil
import redis

from bench._running import scratch
from bench._week import DAYS, WORKLOADS, filled, groups
from pipeline.ledger.ledger import Ledger
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.service.access.console_sessions import LOCAL, ConsoleSessions
from pipeline.service.access.keys import SenderKeys, key_digest
from pipeline.service.access.own_key import make_own_key
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.watching.incidents.live import IncidentEvent, Incidents
from pipeline.workers.stack.private_redis import PrivateRedis

REQUESTS: Final = 40
OPEN_PAGES: Final = 50
LIVE_S: Final = 60.0
INCIDENTS: Final = 100
CHANGE_S: Final = 5.0  # between two changes of an incident, while pages are open
FIVE: Final = timedelta(minutes=5)  # spans of whole ones are those that people ask for


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--lines", type=int, default=5_000_000, help="stored lines (5,000,000)")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the store in DIR; one that lies there is only asked"
    )


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    with scratch() as folder:
        results = (args.keep or folder) / "results"
        if not results.exists():
            start = _now() - timedelta(days=DAYS)
            filled(ParquetSink(results), groups(data, folder, args.lines, start), args.lines, start)
        parts = ParquetSink(results).parts()
        with _api(folder, results) as api:
            pages = api.pages()
            search = max(
                api.ms(f"/lines?{api.span(1)}&q={word}") for word in ("exception", "nothing%20like%20it")
            )
            live = api.live()
            return {
                "lines": sum(part.rows for part in parts),
                "pages": pages,
                "search_first_s": round(search / 1000, 2),
                "rss_mib": api.peak_mib(),
                "live_pages_core_percent": live,
            }


@dataclass(slots=True, kw_only=True)
class _Api:
    """The process, and who asks it. `cookies`: of the machine's own user, then of keys that see all
    workloads, each by other patterns."""

    url: str
    process: psutil.Process
    settings: Settings
    client: "redis.Redis"
    connection: http.client.HTTPConnection
    cookies: Sequence[str]
    until: datetime  # of the newest line
    incidents: Incidents

    def pages(self) -> dict[str, dict[str, float]]:
        """p50 and p95 by the name of a page."""
        lines, patterns = self._lines(), self._patterns()
        return {
            "now": self._times(lambda _: "/", fresh=True),
            "now_shared": self._times(lambda _: "/"),
            "patterns_24h": self._times(lambda n: f"/patterns?{self.span(1, n)}"),
            "patterns_24h_shared": self._times(lambda _: f"/patterns?{self.span(1)}"),
            "patterns_7d": self._times(lambda n: f"/patterns?{self.span(7, n)}"),
            "pattern": self._times(lambda n: patterns[n % len(patterns)]),
            "lines": self._times(lambda n: f"/lines?{self.span(1)}&workload=team-{n % WORKLOADS:02}"),
            "line_context": self._times(lambda n: lines[n % len(lines)]),
            "line_search": self._times(lambda n: f"/lines?{self.span(1)}&q=exception&workload=team-{n % WORKLOADS:02}"),
            "incidents": self._times(lambda _: "/incidents", fresh=True),
        }  # fmt: skip

    def span(self, days: int, other: int = 0) -> str:
        """Parameters of days up to the newest line. `other`: makes it a span that nobody has asked for."""
        since = self.until - timedelta(days=days) - other * FIVE
        return f"since={quote(since.isoformat())}&until={quote(self.until.isoformat())}"

    def ms(self, path: str, cookie: int = 0) -> float:
        """Milliseconds of one request."""
        began = time.perf_counter()
        self.get(path, cookie)
        return (time.perf_counter() - began) * 1000

    def get(self, path: str, cookie: int = 0) -> str:
        """Raises RuntimeError."""
        self.connection.request("GET", path, headers={"Cookie": self.cookies[cookie]})
        answer = self.connection.getresponse()
        body = answer.read().decode()
        if answer.status != 200:
            raise RuntimeError(f"{path} answers {answer.status}: {body[:500]}")
        return body

    def peak_mib(self) -> int:
        """The largest resident set of the process so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) // 1024

    def live(self) -> float:
        """Percent of a core while pages are open and something changes every second."""
        command = [sys.executable, "-m", "bench._console_pages", self.url, self.cookies[0], str(OPEN_PAGES)]
        visitors = subprocess.Popen([*command, str(LIVE_S + 15)], stdout=subprocess.PIPE, text=True)
        time.sleep(12)  # all pages are open
        before, began = _spent_s(self.process), time.monotonic()
        ledger = Ledger(self.client, self.settings)
        last = 0.0
        while time.monotonic() - began < LIVE_S:
            self.client.hincrby(ledger.keys.counts, "batches", 1)
            if time.monotonic() - last > CHANGE_S:
                last = time.monotonic()
                self.put_incidents(1)
            time.sleep(1)
        percent = 100 * (_spent_s(self.process) - before) / (time.monotonic() - began)
        said, _ = visitors.communicate(timeout=60)
        fetched, strips, size = map(int, said.split())
        if fetched < OPEN_PAGES * LIVE_S / CHANGE_S / 2:
            raise RuntimeError(f"the open pages have fetched only {fetched} times")
        print(f"{fetched} pages and {strips} lines of figures, {size / 2**20:.1f} MiB", file=sys.stderr)
        return round(percent, 1)

    def put_old_incidents(self) -> None:
        """INCIDENTS that have ended, one each 20 minutes."""
        for n in range(INCIDENTS, 0, -1):
            at = datetime.now(UTC) - n * timedelta(minutes=20)
            self.incidents.add([_event(f"team-{n % WORKLOADS:02}/app", n, at)])
            self.incidents.close(at + timedelta(minutes=10))
        self.put_incidents(0)

    def put_incidents(self, more: int) -> None:
        """Some more incidents, of several workloads each."""
        for _ in range(more):
            at = datetime.now(UTC)
            self.incidents.add(_event(f"team-{n:02}/app", n + 1, at) for n in range(3))
        self.client.set(Keys(self.settings.redis.key_prefix).watching("incidents"), self.incidents.pack())

    def _times(self, path: Callable[[int], str], *, fresh: bool = False) -> dict[str, float]:
        """`fresh`: each request by another key, whose pages share nothing with others."""
        self.get(path(REQUESTS))
        found = [self.ms(path(n), 1 + n if fresh else 0) for n in range(REQUESTS)]
        cuts = quantiles(found, n=20, method="inclusive")
        return {"p50_ms": round(cuts[9], 1), "p95_ms": round(cuts[18], 1)}

    def _patterns(self) -> list[str]:
        """Addresses of patterns."""
        page = self.get(f"/patterns?{self.span(1)}")
        return [
            f"{one}?{self.span(1)}" for one in dict.fromkeys(re.findall(r'"(/patterns/T[1-9][0-9]*)', page))
        ]

    def _lines(self) -> list[str]:
        """Addresses of lines of several workloads and days."""
        found = []
        for day in range(DAYS - 1):
            until = self.until - timedelta(days=day)
            since = until - timedelta(hours=2)
            page = self.get(f"/lines?since={quote(since.isoformat())}&until={quote(until.isoformat())}")
            found += re.findall(r'class="at"(?: data-open)? href="([^"]+)"', page)[::14]
        return [unescape(one) for one in found]


@contextmanager
def _api(folder: Path, results: Path) -> Iterator[_Api]:
    """The process in front of these results."""
    data_dir = folder / "data"
    data_dir.mkdir()
    (data_dir / "results").symlink_to(results.resolve())
    make_own_key(data_dir)
    server = PrivateRedis(Settings(data_dir=data_dir))
    database = server.start()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    settings = Settings(data_dir=data_dir, redis_url=server.url, api=url)
    newest = datetime.fromtimestamp(max(part.last_us for part in ParquetSink(results).parts()) / 1e6, UTC)
    behind = max(0.0, (datetime.now(UTC) - newest).total_seconds())
    with (folder / "api.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench._api_then", str(behind)],
            env=os.environ | settings.to_environ(), stdout=log, stderr=log,
        )  # fmt: skip
    try:
        client = connect(settings)
        _wait(url, folder / "api.log", process)
        until = newest + (FIVE - (newest - datetime.fromtimestamp(0, UTC)) % FIVE)
        ledger = Ledger(client, settings)
        for n in range(WORKLOADS):
            client.sadd(ledger.keys.workloads, f"team-{n:02}/app")
            client.hset(ledger.keys.totals(f"team-{n:02}/app"), mapping={"accepted": 1_000, "stored": 1_000})
        with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)) as connection:
            api = _Api(
                url=url, process=psutil.Process(process.pid), settings=settings, client=client,
                connection=connection, cookies=_cookies(client, settings, url), until=until, incidents=Incidents(),
            )  # fmt: skip
            api.put_old_incidents()
            yield api
    finally:
        process.terminate()
        process.wait(30)
        database.terminate()
        database.wait(20)


def _cookies(client: "redis.Redis", settings: Settings, url: str) -> list[str]:
    sessions, keys, port = ConsoleSessions(client, settings), SenderKeys(client, settings), urlsplit(url).port
    found = [sessions.begin(LOCAL)]
    for n in range(REQUESTS):
        secret = keys.add(f"key-{n}", scopes=("read", "mark"), patterns=("*", f"other-{n}"))
        found.append(sessions.begin(key_digest(secret)))
    time.sleep(2)  # as long as an older ring of keys is taken
    return [f"lw_{port}={session.secret}" for session in found]


def _wait(url: str, log: Path, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((urlsplit(url).hostname or "", urlsplit(url).port or 0), 1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the API does not start: {log.read_text()[-2000:]}") from None
            time.sleep(0.1)


def _event(workload: str, cause: int, at: datetime) -> IncidentEvent:
    return IncidentEvent(
        event_id=uuid.uuid4().hex, workload=workload, cause=f"template:{cause}", kind="template", first=at, last=at,
        count=5, score=0.9, severity=3, text="disk /dev/sda1 is full", source="a.log", line=1,
    )  # fmt: skip


def _spent_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _now() -> datetime:
    return datetime.now(UTC).replace(second=0, microsecond=0)
