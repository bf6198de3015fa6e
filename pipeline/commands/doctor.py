"""`logweir doctor`: checks this machine and its servers, and names a remedy for each fault. It changes
nothing."""

import argparse
import importlib.metadata
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.commands.common import display, out, print_json, settings_of
from pipeline.errors import LogweirError
from pipeline.settings import Settings
from pipeline.settings.kafka import KafkaSource, kafka_sources
from pipeline.settings.nats import nats_source
from pipeline.units import plural

if TYPE_CHECKING:
    import redis

NEEDED_DISK_MIB: Final = 500
PROBE_S: Final = 5.0
# Claims and leases use the clock of Redis alone; dates of lines use the clocks of the machines.
CLOCK_S: Final = 2.0


def main(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    checks = list(_checks(settings))
    bad = [c for c in checks if not c["ok"]]
    warned = sum(bool(c.get("warning")) for c in checks)
    if args.json:
        print_json({"ok": not bad, "checks": checks})
        return 1 if bad else 0
    console = out()
    for check in checks:
        mark = "[green]ok[/]     " if check["ok"] else "[red]missing[/]"
        if check.get("warning"):
            mark = "[yellow]warning[/]"
        console.print(mark, end=" ")
        console.print(f"{check['what']}: {check['found']}", markup=False, soft_wrap=True)
    well = f"nothing is missing; {plural(warned, 'warning')}" if warned else "everything is here"
    console.print(well if not bad else f"{len(bad)} of {len(checks)} checks failed", markup=False)
    return 1 if bad else 0


def _checks(settings: Settings) -> "list[dict[str, Any]]":
    def check(what: str, ok: bool, found: str) -> dict[str, Any]:
        return {"what": what, "ok": ok, "found": found}

    found = [check("Python", sys.version_info >= (3, 11), platform.python_version())]
    for name in ("celery", "redis", "polars", "torch", "transformers", "drain3", "opensearch-py", "flower"):
        try:
            found.append(check(name, True, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(check(name, False, f"not installed; run: pip install {name}"))
    found.append(_gpu_check())
    found += _redis_checks(settings)
    if settings.opensearch.url is not None:
        found += _opensearch_checks(settings)
    found += _kafka_checks(settings)
    found += _nats_checks(settings)
    found.append(_place("data directory", settings.data.dir, "--data-dir"))
    if settings.data.store_url is not None:
        found.append(_store_check(settings))
    found += _stack_checks(settings)
    try:
        from pipeline.drain.masking.mask_set import MaskSet

        masks = MaskSet.load(extra=settings.intake.masks)
        found.append(check("masks", True, f"{len(masks.tokens)} tokens, version {masks.version}"))
    except LogweirError as exc:
        found.append(check("masks", False, str(exc)))
    if settings.intake.rules is not None:
        try:
            from pipeline.sources.protocols.rules import read_rules

            count = len(read_rules(settings.intake.rules).rules)
            found.append(check("rules of workloads", True, plural(count, "rule")))
        except LogweirError as exc:
            found.append(check("rules of workloads", False, str(exc)))
    return found


def _gpu_check() -> dict[str, Any]:
    """Nothing fails without a GPU; what keeps one from being used is a warning."""
    from pipeline.gpu.node.probe import probe_devices

    found_gpu = probe_devices(PROBE_S)
    if found_gpu is None:
        return {"what": "GPU", "ok": True, "found": "none (no NVIDIA driver)", "warning": False}
    if found_gpu.trouble:
        found = f"{found_gpu.trouble}; see what `nvidia-smi` says"
        return {"what": "GPU", "ok": True, "found": found, "warning": True}
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
    return {"what": "GPU", "ok": True, "found": found, "warning": blind}


def _place(what: str, path: Path, remedy: str) -> dict[str, Any]:
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
        found = f"{path}: {exc.strerror}; choose another with {remedy}"
        return {"what": what, "ok": False, "found": found}
    finally:
        for directory in created:
            if directory.exists():
                directory.rmdir()
    few = "" if free >= NEEDED_DISK_MIB else f"; at least {NEEDED_DISK_MIB} are needed"
    return {"what": what, "ok": not few, "found": f"{display(path)}, {free:,} MiB free{few}"}


def _store_check(settings: Settings) -> dict[str, Any]:
    """Whether the store takes objects and honours conditions; the objects of the test are removed."""
    from pipeline.store.choose import open_store
    from pipeline.store.objects import probe

    try:
        objects = open_store(settings.data.store)
        probe(objects)
    except ModuleNotFoundError:
        found = "s3:// needs a package that is not installed; run: pip install 'logweir[s3]'"
        return {"what": "store", "ok": False, "found": found}
    except LogweirError as exc:
        return {"what": "store", "ok": False, "found": str(exc)}
    return {"what": "store", "ok": True, "found": objects.url}


def _redis_checks(settings: Settings) -> list[dict[str, Any]]:
    from pipeline.redis.check import check_redis
    from pipeline.redis.versions import product
    from pipeline.workers.stack.private_redis import find_server, server_version

    try:
        if settings.redis.url is None:
            binary = find_server()
            found_at = f"{binary}, appendfsync {settings.redis.fsync}"
            return [
                {"what": "Redis server", "ok": True, "found": found_at},
                _redis_version(*server_version(binary)),
            ]
        check_redis(settings)
    except LogweirError as exc:
        return [{"what": "Redis", "ok": False, "found": str(exc)}]
    import redis

    from pipeline.redis import failover
    from pipeline.redis.connection import connect

    found = [{"what": "Redis", "ok": True, "found": "REDIS_URL answers"}]
    try:
        client = connect(settings, timeout_s=PROBE_S)
        found.append(_redis_version(*product(client.info("server"))))
        promises = [*_redis_promises(client), *failover.checks(settings, client)]
        found += [{"ok": True, **part} for part in promises]
    except redis.RedisError as exc:
        found.append(
            {"what": "Redis", "ok": True, "warning": True, "found": f"it does not tell how it is set: {exc}"}
        )
    return found


def _redis_version(name: str, version: str) -> dict[str, Any]:
    """The release of the server; a warning where it has holes that are publicly known."""
    from pipeline.redis.versions import NEWEST_HINT, known_holes

    holes = known_holes(name, version)
    text = f"{name} {version or 'of unknown version'}"
    return {
        "what": "Redis version",
        "ok": True,
        "warning": bool(holes),
        "found": f"{text}: {holes}; {NEWEST_HINT}" if holes else text,
    }


def _redis_promises(client: "redis.Redis") -> list[dict[str, Any]]:
    """Which promises of docs/durability.md this server does not keep."""
    policy = str(client.info("memory").get("maxmemory_policy", ""))
    durable = bool(int(client.info("persistence").get("aof_enabled", 0)))
    sent = time.time()
    seconds, micros = client.time()
    fsync = _fsync(client)
    skew = abs(int(seconds) + int(micros) / 1e6 - (sent + time.time()) / 2)
    return [
        {
            "what": "Redis memory",
            "warning": policy != "noeviction",
            "found": "maxmemory-policy noeviction"
            if policy == "noeviction"
            else f"maxmemory-policy {policy} may drop accepted batches when memory is short; "
            "set it to noeviction",
        },
        {
            "what": "Redis on disk",
            "warning": not durable or fsync == "no",
            "found": f"appendonly yes{_risk(fsync)}"
            if durable
            else "appendonly no: what was accepted is lost when Redis dies or its machine does; "
            "set appendonly yes",
        },
        {
            "what": "clocks",
            "warning": skew > CLOCK_S,
            "found": f"{skew:.1f} s apart from Redis"
            + (", so lines are dated wrongly; run a time service on both machines" if skew > CLOCK_S else ""),
        },
    ]


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


def _stack_checks(settings: Settings) -> list[dict[str, Any]]:
    """The embedded stack of this data directory, where one runs."""
    from pipeline.redis.attach import attached, running
    from pipeline.redis.connection import connect
    from pipeline.service.running.health import read_health

    if settings.redis.url is not None or running(settings.data.dir) is None:
        return []
    try:
        theirs = attached(settings)
        health = read_health(connect(theirs, timeout_s=PROBE_S), theirs, "")
    except LogweirError as exc:
        return [{"what": "running stack", "ok": False, "found": str(exc)}]
    found = health.why or f"{len(health.workers)} workers are well"
    return [{"what": "running stack", "ok": health.ok, "found": found}]


def _opensearch_checks(settings: Settings) -> list[dict[str, Any]]:
    """Whether the server allows writing results and reading logs; changes nothing there."""
    from pipeline.opensearch.client import opensearch_client
    from pipeline.sinks.opensearch import OpenSearchSink
    from pipeline.sources.opensearch import Poller

    found: list[dict[str, Any]] = []

    def check_health(what: str, look_at: Callable[[], str]) -> None:
        try:
            found.append({"what": what, "ok": True, "found": look_at()})
        except LogweirError as exc:
            found.append({"what": what, "ok": False, "found": str(exc)})

    def source() -> str:
        pieces = Poller(opensearch_client(settings, reading=True), settings).poll(None)
        first = next(pieces, None)
        pieces.close()  # type: ignore[attr-defined] # a generator: gives its point in time back now
        return f"{settings.opensearch.source} can be read{'' if first else ', and is empty'}"

    check_health("OpenSearch results", OpenSearchSink(settings).probe)
    if settings.opensearch.source:
        check_health("OpenSearch source", source)
    return found


def _kafka_checks(settings: Settings) -> list[dict[str, Any]]:
    """Whether the topics of each address can be read; no group of Kafka learns of it."""
    return [_kafka_check(source) for source in kafka_sources(settings.kafka.source)]


def _kafka_check(source: KafkaSource) -> dict[str, Any]:
    place = f"Kafka at {source.servers}"
    try:
        from pipeline.sources.kafka.client import KafkaCluster

        cluster = KafkaCluster(source)
    except ModuleNotFoundError:
        return {"what": place, "ok": False, "found": "not installed; run: pip install 'logweir[kafka]'"}
    except LogweirError as exc:
        return {"what": place, "ok": False, "found": str(exc)}
    try:
        _, topics = cluster.look()
        for topic in topics:
            cluster.span((topic.name, 0))
    except LogweirError as exc:
        return {"what": place, "ok": False, "found": str(exc)}
    finally:
        cluster.close()
    if not topics:
        return {"what": place, "ok": False, "found": f"no topic is called {' or '.join(source.topics)}"}
    counts = ", ".join(f"{topic.name} ({plural(topic.partitions, 'partition')})" for topic in topics[:5])
    more = f" and {len(topics) - 5} more" if len(topics) > 5 else ""
    return {"what": place, "ok": True, "found": f"{counts}{more} can be read"}


def _nats_checks(settings: Settings) -> list[dict[str, Any]]:
    """Whether the server of the gateway answers; nothing is made there."""
    source = nats_source(settings.nats.source)
    if source is None:
        return []
    place = f"NATS at {','.join(source.servers)}"
    try:
        from pipeline.nats.streams import described

        return [{"what": place, "ok": True, "found": described(source)}]
    except ModuleNotFoundError:
        return [{"what": place, "ok": False, "found": "not installed; run: pip install 'logweir[nats]'"}]
    except LogweirError as exc:
        return [{"what": place, "ok": False, "found": str(exc)}]
