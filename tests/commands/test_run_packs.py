"""Packs: hundreds of small files in one pass, with the records that each gives when it is read alone."""

import gzip
import os
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._log_files import read_file
from pipeline import detect
from pipeline.commands.run.packs import FEW, SMALL_BYTES, Pack, packs
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.batch import Purpose, file_key
from pipeline.records.declared import choice
from pipeline.records.delivery import Meta
from pipeline.records.schema import RAW_SCHEMA
from pipeline.sources import formats

pytestmark = pytest.mark.long

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
TRACE = (
    "Traceback (most recent call last):\n"
    '  File "a.py", line 3, in <module>\n'
    "    main()\n"
    "ValueError: no such job\n"
)
# Texts of one kind each; `{n}` is a number of two digits.
KINDS = {
    "iso": [
        "2026-11-20 10:00:{n} INFO job {n} done\n",
        "2026-11-20 10:01:{n} ERROR job {n} failed\n" + TRACE,
    ],
    "syslog": ["Nov 20 10:00:{n} box app[{n}]: job {n} done\n", "Nov 20 10:02:{n} box app[{n}]: bye"],
    "cri": [
        "2026-11-20T10:00:{n}.000000000Z stdout F 2026-11-20 10:00:{n} INFO job {n}\n",
        "2026-11-20T10:00:{n}.000000000Z stdout P 2026-11-20 10:00:{n} INFO half \n"
        "2026-11-20T10:00:{n}.100000000Z stdout F whole\n",
    ],
    "json": ['{"time":"2026-11-20T10:00:{n}Z","level":"info","msg":"job {n}"}\n'],
    "plain": ["job {n} went well\n\nand ended\n", "nothing else"],
    "level": ["INFO job {n} done\nWARN job {n} slow\n"],
}


