"""Shared by the verbs: settings from flags, the running stack's Redis, output."""

import argparse
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from rich.console import Console
from rich.text import Text

from pipeline.errors import BadInput, NoRedis
from pipeline.imports import uncollected
from pipeline.redis.attach import attached
from pipeline.settings import Settings
from pipeline.units import one_line, plural
from pipeline.workers.exits import ReaderLeft

if TYPE_CHECKING:
    from pipeline.service.reading import PipelineReader

NO_TIME: Final = "no time"  # where a line has none: its time of arrival says when it was read
COLUMNS: Final = 80  # where the width of the terminal is not known
RETURN_S: Final = 60.0  # a killed Redis of the stack is back after 4 s, later where its AOF is long
RETRY_S: Final = 0.2
# argparse names that are settings too
_FLAGS = ("data_dir", "log_level", "time_zone", "masks")


def settings_of(args: argparse.Namespace, *, default_level: str = "warning") -> Settings:
    """Settings from all levels; a verb is quieter than a worker unless told otherwise."""
    flags: dict[str, Any] = {name: getattr(args, name, None) for name in _FLAGS}
    settings = Settings.load(flags=flags, config=args.config)
    if args.log_level is None and settings.stack.log_level == "info":
        settings = settings.replace(log_level=default_level)
    return settings


def reached(settings: Settings, *, timeout_s: float | None = None, writes: bool = True) -> Settings:
    """Settings of the running stack or of REDIS_URL, after a check of that Redis (`check_redis`).

    Raises BadInput."""
    from pipeline.redis.check import CHECK_S, check_redis

    found = attached(settings)
    check_redis(found, timeout_s=timeout_s or CHECK_S, writes=writes)
    return found


def awaited(settings: Settings, console: Console) -> Settings:
    """As `reached`, but waits for a Redis that comes back: a stack starts its own again, and one that reads
    its data answers when it has done so. Raises BadInput, NoRedis after RETURN_S."""
    deadline, reported = time.monotonic() + RETURN_S, False
    while True:
        try:
            return reached(settings)
        except NoRedis as exc:
            comes_back = exc.loading or settings.redis.url is None
            if not comes_back or time.monotonic() > deadline:
                raise
            if not reported:
                remark(console, f"{exc}. Waiting up to {RETURN_S:.0f} s for it")
                reported = True
            time.sleep(RETRY_S)


def of_pipeline(settings: Settings) -> Settings:
    """Settings with the store of the pipeline, for verbs that read what is stored.

    Where no stack runs, its files are read anyway. Raises BadInput when the pipeline works with another
    store, and StoreUnavailable when its results are gone."""
    from pipeline.errors import RedisUnavailable
    from pipeline.redis.connection import connect
    from pipeline.service.status import check_results
    from pipeline.workers.same_store import join

    try:
        found = attached(settings)
    except BadInput:
        return settings
    with suppress(RedisUnavailable), connect(found, timeout_s=2.0) as client:
        join(client, found, first=False)
        check_results(client, found)
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
    found = of_pipeline(settings) if stored else reached(settings, timeout_s=timeout_s, writes=False)
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
    return _with_columns(_Output(highlight=False, soft_wrap=False, emoji=False))


def _with_columns(console: Console) -> Console:
    """COLUMNS=0 says that nobody knows the width, and Rich would print nothing at all."""
    if console.width < 1:
        console.width = COLUMNS
    return console


class _Remarks(Console):
    """A console of sentences: names of files in them cannot steer the terminal."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(one_line(o) if isinstance(o, str) else o for o in objects), **how)


def err() -> Console:
    """Standard error for people: progress and remarks."""
    return _with_columns(_Remarks(stderr=True, highlight=False, emoji=False))


@contextmanager
def answering_with(code: int) -> Iterator[None]:
    """Around the output of a verb whose exit code is a part of its answer. Raises ReaderLeft."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as exc:
        raise ReaderLeft(code) from exc


def remark(console: Console, note: str) -> None:
    """A note in a line of its own."""
    console.print(f"note: {one_line(note)}", style="yellow", markup=False, soft_wrap=True)


def remark_missing(rows: int) -> int:
    """Says that the store lacks files with so many lines of an answer; the exit code of that answer."""
    if rows:
        remark(err(), f"files with {plural(rows, 'stored line')} are not in the store any more; restore them")
    return 1 if rows else 0


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
