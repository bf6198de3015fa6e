"""`logweir doctor`: checks this machine and its servers, and names a remedy for each fault. It changes
nothing."""

import argparse
import importlib.metadata
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeline.commands.common import answering_with, display, out, print_json, settings_of
from pipeline.commands.extras import EXTRAS, SERVER, explained, missing_for
from pipeline.errors import BadInput, LogweirError
from pipeline.imports import install_hint
from pipeline.settings import Settings, unknown_variables
from pipeline.settings.kafka import KafkaSource, kafka_sources
from pipeline.settings.nats import NatsSource, nats_source
from pipeline.units import listed, plural

if TYPE_CHECKING:
    import redis

NEEDED_DISK_MIB: Final = 500
SHOWN_CLOCKS: Final = 5  # workloads whose lines are ahead of the clock
PROBE_S: Final = 5.0
# Claims and leases use the clock of Redis alone; dates of lines use the clocks of the machines.
CLOCK_S: Final = 2.0
# Shown with their versions, because reports of faults ask for them.
VERSIONS: Final = ("celery", "redis", "polars", "duckdb", "torch", "transformers", "drain3", "flower")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the answer. A warning keeps nothing from working."""

    what: str
    found: str
    ok: bool = True
    warning: bool = False


def main(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    checks = list(_checks(settings))
    bad = [c for c in checks if not c.ok]
    code = 1 if bad else 0
    with answering_with(code):
        if args.json:
            print_json({"ok": not bad, "checks": [asdict(c) for c in checks]})
        else:
            _print(checks)
    return code


def _print(checks: Sequence[Check]) -> None:
    bad, warned = sum(not c.ok for c in checks), sum(c.warning for c in checks)
    console = out()
    for check in checks:
        mark = "[green]ok[/]     " if check.ok else "[red]missing[/]"
        if check.warning:
            mark = "[yellow]warning[/]"
        console.print(mark, end=" ")
        console.print(f"{check.what}: {check.found}", markup=False, soft_wrap=True)
    well = f"nothing is missing; {plural(warned, 'warning')}" if warned else "everything is here"
    console.print(well if not bad else f"{bad} of {len(checks)} checks failed", markup=False)


def _checks(settings: Settings) -> Iterator[Check]:
    yield Check(what="Python", ok=sys.version_info >= (3, 11), found=platform.python_version())
    for unknown in unknown_variables():
        yield Check(what="environment", warning=True, found=unknown)
    yield from _package_checks()
    yield from _looked("GPU", _gpu_check)
    yield from _looked("Redis", lambda: _redis_checks(settings))
    if settings.opensearch.url is not None:
        yield from _opensearch_checks(settings)
    for source in kafka_sources(settings.kafka.source):
        yield from _looked(f"Kafka at {source.servers}", partial(_kafka_check, source))
    if nats := nats_source(settings.nats.source):
        yield from _looked(f"NATS at {','.join(nats.servers)}", partial(_nats_check, nats))
    yield _place("data directory", settings.data.dir, "--data-dir")
    if settings.data.store_url is not None:
        yield from _looked("store", lambda: _store_check(settings))
    yield from _looked("running stack", lambda: _stack_checks(settings))
    yield from _looked("live model", lambda: _model_checks(settings))
    yield from _looked("masks", lambda: _mask_check(settings))
    if settings.intake.rules is not None:
        yield from _looked("rules of workloads", partial(_rules_check, settings.intake.rules))


def _looked(what: str, look: Callable[[], str | Iterable[Check]]) -> Iterator[Check]:
    """What `look` finds. Its error or a package that it lacks is a fault with that sentence."""
    try:
        found = look()
        yield from [Check(what=what, found=found)] if isinstance(found, str) else list(found)
    except ModuleNotFoundError as exc:
        remedy = explained(exc)
        if remedy is None:
            raise
        yield Check(what=what, ok=False, found=str(remedy))
    except LogweirError as exc:
        yield Check(what=what, ok=False, found=str(exc))


def _package_checks() -> Iterator[Check]:
    """One line for each extra: `worker` is what works on lines; without another one its feature stays off."""
    versions = []
    for name in VERSIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    for extra in EXTRAS:
        missing = [name for name in missing_for(extra) if name != SERVER]  # the check of Redis says that
        lacks = f"{listed(missing, len(missing))} not installed; run: {install_hint(extra)}"
        if extra == "worker":
            yield Check(what="packages", ok=not missing, found=lacks if missing else ", ".join(versions))
        elif missing:
            yield Check(what=f"extra {extra}", found=f"left out: {lacks}")


def _gpu_check() -> Iterator[Check]:
    """Nothing fails without a GPU; what keeps one from being used is a warning."""
    from pipeline.gpu.node.probe import probe_devices

    found_gpu = probe_devices(PROBE_S)
    if found_gpu is None:
        yield Check(what="GPU", found="none (no NVIDIA driver)")
        return
    if found_gpu.trouble:
        yield Check(what="GPU", warning=True, found=f"{found_gpu.trouble}; see what `nvidia-smi` says")
        return
    found = f"{found_gpu.count or 'none'}, driver {found_gpu.driver}"
    # Wheels without CUDA say so in the local part of their version; asking torch itself takes seconds.
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""  # a line of its own says so
    blind = found_gpu.count > 0 and torch.endswith("+cpu")
    if blind:
        found += (
            f"; torch {torch} cannot use it: install a build with CUDA, see https://pytorch.org/get-started"
        )
    yield Check(what="GPU", found=found, warning=blind)


def _place(what: str, path: Path, remedy: str) -> Check:
    """A directory that has to take files; looking is no reason to leave one behind."""
    created: list[Path] = []
    try:
        created = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".probe"
        probe.write_bytes(b"x")
        probe.unlink()
        free = shutil.disk_usage(path).free // 2**20
    except OSError as exc:
        return Check(what=what, ok=False, found=f"{path}: {exc.strerror}; choose another with {remedy}")
    finally:
        for directory in created:
            if directory.exists():
                directory.rmdir()
    few = "" if free >= NEEDED_DISK_MIB else f"; at least {NEEDED_DISK_MIB} are needed"
    return Check(what=what, ok=not few, found=f"{display(path)}, {free:,} MiB free{few}")


def _store_check(settings: Settings) -> str:
    """Whether the store takes objects and honours conditions; the objects of the test are removed."""
    from pipeline.store.choose import open_store
    from pipeline.store.objects import probe

    objects = open_store(settings.data.store)
    probe(objects)
    return objects.url


def _mask_check(settings: Settings) -> str:
    from pipeline.drain.masking.mask_set import MaskSet

    masks = MaskSet.load(extra=settings.intake.masks)
    return f"{len(masks.tokens)} tokens, version {masks.version}"


def _rules_check(path: Path) -> str:
    from pipeline.sources.protocols.rules import read_rules

    return plural(len(read_rules(path).rules), "rule")


def _redis_checks(settings: Settings) -> Iterator[Check]:
    from pipeline.redis.check import check_redis, product
    from pipeline.workers.stack.private_redis import find_server, server_version

    if settings.redis.url is None:
        binary = find_server()
        yield Check(what="Redis server", found=f"{binary}, appendfsync {settings.redis.fsync}")
        yield Check(what="Redis version", found=server_version(binary))
        return
    check_redis(settings)
    import redis

    from pipeline.redis import failover
    from pipeline.redis.connection import connect

    yield Check(what="Redis", found="REDIS_URL answers")
    try:
        client = connect(settings, timeout_s=PROBE_S)
        yield Check(what="Redis version", found=product(client.info("server")))
        yield from _redis_promises(client)
        for part in failover.checks(settings, client):
            yield Check(**part)
    except redis.RedisError as exc:
        yield Check(what="Redis", warning=True, found=f"it does not tell how it is set: {exc}")


def _redis_promises(client: "redis.Redis") -> Iterator[Check]:
    """Which promises of docs/durability.md this server does not keep."""
    policy = str(client.info("memory").get("maxmemory_policy", ""))
    durable = bool(int(client.info("persistence").get("aof_enabled", 0)))
    sent = time.time()
    seconds, micros = client.time()
    fsync = _fsync(client)
    skew = abs(int(seconds) + int(micros) / 1e6 - (sent + time.time()) / 2)
    yield Check(
        what="Redis memory",
        warning=policy != "noeviction",
        found="maxmemory-policy noeviction"
        if policy == "noeviction"
        else f"maxmemory-policy {policy} may drop accepted batches when memory is short; set it to noeviction",
    )
    yield Check(
        what="Redis on disk",
        warning=not durable or fsync == "no",
        found=f"appendonly yes{_risk(fsync)}"
        if durable
        else "appendonly no: what was accepted is lost when Redis dies or its machine does; set appendonly yes",
    )
    yield Check(
        what="clocks",
        warning=skew > CLOCK_S,
        found=f"{skew:.1f} s apart from Redis"
        + (", so lines are dated wrongly; run a time service on both machines" if skew > CLOCK_S else ""),
    )


def _fsync(client: "redis.Redis") -> str:
    """How often a Redis of others syncs, where it tells: many refuse CONFIG."""
    import redis

    try:
        how = dict(client.config_get("appendfsync")).get("appendfsync", "")
    except redis.ResponseError:
        return ""
    return how.decode() if isinstance(how, bytes) else str(how)


def _risk(fsync: str) -> str:
    risky = "; a power cut may lose more than seconds, set everysec or always" if fsync == "no" else ""
    return f", appendfsync {fsync}{risky}" if fsync else ""


def _stack_checks(settings: Settings) -> list[Check]:
    """The embedded stack of this data directory, where one runs."""
    from pipeline.redis.attach import attached, running

    if settings.redis.url is not None or running(settings.data.dir) is None:
        return []
    from pipeline.redis.connection import connect
    from pipeline.service.running.health import read_health
    from pipeline.service.status import read_left_out

    theirs = attached(settings)
    client = connect(theirs, timeout_s=PROBE_S)
    health = read_health(client, theirs, "")
    found = health.why or f"{len(health.workers)} workers are well"
    ahead = [
        Check(what=f"clock of {name}", warning=True, found=one.sentences[0])
        for name, one in read_left_out(client, theirs).items()
        if one.ahead
    ]
    return [Check(what="running stack", ok=health.ok, found=found), *ahead[:SHOWN_CLOCKS]]


def _model_checks(settings: Settings) -> list[Check]:
    """Live models that this build cannot read; nothing where there is none."""
    from pipeline.redis.attach import attached, running

    if settings.redis.url is None and running(settings.data.dir) is None:
        return []
    from pipeline.models.registry import Registry
    from pipeline.records.versions import outdated_words
    from pipeline.redis.connection import connect

    theirs = attached(settings) if settings.redis.url is None else settings
    outdated = Registry(connect(theirs, timeout_s=PROBE_S), theirs).outdated()
    return [Check(what="live model", ok=False, found=outdated_words(live)) for live in outdated]


def _opensearch_checks(settings: Settings) -> Iterator[Check]:
    """Whether the server allows writing results and reading logs; changes nothing there."""

    def results() -> str:
        from pipeline.sinks.opensearch import OpenSearchSink

        return OpenSearchSink(settings).probe()

    def source() -> str:
        from pipeline.opensearch.client import opensearch_client
        from pipeline.sources.opensearch import Poller

        pieces = Poller(opensearch_client(settings, reading=True), settings).poll(None)
        first = next(pieces, None)
        pieces.close()  # type: ignore[attr-defined] # a generator: gives its point in time back now
        return f"{settings.opensearch.source} can be read{'' if first else ', and is empty'}"

    yield from _looked("OpenSearch results", results)
    if settings.opensearch.source:
        yield from _looked("OpenSearch source", source)


def _kafka_check(source: KafkaSource) -> str:
    """Whether the topics of an address can be read; no group of Kafka learns of it."""
    from pipeline.sources.kafka.client import KafkaCluster

    cluster = KafkaCluster(source)
    try:
        _, topics = cluster.look()
        for topic in topics:
            cluster.span((topic.name, 0))
    finally:
        cluster.close()
    if not topics:
        raise BadInput(f"no topic is called {' or '.join(source.topics)}")
    counts = ", ".join(f"{topic.name} ({plural(topic.partitions, 'partition')})" for topic in topics[:5])
    more = f" and {len(topics) - 5} more" if len(topics) > 5 else ""
    return f"{counts}{more} can be read"


def _nats_check(source: NatsSource) -> str:
    """Whether the server of the gateway answers; nothing is made there."""
    from pipeline.nats.streams import described

    return described(source)
