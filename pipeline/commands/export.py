"""`logweir export`: stored lines as one file or table for other programs, in bounded memory.

With --url the lines come as pages, and a CSV needs no package beside those of a plain installation."""

import argparse
import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeline.commands.common import (
    display,
    key_of,
    of_pipeline,
    out,
    print_json,
    remark_missing,
    settings_of,
)
from pipeline.commands.results import lines_asked
from pipeline.errors import BadInput, SinkUnavailable
from pipeline.units import plural

if TYPE_CHECKING:
    from pipeline.service.client import TableKind
    from pipeline.service.questions import LinesAsked
    from pipeline.service.stored.values import TablePage

KINDS: Final = ("csv", "parquet", "delta")
# Of a disk that is written to. A missing right may also concern what is read, so it is looked for first.
_DISK_FAULTS: Final = tuple(
    os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
)


def main(args: argparse.Namespace) -> int:
    kind, target = next((kind, path) for kind in KINDS if (path := getattr(args, kind)) is not None)
    asked = lines_asked(args)
    if args.url is not None:
        lines, missing = _from_api(args, asked, kind, target)
    else:
        from pipeline.commands.stored.tables import matching_rows, writer_of
        from pipeline.sinks.choose import parquet_of
        from pipeline.sinks.results import readable
        from pipeline.sinks.retention import long_reading

        settings = of_pipeline(settings_of(args))
        if "parquet" not in settings.data.sinks:
            raise BadInput("export reads Parquet results, and these are in OpenSearch (sinks)")
        write, sink = writer_of(kind), parquet_of(settings)
        with long_reading(sink), readable(sink), _in_place(kind, target) as temporary:
            missing = sink.missing_rows(since=asked.since, until=asked.until)
            lines = write(matching_rows(sink, asked), temporary)
    if args.json:
        print_json({"format": kind, "path": str(target), "lines": lines, "missing": missing})
    else:
        out().print(f"{plural(lines, 'line')} in {display(target)}", markup=False, soft_wrap=True)
    return remark_missing(missing)


def _from_api(args: argparse.Namespace, asked: "LinesAsked", kind: str, target: Path) -> tuple[int, int]:
    """The number of lines that the API gave, and of those whose files are gone there.

    Parquet and Delta are made of its pages, which lie beside the target until then. Raises BadInput,
    SinkUnavailable, SourceUnavailable."""
    from pipeline.service.client import Client

    client, missing = Client(args.url, key_of(args)), 0

    def pages(wanted: "TableKind") -> "Iterator[TablePage]":
        nonlocal missing
        for page in client.tables(asked, wanted):
            missing += page.missing
            yield page

    if kind == "csv":
        with _in_place(kind, target) as temporary:
            return _csv_of_pages(pages("csv"), temporary), missing
    from pipeline.commands.stored.tables import rows_of_files, writer_of

    write = writer_of(kind)
    with _in_place(kind, target) as temporary:
        folder = temporary.with_suffix(".pages")
        try:
            folder.mkdir()
            for number, page in enumerate(pages("parquet")):
                (folder / f"{number:09}.parquet").write_bytes(page.body)
            return write(rows_of_files(folder), temporary), missing
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _csv_of_pages(pages: "Iterable[TablePage]", path: Path) -> int:
    lines = 0
    with path.open("wb") as file:
        for page in pages:
            file.write(page.body)
            lines += page.lines
    return lines


@contextmanager
def _in_place(kind: str, target: Path) -> Iterator[Path]:
    """A place beside the target, which gets its name once all is written. Raises BadInput,
    SinkUnavailable."""
    if target.exists() or target.is_symlink():
        raise BadInput(f"--{kind} {target} exists; remove it, or choose another name")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")
    with _written(kind, target):
        temporary.touch()
        temporary.unlink()
    try:
        try:
            yield temporary
        except Exception as exc:
            # Polars and deltalake wrap faults of the disk in their errors. Others come from what is read.
            why = next((text for text in _DISK_FAULTS if text in str(exc)), None)
            if why is None and temporary.name not in str(exc):
                raise
            raise _unwritable(kind, target, why or str(exc)) from exc
        with _written(kind, target):
            temporary.rename(target)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


@contextmanager
def _written(kind: str, target: Path) -> Iterator[None]:
    """Around what touches only the target. Raises SinkUnavailable."""
    try:
        yield
    except OSError as exc:
        raise _unwritable(kind, target, exc.strerror or str(exc)) from exc


def _unwritable(kind: str, target: Path, why: str) -> SinkUnavailable:
    return SinkUnavailable(
        f"--{kind} {target} cannot be written ({why}); free space, fix the rights, or name another place"
    )
