"""Archives and their pieces: what is listed, how it is cut, and that every line is in exactly one piece."""

import gzip
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from s3_server import S3Server

from bench._log_files import read_file
from pipeline.errors import BadInput, ObjectChanged, StoreUnavailable
from pipeline.records.declared import DETECTED
from pipeline.sources.backfill import borders as border_search
from pipeline.sources.backfill.archive import Archive, ArchiveObject, archive_of
from pipeline.sources.backfill.borders import may_cut
from pipeline.sources.backfill.pace import ReadingPace
from pipeline.sources.backfill.pieces import Piece, cut, plan_name, turn_of
from pipeline.sources.backfill.reading import Borders, read_piece
from pipeline.sources.backfill.window import Window, time_of_object
from pipeline.sources.chunks import Chunk, Cursor, Limits
from pipeline.sources.elements import element_kind
from pipeline.sources.folders import Filter, Skipped
from pipeline.sources.packed.archives import Source

LIMITS = Limits(max_records=7, max_bytes=4_000, choice=DETECTED)
TRACE = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    x()", "ValueError: bad"]


class InMemory:
    """An archive of one text."""

    url = "/memory"

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.one = ArchiveObject(name="app.log", size=len(text), changed=0.0, identity="i")

    def objects(self, _wanted: Filter, _skipped: Skipped) -> Iterator[ArchiveObject]:
        yield self.one

    def read(self, _one: ArchiveObject, offset: int, size: int) -> bytes:
        return self.text[offset : offset + size]

    def shown(self, name: str) -> str:
        return f"/memory/{name}"

    def check(self) -> None:
        """It is always there."""


def borders_of(piece_bytes: int) -> Borders:
    fixed: dict[int, str] = {}
    return Borders(
        piece_bytes=piece_bytes,
        known=lambda _piece, offset: fixed.get(offset),
        fix=lambda _piece, offset, found: fixed.setdefault(offset, found),
    )


def records(archive: Archive, piece: Piece, borders: Borders, start: Cursor | None = None) -> list[Chunk]:
    def begin(_source: Source) -> Cursor | None:
        return start

    notes: list[str] = []
    readings = read_piece(archive, piece, begin, borders=borders, limits=LIMITS, note=notes.append)
    return [chunk for reading in readings for chunk in reading.chunks]


def raws(chunks: list[Chunk]) -> list[str]:
    return [raw for chunk in chunks for raw in chunk.records["raw"].to_list()]


LINE = st.one_of(
    st.sampled_from(["2026-11-20T10:00:00Z ERROR app: failed", "", "  at a.b.C", "plain words", *TRACE]),
    st.text("ab \t\u00e4{[\"'", max_size=40),
    st.integers(1, 900).map(lambda n: "x" * n),
)