def written(folder: Path, texts: "list[str | bytes]") -> list[Path]:
    paths = [folder / f"{number:04d}.log" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return paths


def found(paths: list[Path], **limits: int) -> tuple[list[Pack], list[Path]]:
    packed, alone = list[Pack](), list[Path]()
    for one in packs(paths, group=lambda _: "all", **limits):
        if isinstance(one, Pack):
            packed.append(one)
        else:
            alone.append(one)
    assert sorted([*alone, *(path for pack in packed for path in pack.paths)]) == sorted(paths)
    return packed, alone


def parsed(records: pl.DataFrame, names: tuple[str, ...]) -> pl.DataFrame:
    return formats.parse(records, names, arrived=NOW)


def read_alone(path: Path) -> pl.DataFrame:
    (chunk,) = read_file(path)
    return parsed(chunk.records, chunk.formats)


def compare(pack: Pack) -> None:
    """The records of a pack are those of its files, one after another."""
    records = parsed(pack.records, pack.formats)
    assert dict(records.schema) == RAW_SCHEMA
    assert records["source"].unique(maintain_order=True).to_list() == [str(path) for path in pack.paths]
    for (source,), part in records.group_by("source", maintain_order=True):
        assert part.drop("source").equals(read_alone(Path(str(source))).drop("source")), source


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_one_kind_are_one_pack_with_the_records_of_each(tmp_path: Path, kind: str) -> None:
    texts = [text.replace("{n}", f"{n:02d}") for n in range(20) for text in KINDS[kind]]
    packed, alone = found(written(tmp_path, texts))
    assert len(packed) == 1 and not alone
    compare(packed[0])


@given(st.lists(st.sampled_from([t for texts in KINDS.values() for t in texts]), min_size=9, max_size=60))
@settings(max_examples=40, deadline=None)
def test_mixed_files_lose_and_move_no_record(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    filled = [text.replace("{n}", f"{n:02d}") for n, text in enumerate(texts)]
    packed, _ = found(written(tmp_path_factory.mktemp("mixed"), [*filled]))
    for pack in packed:
        assert len(pack.paths) >= FEW
        for (source,), part in pack.records.group_by("source", maintain_order=True):
            path = Path(str(source))
            assert part["lines"].sum() == len(path.read_text().removesuffix("\n").split("\n"))
            assert "\n".join(part["raw"]) == path.read_text().removesuffix("\n")
            assert part["line"].to_list() == [1, *(part["lines"].cum_sum() + 1)][:-1]


def test_a_trace_never_goes_on_in_the_next_file(tmp_path: Path) -> None:
    begun = "2026-11-20 10:00:00 ERROR a\nTraceback (most recent call last):\n"
    packed, alone = found(written(tmp_path, [begun] * 10))
    assert not alone and packed[0].records["lines"].to_list() == [2] * 10


def test_a_line_without_a_time_takes_none_from_another_file(tmp_path: Path) -> None:
    timed, other = "2026-11-20T10:00:00Z INFO a\n", "INFO without a time\n"
    records = [
        parsed(pack.records, pack.formats) for pack in found(written(tmp_path, [timed, other] * 20))[0]
    ]
    untimed = pl.concat(records).filter(pl.col("raw") == other.strip())
    assert untimed.height == 20 and untimed["timestamp"].unique().to_list() == [NOW]
    assert not untimed["timed"].any()


LINE = b"2026-11-20 10:00:00 INFO a\n"


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        gzip.compress(LINE),
        LINE.decode().encode("utf-16"),
        b"\xef\xbb\xbf" + LINE,
        LINE.replace(b"\n", b"\r") * 2,
        LINE + b"caf\xe9\n",
        LINE + b"a\x00b\n",
        LINE * (SMALL_BYTES // len(LINE) + 1),
        b'[{"time":"2026-11-20T10:00:00Z","msg":"a"}]',
        b'{\n  "time": "2026-11-20T10:00:00Z"\n}\n',
        b"Nov 20 10:00:00 box app[7]: of another format\n",
    ],
    ids=["empty", "gz", "utf-16", "bom", "cr", "latin-1", "nul", "large", "array", "pretty", "other"],
)
def test_what_needs_a_closer_look_is_read_alone(tmp_path: Path, odd: bytes) -> None:
    paths = written(tmp_path, [LINE] * 200)
    (tmp_path / "odd.log").write_bytes(odd)
    packed, alone = found([*paths[:100], tmp_path / "odd.log", *paths[100:]])
    assert alone == [tmp_path / "odd.log"]
    assert sum(len(pack.paths) for pack in packed) == 200


def test_tables_are_read_alone_because_each_may_name_its_columns(tmp_path: Path) -> None:
    table = "time,level,message\n2026-11-20T10:00:00Z,info,a\n2026-11-20T10:00:01Z,error,b\n"
    packed, alone = found(written(tmp_path, [table] * 20))
    assert not packed and len(alone) == 20


def test_pipes_and_lost_files_are_handed_on_unopened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    odd = [tmp_path / "pipe", tmp_path / "gone.log", tmp_path]
    assert list(packs(odd, group=str)) == odd


def test_few_files_are_no_pack(tmp_path: Path) -> None:
    packed, alone = found(written(tmp_path, [LINE] * (FEW - 1)))
    assert not packed and len(alone) == FEW - 1


@pytest.mark.parametrize("older", [1, FEW])
def test_files_of_one_workload_stay_in_their_order(tmp_path: Path, older: int) -> None:
    """Rotated copies come oldest first, and a large one may lie between small ones."""
    before = written(tmp_path, [LINE] * older)
    large = tmp_path / "large.log"
    large.write_bytes(LINE * (SMALL_BYTES // len(LINE) + 1))
    (tmp_path / "newer").mkdir()
    after = written(tmp_path / "newer", [LINE] * older)
    order = [
        path
        for one in packs([*before, large, *after], group=lambda _: "app")
        for path in (one.paths if isinstance(one, Pack) else (one,))
    ]
    assert order == [*before, large, *after]


def test_a_pack_has_one_group_and_keeps_within_the_bounds_of_a_batch(tmp_path: Path) -> None:
    paths = written(tmp_path, [LINE * 3] * 100)
    packed, _ = found(paths, max_records=90)
    assert [pack.records.height for pack in packed] == [90, 90, 90, 30]
    packed, _ = found(paths, max_bytes=len(LINE) * 60)
    assert [len(pack.paths) for pack in packed] == [20] * 5
    groups = list(packs(paths, group=lambda path: str(path)[:-5]))
    assert [len(pack.paths) for pack in groups if isinstance(pack, Pack)] == [10] * 10


def test_a_forced_format_is_that_of_all_that_have_it(tmp_path: Path) -> None:
    wanted = choice(files=(), forced="level", time=None)
    paths = written(tmp_path, ["INFO a\n"] * 20 + ["2026-11-20 10:00:00 INFO a\n"] * 20)
    packed = [p for p in packs(paths, group=lambda _: "", choice=wanted) if isinstance(p, Pack)]
    assert [(pack.formats, len(pack.paths)) for pack in packed] == [(("level",), 20)]


def test_records_have_the_ids_that_they_have_when_their_file_is_read_alone(tmp_path: Path) -> None:
    texts = [text.replace("{n}", f"{n:02d}") for n in range(10) for text in KINDS["iso"]]
    packed, _ = found(written(tmp_path, [*texts]))
    masks, (pack,) = MaskSet.load(), packed

    def results(records: pl.DataFrame, names: tuple[str, ...], source: str, key: str) -> pl.DataFrame:
        meta = Meta(
            batch_id=key, source=source, source_key=key, purpose=Purpose.SCORE, arrived=NOW, formats=names, zone="UTC",
        )  # fmt: skip
        prepared = detect.prepare(records, meta, masks)
        return detect.result_rows(prepared, detect.distinct(prepared, "v1"), meta, "w")

    together = results(pack.records, pack.formats, "the pack", "a" * 16)
    assert together["record_id"].is_unique().all()
    for path in pack.paths:
        (chunk,) = read_file(path)
        alone = results(chunk.records, chunk.formats, str(path), file_key(Purpose.SCORE, str(path)))
        assert alone.equals(together.filter(pl.col("source") == str(path)))
