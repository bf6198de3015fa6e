"""The image, and the services of docker-compose.yml as containers of two hosts with one Redis and one store.

    [TORCH=cpu] scripts/test tests/e2e/test_images.py --images /tmp/containers -rP

Needs root and the container engine beside the repository. Both hosts are networks of one machine. The second
one reaches Redis at its published address alone. Docker Compose itself is not run, and no GPU service is.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import polars as pl
import pytest
import redis
from compose import dot_envs, services
from containers import SETUP, Engine, Host
from opensearch_proxy import proxy_to

from e2e import harness
from e2e.harness import Command, environment, novel, ordinary
from pipeline.observe.presence import Presence
from pipeline.opensearch.client import opensearch_client
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE = ROOT / "docker-compose.yml"
USER: Final = 10001
LOGIN: Final = "user:password"
# The first process of a container: an ordinary user without any capability, and no way to more.
POWERLESS: Final = {
    "Uid": f"{USER}",
    "Gid": f"{USER}",
    "CapEff": "0" * 16,
    "CapBnd": "0" * 16,
    "NoNewPrivs": "1",
}
# A training takes seconds, and batches of a dead host are done again sooner.
SETTINGS: Final = {
    "LOGWEIR_INTERNAL_CLAIM_TTL_MS": "3000",
    "LOGWEIR_INTERNAL_OVERDUE_MS": "1000",
}

# Fourteen workers begin at once.
until = partial(harness.until, within_s=300.0)
pytestmark = pytest.mark.timeout(1800)


@dataclass(slots=True)
class Both:
    """Two hosts, and the machine of whoever uses them."""

    one: Host
    two: Host
    logweir: Command
    settings: Settings

    def json(self, *words: object) -> Any:
        done = self.logweir(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def send(self, lines: list[str], workload: str) -> None:
        path = self.logweir.cwd / f"{workload}.log"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        done = self.logweir("send", path, "--workload", workload)
        assert done.returncode == 0, done.stderr

    def stored(self, workload: str, lines: int) -> pl.DataFrame:
        """The rows of a workload once the ledger says that all lines are stored."""

        def settled() -> bool:
            with connect(self.settings) as client:
                return int(client.hget(f"{{logweir}}:totals:{workload}", "stored") or 0) == lines

        until(settled, what=f"{lines} lines of {workload} are stored")
        return parquet_of(self.settings).scan().filter(pl.col("workload") == workload).collect()

    def serving(self, version: str) -> set[str]:
        """The machines with a worker that answers under this version."""
        said = Presence(connect(self.settings), self.settings).serving()
        return {
            name.partition("@")[2] for name, served in said.items() if version in served.versions.values()
        }


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    folder = request.config.getoption("--images")
    if folder is None:
        pytest.skip("builds an image of gigabytes; ask for it with --images DIR")
    made = Engine.in_folder(folder, environment("images"))
    began = time.monotonic()
    tag = services([COMPOSE], {})["ingest"].image
    made.build(
        ROOT / "Dockerfile", tag, **{name: os.environ[name] for name in ("TORCH",) if name in os.environ}
    )
    size = int(made("podman", "image", "inspect", "--format={{.Size}}", tag).stdout)
    print(f"built in {time.monotonic() - began:.0f} s, {size / 1e9:.2f} GB")
    return made


@pytest.fixture(scope="module")
def index(request: pytest.FixtureRequest) -> Iterator[str]:
    """An OpenSearch that containers reach, or "" where there is none."""
    if not (SETUP.parent.parent / "opensearch").exists():
        yield ""
        return
    with proxy_to(request.getfixturevalue("opensearch"), address=address()) as proxy:
        yield proxy.url


@pytest.fixture(scope="module")
def both(engine: Engine, index: str) -> Iterator[Both]:
    """Both hosts, when each of their health checks is met."""
    folder = Path(tempfile.mkdtemp(prefix="logweir-images-"))
    store = folder / "store"
    store.mkdir()
    os.chown(store, USER, USER)
    password = secrets.token_hex(8)

    def written(dot_env: dict[str, str], port: int = 6379) -> dict[str, str]:
        """The page's own text, with our address, password and folder in it."""
        put = {"10.0.0.1:6379": f"{address()}:{port}", "10.0.0.1": address(), "/mnt/logweir": str(store)}
        for old, new in {**put, "PASSWORD": password}.items():
            dot_env = {name: value.replace(old, new) for name, value in dot_env.items()}
        return {**dot_env, **SETTINGS}

    of_first, of_further = dot_envs(ROOT / "docs" / "machines.md")
    more = {"FLOWER_BASIC_AUTH": LOGIN}
    if index:
        more |= {"OPENSEARCH_URL": index, "LOGWEIR_OPENSEARCH_SOURCE": "app-logs-*"}
    profiles = ["flower", *(["opensearch"] if index else [])]
    one = Host("one", engine, services([COMPOSE], written(of_first) | more, profiles=profiles))
    one.choose_ports()
    env = written(of_further, one.ports["redis"])
    url = env["REDIS_URL"]
    files = [ROOT / name for name in env["COMPOSE_FILE"].split(":")]
    two = Host("two", engine, services(files, env))
    outside = {
        "REDIS_URL": url,
        "LOGWEIR_STORE_URL": store.as_uri(),
        "LOGWEIR_DATA_DIR": str(folder / "data"),
    }
    settings = Settings(redis_url=url, store_url=store.as_uri(), data_dir=folder / "data")
    try:
        for host in (one, two):
            host.clear()  # what a killed test has left
            began = time.monotonic()
            host.start()
            for service in host.services:
                until(lambda host=host, service=service: host.is_well(service), what=f"{service} is healthy")
            print(
                f"host {host.name}: {len(host.services)} services healthy in {time.monotonic() - began:.0f} s"
            )
        yield Both(one, two, Command("images", folder, outside), settings)
    finally:
        print(one.logs(), two.logs(), sep="\n")
        one.clear()
        two.clear()
        shutil.rmtree(folder, ignore_errors=True)


