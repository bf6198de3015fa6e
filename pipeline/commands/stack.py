"""`logweir up | doctor`: the embedded stack and what is around it."""

import argparse
import importlib.metadata
import platform
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from pipeline.commands.common import display, err, out, print_json, settings_of
from pipeline.errors import LogweirError
from pipeline.observe import set_up
from pipeline.settings import Settings
from pipeline.values import masked_url

NEEDED_DISK_MIB: Final = 500
CHECK_S: Final = 0.5
PROBE_S: Final = 5.0


def main(args: argparse.Namespace) -> int:
    actions = {"up": _up, "doctor": _doctor}
    return actions[args.action](args)


def _up(args: argparse.Namespace) -> int:
    from pipeline.workers.local import Stack

    settings = settings_of(args, default_level="info")
    set_up(settings.log_level)
    console = err()
    with Stack(settings, flower=settings.flower) as stack:
        facts = {
            "ready_s": round(stack.ready_s, 2),
            "redis_url": masked_url(stack.settings.redis_url or ""),
            "data_dir": str(stack.settings.data_dir),
            "workers": {c.name: c.process.pid for c in stack.children},
            "flower": stack.flower_url,
        }
        if args.json:
            print_json(facts)
            sys.stdout.flush()
        else:
            where = (
                "" if str(args.data_dir or "") == "" else f" --data-dir {display(stack.settings.data_dir)}"
            )
            console.print(f"ready in {stack.ready_s:.1f} s; Ctrl-C stops it", style="bold", markup=False)
            console.print(f"  send lines:  logweir send FILE{where}", markup=False, soft_wrap=True)
            console.print(f"  look at it:  logweir status{where}", markup=False, soft_wrap=True)
            if stack.flower_url is not None:
                console.print(f"  watch it:    {stack.flower_url}", markup=False, soft_wrap=True)
            console.print(
                f"  logs:        {display(stack.settings.data_dir / 'logs')}", markup=False, soft_wrap=True
            )
        try:
            while True:
                time.sleep(CHECK_S)
                stack.check()
        except KeyboardInterrupt:
            console.print("stopping: workers finish their step first", markup=False)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    checks = list(_checks(settings))
    bad = [c for c in checks if not c["ok"]]
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
    console.print(
        "everything is here" if not bad else f"{len(bad)} of {len(checks)} checks failed", markup=False
    )
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
    found.append(_redis_check(settings))
    if settings.opensearch_url is not None:
        found += _opensearch_checks(settings)
    try:
        new = not settings.data_dir.exists()
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        probe = settings.data_dir / ".probe"
        probe.write_bytes(b"x")
        probe.unlink()
        free = shutil.disk_usage(settings.data_dir).free // 2**20
        if new:
            settings.data_dir.rmdir()  # looking is no reason to leave a directory behind
        enough = free >= NEEDED_DISK_MIB
        found.append(check("data directory", enough, f"{display(settings.data_dir)}, {free:,} MiB free"))
    except OSError as exc:
        found.append(
            check(
                "data directory",
                False,
                f"{settings.data_dir}: {exc.strerror}; choose another with --data-dir",
            )
        )
    try:
        from pipeline.drain.masking import MaskSet

        masks = MaskSet.load(extra=settings.masks)
        found.append(check("masks", True, f"{len(masks.tokens)} tokens, version {masks.version}"))
    except LogweirError as exc:
        found.append(check("masks", False, str(exc)))
    return found


def _gpu_check() -> dict[str, Any]:
    """Nothing fails without a GPU; what keeps one from being used is a warning."""
    from pipeline.gpu.probe import probe

    seen = probe(PROBE_S)
    if seen is None:
        return {"what": "GPU", "ok": True, "found": "none (no NVIDIA driver)", "warning": False}
    if seen.trouble:
        found = f"{seen.trouble}; see what `nvidia-smi` says"
        return {"what": "GPU", "ok": True, "found": found, "warning": True}
    found = f"{seen.count or 'none'}, driver {seen.driver}"
    # Wheels without CUDA say so in the local part of their version; asking torch itself takes seconds.
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""  # a line of its own says so
    blind = seen.count > 0 and torch.endswith("+cpu")
    if blind:
        found += (
            f"; torch {torch} cannot use it: install a build with CUDA, see https://pytorch.org/get-started"
        )
    return {"what": "GPU", "ok": True, "found": found, "warning": blind}


def _redis_check(settings: Settings) -> dict[str, Any]:
    from pipeline.workers.redis_server import check_redis, find_server

    try:
        if settings.redis_url is not None:
            check_redis(settings)
            return {"what": "Redis", "ok": True, "found": "REDIS_URL answers"}
        return {"what": "Redis server", "ok": True, "found": str(find_server())}
    except LogweirError as exc:
        return {"what": "Redis", "ok": False, "found": str(exc)}


def _opensearch_checks(settings: Settings) -> list[dict[str, Any]]:
    """Whether the server lets us write results, and read logs as the stack would; nothing there is changed."""
    from pipeline.opensearch.client import connect
    from pipeline.sinks.opensearch import OpenSearchSink
    from pipeline.sources.opensearch import Poller

    found: list[dict[str, Any]] = []

    def look(what: str, look_at: Callable[[], str]) -> None:
        try:
            found.append({"what": what, "ok": True, "found": look_at()})
        except LogweirError as exc:
            found.append({"what": what, "ok": False, "found": str(exc)})

    def source() -> str:
        pieces = Poller(connect(settings, reading=True), settings).poll(None)
        first = next(pieces, None)
        pieces.close()  # type: ignore[attr-defined] # a generator: gives its point in time back now
        return f"{settings.opensearch_source} can be read{'' if first else ', and is empty'}"

    look("OpenSearch results", OpenSearchSink(settings).probe)
    if settings.opensearch_source:
        look("OpenSearch source", source)
    return found
