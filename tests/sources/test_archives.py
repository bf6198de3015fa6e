"""Packed files and archives as streams: members, damage, bombs, and reading on from a cursor."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from bench._log_files import read_file
from pipeline.errors import BadInput
from pipeline.sources import files
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.files import check_file, choose, read_packed, read_texts
from pipeline.sources.packed import archives, unpacking
from pipeline.sources.packed.bytestreams import is_packed
from pipeline.sources.stdin import Peeked

LINES = "".join(f"2026-11-20 10:00:{i % 60:02d} INFO request {i} done\n" for i in range(3000)).encode()
Pack = Callable[[bytes], bytes]
PACKS: dict[str, Pack] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".lzma": lambda data: lzma.compress(data, format=lzma.FORMAT_ALONE, preset=0),
    ".zst": zstandard.ZstdCompressor().compress,
}


def tarred(files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def written(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def read(
    path: Path, start: dict[str, Cursor] | None = None, max_records: int = 10_000
) -> tuple[dict[str, list[Chunk]], list[str]]:
    """The chunks of each text by its name, and the notes."""
    notes: list[str] = []
    found = {
        reading.source.name.removeprefix(f"{path}:"): list(reading.chunks)
        for reading in read_texts(
            path, note=notes.append, begin=lambda s: (start or {}).get(s.member), max_records=max_records
        )
    }
    return found, notes


def raws(chunks: list[Chunk]) -> list[str]:
    return [raw for chunk in chunks for raw in chunk.records["raw"].to_list()]


def test_no_member_is_ever_written_or_opened_by_its_name(tmp_path: Path) -> None:
    hostile = {"../../escape.log": LINES, "/etc/passwd": LINES, "a\033[2J\nb.log": LINES}
    path = written(tmp_path, "hostile.tar", tarred(hostile))
    found, notes = read(path)
    assert list(found) == list(hostile)
    assert notes == []
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["hostile.tar"]
    assert check_file(path) == ""


@pytest.mark.parametrize("ending", PACKS)
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_of_a_tar_are_texts_of_their_own_whatever_packs_it(
    tmp_path: Path, ending: str, form: int
) -> None:
    long = "deep/" * 19 + "x" * 90 + ".log"
    files = {
        "app.log": LINES,
        "./logs/web.log": b"one\ntwo\n",
        long: b"long\n",
        "image.png": os.urandom(5000),
        ".hidden.log": b"no\n",
        "empty.log": b"",
        "old.log.gz": gzip.compress(LINES),
        "app.log#2": b"last\n",
    }
    path = written(tmp_path, f"logs.tar{ending}", PACKS[ending](tarred(files, form)))
    found, notes = read(path)
    assert {name: len(raws(chunks)) for name, chunks in found.items()} == {
        "app.log": 3000, "logs/web.log": 2, long: 1, "old.log.gz": 3000, "app.log#2": 1,
    }  # fmt: skip
    assert notes == [f"skipped 1 member that is no text log: {path}:image.png"]


def test_a_member_again_under_its_name_is_another_text(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for data in (b"first\n", b"second\n"):
            info = tarfile.TarInfo("app.log")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    found, _ = read(written(tmp_path, "a.tar", out.getvalue()))
    assert {name: raws(chunks) for name, chunks in found.items()} == {
        "app.log": ["first"],
        "app.log#2": ["second"],
    }


def test_members_of_a_zip_are_read_oldest_first_and_packed_ones_unpacked(tmp_path: Path) -> None:
    files = {
        "app.log": b"3\n",
        "app.log.1": b"2\n",
        "app.log.2.gz": gzip.compress(b"1\n"),
        "x.bin": bytes(900),
    }
    path = written(tmp_path, "logs.zip", zipped(files))
    found, notes = read(path)
    assert [raws(chunks) for chunks in found.values()] == [["1"], ["2"], ["3"]]
    assert notes == [f"skipped 1 member that is no text log: {path}:x.bin"]


def test_a_document_that_is_a_zip_is_no_log_of_a_folder(tmp_path: Path) -> None:
    written(tmp_path, "sheet.xlsx", zipped({"sheet.xml": b"<xml/>\n"}))
    log = written(tmp_path, "app.log", b"one\n")
    assert choose([str(tmp_path)]).paths == (log,)


def test_a_zip_from_a_pipe_is_refused_and_a_tar_is_read(tmp_path: Path) -> None:
    def pipe(data: bytes) -> Path:
        path = tmp_path / "pipe"
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(data,), daemon=True).start()
        return path

    with pytest.raises(BadInput, match="is a zip archive, which a pipe cannot give; save it to a file first"):
        read(pipe(zipped({"a.log": b"one\n"})))
    found, _ = read(pipe(gzip.compress(tarred({"a.log": LINES}))))
    assert len(raws(found["a.log"])) == 3000


@pytest.mark.parametrize("ending", [e for e in PACKS if e])
def test_a_packed_text_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path, ending: str) -> None:
    noise = b"".join(b"%s\n" % os.urandom(40).hex().encode() for _ in range(24_000))
    packed = PACKS[ending](noise)
    path = written(tmp_path, f"cut.log{ending}", packed[: len(packed) * 2 // 3])
    found, notes = read(path)
    got = raws(found[str(path)])
    assert len(got) > 2000
    assert got[:-1] == noise.decode().splitlines()[: len(got) - 1]
    assert notes == [f"{path} ends early: {len(got):,} lines were read"]


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".zst", ".bz2"])
def test_a_tar_that_is_cut_off_has_one_note_with_all_its_lines(tmp_path: Path, ending: str) -> None:
    noise = {
        f"{n}.log": b"".join(b"%s\n" % os.urandom(40).hex().encode() for _ in range(8_000)) for n in "abc"
    }
    packed = PACKS[ending](tarred(noise))
    path = written(tmp_path, f"cut.tar{ending}", packed[: len(packed) * 2 // 3])
    found, notes = read(path)
    lines = sum(len(raws(chunks)) for chunks in found.values())
    assert next(iter(found)) == "a.log" and lines > 8_000
    assert notes == [f"{path} ends early: {lines:,} lines were read"]


@pytest.mark.parametrize(
    ("ending", "name"), [(".gz", "gzip"), (".xz", "xz"), (".zst", "zstd"), (".bz2", "bzip2")]
)
def test_bytes_behind_the_end_are_left_out_with_a_note(tmp_path: Path, ending: str, name: str) -> None:
    pack = PACKS[ending]
    path = written(
        tmp_path, f"junk.log{ending}", pack(b"one\n") + pack(b"two\n") + bytes(512) + b"junk" * 999
    )
    found, notes = read(path)
    assert raws(found[str(path)]) == ["one", "two"]
    assert notes == [f"{path} has bytes behind its end that are no {name}; they are left out"]
    padded = written(tmp_path, f"padded.log{ending}", pack(b"one\n") + bytes(512))
    assert read(padded)[1] == []


def test_a_wrong_checksum_loses_no_line(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(LINES))
    packed[-6] ^= 0xFF
    path = written(tmp_path, "crc.log.gz", bytes(packed))
    found, notes = read(path)
    assert raws(found[str(path)]) == LINES.decode().splitlines()
    (note,) = notes
    assert note.startswith(f"{path} is damaged (") and note.endswith("): 3,000 lines were read")


def test_a_damaged_member_of_a_zip_leaves_the_others(tmp_path: Path) -> None:
    data = bytearray(zipped({"a.log": LINES, "b.log": b"fine\n"}))
    data[200:300] = os.urandom(100)
    path = written(tmp_path, "bad.zip", bytes(data))
    found, notes = read(path)
    assert raws(found["b.log"]) == ["fine"]
    assert len(notes) == 1 and "a.log" in notes[0]


def test_layers_deeper_than_three_are_left_out(tmp_path: Path) -> None:
    data, names = b"deep\n", []
    for depth in range(5):
        data = gzip.compress(tarred({f"{depth}.tgz" if depth else "x.log": data}))
        path = written(tmp_path, f"nested{depth}.tgz", data)
        names.append(list(read(path)[0]))
    assert names == [["x.log"], ["1.tgz:x.log"], ["2.tgz:1.tgz:x.log"], [], []]
    with pytest.raises(BadInput, match="is a tar archive without a text log"):
        check_file(path)
    packed = LINES
    for _ in range(4):
        packed = gzip.compress(packed)
    with pytest.raises(BadInput, match="is packed more than 3 times over"):
        check_file(written(tmp_path, "gz.gz.gz.gz", packed))


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst", ".tar.gz", ".zip"])
def test_a_bomb_ends_at_its_bound_in_bounded_memory(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "FREE_BYTES", 4 << 20)
    text = b"x" * (24 << 20)
    if ending == ".zip":
        data = zipped({"a.log": text, "b.log": text})
    elif ending == ".tar.gz":
        data = gzip.compress(tarred({"a.log": text, "b.log": b"one\n"}))
    else:
        data = PACKS[ending](text)
    path = written(tmp_path, f"bomb{ending}", data)
    tracemalloc.start()
    found, notes = read(path)
    assert tracemalloc.get_traced_memory()[1] < 48 << 20
    tracemalloc.stop()
    read_bytes = sum(sum(map(len, raws(chunks))) for chunks in found.values())
    assert 0 < read_bytes < 16 << 20
    assert sum("times its size, the rest is left out" in note for note in notes) == 1


def test_a_header_of_a_tar_is_bounded(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 8 << 30
    path = written(tmp_path, "bomb.tar", tarred({"a.log": b"one\n"})[:1024] + info.tobuf(tarfile.GNU_FORMAT))
    found, notes = read(path)
    assert raws(found["a.log"]) == ["one"]
    assert notes == [f"{path} is damaged (a header of 8,589,934,592 bytes): 1 line was read"]


def test_a_zip_with_a_huge_list_of_members_is_refused(tmp_path: Path) -> None:
    data = bytearray(zipped({"a.log": b"one\n"}))
    at = data.rindex(b"PK\x05\x06")
    data[at + 12 : at + 16] = (1 << 30).to_bytes(4, "little")
    with pytest.raises(BadInput, match="has a list of members of 1,024 MiB"):
        check_file(written(tmp_path, "list.zip", bytes(data)))


def test_encrypted_members_are_named(tmp_path: Path) -> None:
    data = bytearray(zipped({"a.log": b"one\n"}))
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + flags] |= 1
    path = written(tmp_path, "locked.zip", bytes(data))
    _, notes = read(path)
    assert notes == [
        f"{path} is read without 1 encrypted member: a.log",
        f"{path} has no text log",
    ]


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_a_member_is_read_on_from_its_cursor(tmp_path: Path, kind: str) -> None:
    files = {"a.log": LINES, "b.log": LINES[:5000]}
    data = zipped(files) if kind == "zip" else gzip.compress(tarred(files))
    path = written(tmp_path, f"logs.{kind}", data)
    first, _ = read(path, max_records=700)
    for number, chunk in enumerate(first["a.log"]):
        rest, _ = read(path, {"a.log": chunk.cursor, "b.log": first["b.log"][-1].cursor}, max_records=700)
        assert [c.cursor for c in rest["a.log"]] == [c.cursor for c in first["a.log"][number + 1 :]]
        assert rest["b.log"] == []
        later = first["a.log"][number + 1 :]
        assert all(a.records.equals(b.records) for a, b in zip(rest["a.log"], later, strict=True))
    # another archive under the name begins at the beginning
    path.write_bytes(gzip.compress(tarred({"a.log": LINES + LINES[:43]})))
    again, _ = read(path, {"a.log": first["a.log"][-1].cursor})
    assert len(raws(again["a.log"])) == 3001


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_guessed_and_said(tmp_path: Path, encoding: str) -> None:
    path = written(tmp_path, "app.log", LINES.decode().encode(encoding))
    assert check_file(path) == f"{path} is {encoding.upper()}, as the places of its NULs tell, read as UTF-8"
    chunks = list(read_file(path, max_records=700))
    assert raws(chunks) == LINES.decode().splitlines()
    rest = list(read_file(path, start=chunks[1].cursor, max_records=700))
    assert [c.cursor for c in rest] == [c.cursor for c in chunks[2:]]


def test_more_members_than_the_bound_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    path = written(tmp_path, "many.tar", tarred({f"{n}.log": b"x\n" for n in range(5)}))
    found, notes = read(path)
    assert len(found) == 3
    assert notes == [f"{path} has more than 3 members, the rest is left out: 3 lines were read"]


@pytest.mark.long
def test_random_bytes_in_a_tar_end_in_a_sentence(tmp_path: Path) -> None:
    whole = gzip.compress(tarred({"a.log": LINES, "b.log": LINES}))
    for cut in range(0, len(whole), 397):
        data = whole[:cut] + os.urandom(20) + whole[cut + 20 :]
        path = written(tmp_path, "a.tgz", data)
        try:
            _, notes = read(path)
        except BadInput:
            continue
        assert all(isinstance(note, str) for note in notes)


@pytest.mark.parametrize("packing", ["gz", "xz", "tar.gz", "zip"])
def test_packed_standard_input_is_read_like_a_file(packing: str) -> None:
    text = b"".join(b"2026-11-20 10:00:00 INFO line %d\n" % n for n in range(400))
    packed = {
        "gz": lambda: gzip.compress(text),
        "xz": lambda: lzma.compress(text),
        "tar.gz": lambda: _tarred(text),
        "zip": lambda: _zipped(text),
    }[packing]()
    stream = Peeked(io.BytesIO(packed))  # type: ignore[arg-type]
    assert is_packed(stream.first)
    notes: list[str] = []
    read = [
        (reading.source.name, sum(chunk.records.height for chunk in reading.chunks))
        for reading in read_packed(stream, "stdin", note=notes.append)
    ]
    assert read == [("stdin:a.log" if "zip" in packing or "tar" in packing else "stdin", 400)]
    assert notes == []


def _tarred(text: bytes) -> bytes:
    with tarfile.open(fileobj=(out := io.BytesIO()), mode="w:gz") as archive:
        (info := tarfile.TarInfo("a.log")).size = len(text)
        archive.addfile(info, io.BytesIO(text))
    return out.getvalue()


def _zipped(text: bytes) -> bytes:
    with zipfile.ZipFile(out := io.BytesIO(), "w") as archive:
        archive.writestr("a.log", text)
    return out.getvalue()


def test_packed_standard_input_that_is_cut_off_is_read_as_far_as_it_goes() -> None:
    lines = b"".join(b"line %d of %d\n" % (n, n * n) for n in range(9_000))
    notes: list[str] = []
    (count,) = (
        sum(chunk.records.height for chunk in reading.chunks)
        for reading in read_packed(
            Peeked(io.BytesIO(gzip.compress(lines)[:-2_000])), "stdin", note=notes.append
        )
    )
    assert 100 < count < 9_000 and notes == [f"stdin ends early: {count:,} lines were read"]


def test_a_zip_on_standard_input_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_COPIED", 1)
    with pytest.raises(BadInput, match="save it to a file"):
        list(read_packed(Peeked(io.BytesIO(_zipped(b"a\n"))), "stdin", note=print))