@settings(max_examples=150)
@given(
    st.lists(LINE, min_size=1, max_size=120),
    st.integers(40, 3_000),
    st.integers(0, 400),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_every_line_is_in_exactly_one_piece_however_readers_take_turns(
    lines: list[str], piece_bytes: int, before: int, order: random.Random, ended: bool
) -> None:
    text = "\n".join(lines).encode() + (b"\n" if ended else b"")
    assume(text and element_kind(text) is None)  # of a JSON array the brackets are stored nowhere
    archive, borders = InMemory(text), borders_of(piece_bytes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(border_search, "BEFORE", before)  # a framer that begins in the middle of a record
        patched.setattr(border_search, "BLOCK_BYTES", 64)
        pieces = list(cut(archive.one, ranges=True, piece_bytes=piece_bytes))
        order.shuffle(pieces)
        read = {piece.begin: records(archive, piece, borders) for piece in pieces}
    ordered = [chunk for begin in sorted(read) for chunk in read[begin]]
    assert "\n".join(raws(ordered)).split("\n") == text.decode().removesuffix("\n").split("\n")
    count = sum(int(chunk.records["lines"].sum()) for chunk in ordered)
    assert count == text.count(b"\n") + (not text.endswith(b"\n"))


def trouble(n: int) -> str:
    lines = []
    for i in range(n):
        lines.append(f"2026-11-20T10:{i // 60 % 60:02d}:{i % 60:02d}Z ERROR app: request {i} failed")
        lines += TRACE if i % 3 else []
        lines += ["y" * 150_000] if i % 400 == 1 else []
    return "\n".join(lines) + "\n"


@pytest.mark.long
def test_pieces_hold_the_records_of_the_whole_text_and_cut_no_stack_trace(tmp_path: Path) -> None:
    path = tmp_path / "app.log"
    path.write_text(trouble(4_000))
    whole = [raw for chunk in read_file(path) for raw in chunk.records["raw"].to_list()]
    archive = archive_of(str(tmp_path))
    (one,) = archive.objects(Filter(), Skipped())
    assert may_cut(archive.read(one, 0, 65_536), DETECTED)
    for piece_bytes in (50_000, 200_001):
        borders = borders_of(piece_bytes)
        pieces = list(cut(one, ranges=True, piece_bytes=piece_bytes))
        found = [raw for piece in reversed(pieces) for raw in raws(records(archive, piece, borders))]
        assert found == whole


@pytest.mark.long
def test_a_reader_that_goes_on_from_any_cursor_makes_the_chunks_that_the_first_one_would_have_made() -> None:
    archive, borders = InMemory(trouble(60).encode()), borders_of(3_000)
    for piece in cut(archive.one, ranges=True, piece_bytes=3_000):
        chunks = records(archive, piece, borders)
        for n, chunk in enumerate(chunks):
            again = records(archive, piece, borders, chunk.cursor)
            assert raws(again) == raws(chunks[n + 1 :])
            assert [c.cursor for c in again] == [c.cursor for c in chunks[n + 1 :]]


@pytest.mark.parametrize(
    ("first", "cut_up"),
    [
        (b"2026-11-20T10:00:00Z INFO app: a\n" * 9, True),
        (b"some words\nmore words\n", True),
        (gzip.compress(b"a line\n", mtime=0), False),
        ("a line\n".encode("utf-16"), False),
        (b'[\n  {"message": "a"},\n  {"message": "b"}\n]\n', False),
        (b'time,level,message\n2026-11-20T10:00:00Z,INFO,"two\nlines"\n' * 9, False),
        (b"one line without an end", False),
        (b"\x00\x01\x02\n", False),
    ],
)
def test_only_texts_of_lines_are_cut(first: bytes, cut_up: bool) -> None:
    assert may_cut(first, DETECTED) is cut_up


def test_an_object_is_cut_into_pieces_that_cover_it_newest_first() -> None:
    one = ArchiveObject(name="a.log", size=250, changed=1_000.0, identity="i")
    pieces = list(cut(one, ranges=True, piece_bytes=100))
    assert [(p.begin, p.end) for p in pieces] == [(200, 250), (100, 200), (0, 100)]
    assert len({p.piece_id for p in pieces}) == 3
    assert [(p.begin, p.end, p.whole) for p in cut(one, ranges=False)] == [(0, 250, True)]
    old, new = (
        Piece(name=f"app-{day}.log", identity="i", size=1, changed=0.0, end=1)
        for day in ("2026-11-19", "2026-11-20")
    )
    assert turn_of(new) < turn_of(old)
    assert turn_of(pieces[0]) <= turn_of(pieces[-1])


@pytest.mark.parametrize(
    ("name", "begin", "hours"),
    [
        ("app-2026-11-20.log", datetime(2026, 11, 20, tzinfo=UTC), 24),
        ("2026/11/20/app.log.gz", datetime(2026, 11, 20, tzinfo=UTC), 24),
        ("2026/11/20/07/app.log.gz", datetime(2026, 11, 20, 7, tzinfo=UTC), 1),
        ("dt=2026-11-20/hour=07/part-0.gz", datetime(2026, 11, 20, 7, tzinfo=UTC), 1),
        ("app.20261120T07.log", datetime(2026, 11, 20, 7, tzinfo=UTC), 1),
        ("from-2025-01-01/app-2026-11-20.log", datetime(2026, 11, 20, tzinfo=UTC), 24),
    ],
)
def test_the_date_in_a_name_is_the_time_of_an_object(name: str, begin: datetime, hours: int) -> None:
    assert time_of_object(name, 0.0) == (begin, begin + timedelta(hours=hours))


@pytest.mark.parametrize("name", ["app.log", "app-2026-02-31.log", "120261120.log", "id-20261120999.log"])
def test_without_a_date_the_time_of_change_counts(name: str) -> None:
    moment = datetime(2026, 5, 1, 12, tzinfo=UTC)
    assert time_of_object(name, moment.timestamp())[0] == moment
    window = Window(since=moment, until=moment + timedelta(hours=1))
    assert window.takes(name, moment.timestamp())
    assert not window.takes(name, moment.timestamp() + 3_600)
    assert not window.takes(name, moment.timestamp() - 1)


def test_a_window_takes_the_days_that_it_touches() -> None:
    window = Window(since=datetime(2026, 11, 20, 12, tzinfo=UTC), until=datetime(2026, 11, 22, tzinfo=UTC))
    taken = [day for day in range(18, 25) if window.takes(f"app-2026-11-{day}.log", 0.0)]
    assert taken == [20, 21]


def test_the_same_command_has_the_same_name_and_another_one_another() -> None:
    assert plan_name("s3://b/logs/app", "7d") == plan_name("s3://b/logs/app", "7d")
    assert plan_name("s3://b/logs/app", "7d").startswith("app-")
    assert plan_name("s3://b/logs/app", "7d") != plan_name("s3://b/logs/app", "8d")
    assert plan_name("/\u00e4\u00f6/\u2028").isascii()


# ---- folders and buckets -------------------------------------------------------------------------------


class Place:
    """An archive and how its objects come and go."""

    def __init__(self, folder: Path, bucket: S3Server | None) -> None:
        self.folder, self.bucket = folder, bucket
        self.url = str(folder) if bucket is None else bucket.new_place()
        self.archive = archive_of(self.url)

    def put(self, name: str, data: bytes) -> None:
        if self.bucket is None:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(data)
            return
        self._client().put(self._key(name), data)

    def delete(self, name: str) -> None:
        if self.bucket is None:
            (self.folder / name).unlink()
        else:
            self._client().delete(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self.url.rpartition('/')[2]}/{name}"

    def _client(self):  # type: ignore[no-untyped-def]
        from obstore.store import S3Store

        assert self.bucket is not None
        options = {"allow_http": True}
        return S3Store(self.bucket.bucket, virtual_hosted_style_request=False, client_options=options)  # type: ignore[arg-type]


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "folder":
        yield Place(tmp_path, None)
    else:
        server: S3Server = request.getfixturevalue("s3_server")
        with server.credentials():
            yield Place(tmp_path, server)


def listed(place: Place, wanted: Filter | None = None) -> dict[str, ArchiveObject]:
    return {one.name: one for one in place.archive.objects(wanted or Filter(), Skipped())}


def test_objects_are_listed_by_globs_without_hidden_and_empty_ones(place: Place) -> None:
    for name in ("a.log", "b/c d.log.gz", "b/e.txt", ".hidden/x.log", "b/.y.log", "old/z.log"):
        place.put(name, b"a line\n")
    place.put("empty.log", b"")
    assert set(listed(place)) == {"a.log", "b/c d.log.gz", "b/e.txt", "old/z.log"}
    assert set(listed(place, Filter(include=["*.log", "*.gz"], exclude=["old"]))) == {"a.log", "b/c d.log.gz"}


def test_an_object_is_read_in_ranges_until_it_changes_or_goes(place: Place) -> None:
    place.put("a.log", b"0123456789")
    one = listed(place)["a.log"]
    assert (place.archive.read(one, 2, 3), place.archive.read(one, 8, 9)) == (b"234", b"89")
    assert place.archive.read(one, 10, 5) == b""
    place.put("a.log", b"abcdefghijk")
    with pytest.raises(ObjectChanged, match="changed since it was planned"):
        place.archive.read(one, 2, 3)
    place.delete("a.log")
    with pytest.raises(ObjectChanged, match="does not exist any more"):
        place.archive.read(one, 2, 3)


def test_a_packed_object_is_one_piece_and_read_from_its_cursor_on(place: Place) -> None:
    place.put("a.log.gz", gzip.compress(trouble(30).encode()))
    one = listed(place)["a.log.gz"]
    (piece,) = cut(one, ranges=False)
    chunks = records(place.archive, piece, borders_of(100))
    assert sum(int(c.records["lines"].sum()) for c in chunks) == trouble(30).count("\n")
    again = records(place.archive, piece, borders_of(100), chunks[1].cursor)
    assert raws(again) == raws(chunks[2:])


def test_an_address_that_is_none_is_refused_with_the_remedy(tmp_path: Path, s3_server: S3Server) -> None:
    (tmp_path / "file").write_text("x\n")
    for address, word in (
        (str(tmp_path / "nope"), "does not exist"),
        (str(tmp_path / "file"), "is a file"),
        ("http://host/x", "give a folder, or s3://bucket/prefix"),
        ("s3://", "give a folder, or s3://bucket/prefix"),
        ("s3://key:secret@bucket/x", "AWS_SECRET_ACCESS_KEY"),
    ):
        with pytest.raises(BadInput, match=word) as caught:
            list(archive_of(address).objects(Filter(), Skipped()))
        assert "secret@" not in str(caught.value)
    with s3_server.credentials(), pytest.MonkeyPatch.context() as patched:
        with pytest.raises(BadInput, match="no-such-bucket does not exist"):
            archive_of("s3://no-such-bucket/x").check()
        patched.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(StoreUnavailable, match="AWS_ACCESS_KEY_ID"):
            archive_of(s3_server.new_place()).check()


def test_links_that_lead_out_of_an_archive_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret\n")
    (folder / "a.log").write_text("a line\n")
    (folder / "sub" / "inside.log").symlink_to(folder / "a.log")
    (folder / "outside.log").symlink_to(tmp_path / "secret")
    (folder / "odd\nname.log").write_text("a line\n")
    skipped = Skipped()
    names = {one.name for one in archive_of(str(folder)).objects(Filter(), skipped)}
    assert names == {"a.log", "sub/inside.log"} and skipped.count == 2


def test_a_folder_that_is_not_mounted_is_away(tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    archive = archive_of(str(folder))
    root = archive.root()
    archive.check(root)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="mount the folder"):
        archive.check(root)
    folder.mkdir()
    with pytest.raises(BadInput, match="another folder here"):
        archive.check(root)


# ---- the pace ------------------------------------------------------------------------------------------


def test_the_time_left_is_unknown_until_it_was_measured_and_while_nothing_moves() -> None:
    pace = ReadingPace()
    assert pace.lines_per_s is None and pace.left_s(100) is None
    pace.see(0.0, lines=0, bytes_read=0)
    pace.see(4.0, lines=400, bytes_read=40)
    assert pace.left_s(100) is None
    pace.see(10.0, lines=1_000, bytes_read=100)
    assert pace.lines_per_s == 100 and pace.left_s(100) == 10
    for second in range(11, 90):
        pace.see(float(second), lines=1_000, bytes_read=100)
    assert pace.lines_per_s == 0 and pace.left_s(100) is None