def address() -> str:
    """An address of this machine that containers reach; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def page(port: int, path: str, login: str = "") -> str:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if login:
        asked.add_header("Authorization", f"Basic {b64encode(login.encode()).decode()}")
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return str(answer.read().decode())


def test_containers_run_as_an_ordinary_user_who_can_change_nothing_but_data_and_store(both: Both) -> None:
    for host in (both.one, both.two):
        for service in host.services.keys() - {"redis"}:
            lines = host.inside(service, "cat", "/proc/1/status").splitlines()
            said = {
                name: value.split()[0]
                for name, _, value in (line.partition(":\t") for line in lines)
                if value
            }
            assert POWERLESS.items() <= said.items(), service
            mounts = [line.split() for line in host.inside(service, "cat", "/proc/1/mounts").splitlines()]
            assert next(options for _, at, _, options, *_ in mounts if at == "/").startswith("ro")
    # A number: an orchestrator that demands a user other than root cannot look a name up.
    image = both.one.services["ingest"].image
    assert (
        both.one.engine("podman", "image", "inspect", "--format={{.User}}", image).stdout.strip()
        == "10001:10001"
    )


def test_a_module_in_the_data_directory_is_not_imported(both: Both) -> None:
    both.one.inside("store", "sh", "-c", "echo 'raise SystemExit(\"taken from /data\")' > /data/redis.py")
    assert "is well" in both.one.inside("store", "python", "-m", "pipeline.cli", "health", "store@")


def test_redis_asks_for_the_password_and_flower_for_its_login(both: Both) -> None:
    with redis.Redis(address(), both.one.ports["redis"]) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    port = both.one.ports["flower"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        page(port, "/workers")
    machines = {host.machine("ingest") for host in (both.one, both.two)}
    until(
        lambda: all(name in page(port, "/workers", LOGIN) for name in machines),
        what="Flower shows the workers of both hosts",
    )
    assert "logweir_" in page(both.one.ports["metrics"], "/metrics")


def test_two_hosts_share_redis_and_store_and_one_does_the_work_of_the_other(both: Both) -> None:
    """One test: each part begins where the one before ended."""
    both.send(ordinary(300), "shop")
    rows = both.stored("shop", 300)
    assert rows.height == rows["record_id"].n_unique() == 300
    trained = both.json("train")
    version = trained["version"]
    answering = {host.machine(s) for host in (both.one, both.two) for s in ("ingest", "infer-cpu", "drain")}
    until(lambda: both.serving(version) >= answering, what="both hosts serve what one has trained")
    status = both.json("status")
    assert status["model"]["version"] == version and not status["model_faults"]
    assert {host.machine("ingest") for host in (both.one, both.two)} <= {
        worker["name"].partition("@")[2] for worker in status["workers"]
    }
    shown = both.json("results", "--workload", "shop", "--limit", "1000")
    assert len(shown) == 300
    batches = _sent_until_host_two_works(both)
    both.two.kill()
    for number in range(batches):
        rows = both.stored(f"dying{number}", 300)
        assert rows.height == rows["record_id"].n_unique() == 300
    assert both.logweir("health").returncode == 0
    both.two.start()
    live = both.json("status")["model"]["version"]
    until(lambda: both.serving(live) & {both.two.machine("infer-cpu")}, what="host two serves again")
    assert both.json("status")["model_faults"] == {}


def _sent_until_host_two_works(both: Both) -> int:
    """Sends batches of lines that no cache knows until host two has done a step; returns their number."""
    for number in range(40):
        both.send(novel(300, "dying" + "abcdefghij"[number % 10] + "klmn"[number // 10]), f"dying{number}")
        if any("batch.step" in both.two.log(service) for service in ("ingest", "infer-cpu")):
            return number + 1
    pytest.fail("host two has done nothing of 40 batches")


def test_a_container_that_dies_starts_again_and_redis_with_what_was_stored(both: Both) -> None:
    both.send(novel(100, "before"), "before")
    both.stored("before", 100)
    for service in ("drain", "store", "redis"):
        os.kill(both.one.pid(service), signal.SIGKILL)
    for service in ("redis", "drain", "store"):
        until(lambda service=service: both.one.is_well(service), what=f"{service} is healthy again")
    both.send(novel(100, "after"), "after")
    assert both.stored("after", 100)["record_id"].n_unique() == 100
    assert both.stored("before", 100)["record_id"].n_unique() == 100


def test_the_source_reads_an_index(both: Both, index: str) -> None:
    if not index:
        pytest.skip("OpenSearch is not here")
    client = opensearch_client(Settings(opensearch_url=index))
    where = {"cluster_id": "c", "namespace_name": "n", "deployment": "d"}
    for i in range(20):
        document = {"@timestamp": f"2026-11-20T10:00:{i:02d}Z", "message": f"user {i} logged in", **where}
        client.index(index="app-logs-1", id=str(i), body=document, params={"refresh": "true"})
    with contextlib.closing(client):
        rows = both.stored("c/n/d", 20)
    assert rows.height == rows["record_id"].n_unique() == 20
    assert both.one.is_well("source")
