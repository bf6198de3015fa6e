"""Shared by the verbs: settings from flags, the running stack's Redis, output."""

import argparse
import io
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from rich.console import Console
from rich.text import Text

from pipeline.errors import BadInput
from pipeline.imports import uncollected
from pipeline.redis.attach import attached
from pipeline.settings import Settings
from pipeline.units import one_line

if TYPE_CHECKING:
    from pipeline.service.reading import PipelineReader

NO_TIME: Final = "no time"  # where a line has none: its time of arrival says when it was read
# argparse names that are settings too
_FLAGS = ("data_dir", "log_level", "time_zone", "masks")


def settings_of(args: argparse.Namespace, *, default_level: str = "warning") -> Settings:
    """Settings from all levels; a verb is quieter than a worker unless told otherwise."""
    flags: dict[str, Any] = {name: getattr(args, name, None) for name in _FLAGS}
    settings = Settings.load(flags=flags, config=args.config)
    if args.log_level is None and settings.stack.log_level == "info":
        settings = settings.replace(log_level=default_level)
    return settings


def reached(settings: Settings, *, timeout_s: float | None = None) -> Settings:
    """Settings of the running stack or of REDIS_URL, after a check of that Redis. Raises BadInput."""
    from pipeline.redis.check import CHECK_S, check_redis

    found = attached(settings)
    check_redis(found, timeout_s=timeout_s or CHECK_S)
    return found


def of_pipeline(settings: Settings) -> Settings:
    """Settings with the store of the pipeline, for verbs that read what is stored.

    Where no stack runs, its files are read all the same. Raises BadInput when REDIS_URL names a pipeline
    that works with another store."""
    from pipeline.errors import RedisUnavailable
    from pipeline.redis.connection import connect
    from pipeline.workers.same_store import join

    try:
        found = attached(settings)
    except BadInput:
        return settings
    if settings.redis.url is not None:
        with suppress(RedisUnavailable), connect(settings, timeout_s=2.0) as client:
            join(client, settings, first=False)
    return found


def reading(
    args: argparse.Namespace, *, stored: bool = False, timeout_s: float | None = None
) -> "PipelineReader":
    """The pipeline that a verb asks: that of this machine, or with --url the one behind an API.

    `stored`: the verb reads what is stored, and no stack has to run. `timeout_s`: of this machine's
    Redis. Raises BadInput."""
    if args.url is not None:
        from pipeline.service.client import Client

        return Client(args.url, key_of(args))
    with uncollected():
        from pipeline.service.local import Local

    settings = settings_of(args)
    found = of_pipeline(settings) if stored else reached(settings, timeout_s=timeout_s)
    return Local(found, timeout_s=timeout_s)


def key_of(args: argparse.Namespace) -> str:
    """The key of --key, or the content of the file in --key @FILE. Raises BadInput."""
    text: str = args.key or ""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise BadInput(f"--key {text} cannot be read ({exc}); name a file that holds the key") from exc


@contextmanager
def redis_explained() -> Iterator[None]:
    """Turn redis-py's errors into RedisUnavailable, for verbs that ask Redis directly."""
    import redis

    from pipeline.errors import RedisUnavailable

    try:
        yield
    except redis.RedisError as exc:
        raise RedisUnavailable(
            f"Redis does not answer any more ({exc}); see whether the stack still runs with `logweir status`"
        ) from exc


class _Output(Console):
    """A console that leaves a closed pipe to the command line, which ends quietly."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def out() -> Console:
    """Standard output for people."""
    # Escapes characters that the terminal's encoding lacks: a name in a log must not end the command.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return _Output(highlight=False, soft_wrap=False, emoji=False)


class _Remarks(Console):
    """A console of sentences: names of files in them cannot steer the terminal."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(one_line(o) if isinstance(o, str) else o for o in objects), **how)


def err() -> Console:
    """Standard error for people: progress and remarks."""
    return _Remarks(stderr=True, highlight=False, emoji=False)


def remark(console: Console, note: str) -> None:
    """A note in a line of its own."""
    console.print(f"note: {one_line(note)}", style="yellow", markup=False, soft_wrap=True)


def print_json(data: Mapping[str, Any] | list[Any]) -> None:
    """Facts for programs."""
    json.dump(data, sys.stdout, indent=2, default=_plain)
    sys.stdout.write("\n")


def print_outcome(args: argparse.Namespace, facts: Mapping[str, Any], words: str) -> int:
    """What a verb did: these facts for `--json`, else these words. Gives exit code 0."""
    if args.json:
        print_json(facts)
    else:
        out().print(printable(words), markup=False, soft_wrap=True)
    return 0


def _plain(value: object) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def printable(text: object) -> str:
    """Text from elsewhere, unable to steer a terminal or to begin a line of its own."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def cell(text: object) -> Text:
    """Data in a table: shown as it is, whatever markup it looks like."""
    return Text(printable(text))


def standard_input() -> BinaryIO:
    """Raises BadInput when it was closed before we began (`<&-`)."""
    if sys.stdin is None:
        raise BadInput("standard input is closed; pipe log lines into it, or name a file instead of -")
    return sys.stdin.buffer


def named_workloads(given: list[str] | None, file: Path | None) -> list[str]:
    """The patterns of flags, and of a file with Opni's workloads. Raises BadInput."""
    if file is None:
        return list(given or ())
    from pipeline.controller.watchlist import nested_patterns

    try:
        text = standard_input().read() if str(file) == "-" else file.read_bytes()
    except OSError as exc:
        raise BadInput(f"the workloads {file} cannot be read ({exc.strerror}); name a file of JSON") from exc
    name = "standard input" if str(file) == "-" else str(file)
    return [*(given or ()), *nested_patterns(text, name)]


def display(path: Path) -> str:
    """A path as short as it can be said from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
