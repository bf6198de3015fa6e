"""Files: which are meant, every line once, cursors, packed and damaged files."""

import gzip
import os
import subprocess
import sys
import threading
from pathlib import Path

import polars as pl
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._log_files import read_file
from pipeline.errors import BadInput, BadPayload
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.files import check_file, choose, total_bytes
from pipeline.sources.lines import LineCutter, decode

HEADED = b"".join(
    b"2026-11-20 10:00:%02d INFO request %d took %d ms\n" % (i % 60, i, i * 7 % 100) for i in range(12000)
)


def written(folder: Path, data: bytes, name: str = "app.log") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def raws(path: Path) -> list[str]:
    return [raw for chunk in read_file(path) for raw in chunk.records["raw"].to_list()]


def joined(chunks: list[Chunk]) -> pl.DataFrame:
    return pl.concat([c.records for c in chunks])


def test_reading_needs_no_heavy_package() -> None:
    script = (
        "import sys, pipeline.sources.follow, pipeline.sources.stdin, pipeline.sources.formats\n"
        "print(sorted({'torch', 'transformers', 'celery', 'redis', 'drain3'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Which files


def test_paths_and_globs_give_each_file_once_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    b, a = written(tmp_path, b"b\n", "b.log"), written(tmp_path, b"a\n", "a.log")
    c = written(tmp_path / "deep" / "er", b"c\n", "c.log")
    odd = written(tmp_path, b"odd\n", "odd[1].log")
    link = tmp_path / "link.log"
    link.symlink_to(b)
    got = choose([str(b), f"{tmp_path}/[a-c].log", f"{tmp_path}/**/c.log", str(odd), str(link)])
    assert got.paths == (b, a, c, odd)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.log", "missing.log does not exist; check the name"),
        ("folder", "folder has no text log; no file there is wanted, name a log file or another folder"),
        ("*.nope", "matches no file; check the pattern"),
        ("fold*", "matches only directories"),
        ("dangling.log", "dangling.log does not exist; it is a link to a missing file"),
        ("socket", "neither a file nor a pipe"),
    ],
)
def test_a_name_that_is_no_log_is_one_clear_sentence(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling.log").symlink_to(tmp_path / "gone.log")
    if name == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as listener, pytest.raises(BadInput, match=says):
            listener.bind(str(tmp_path / name))
            choose([str(tmp_path / name)])
        return
    with pytest.raises(BadInput, match=says):
        choose([str(tmp_path / name)])


@pytest.mark.skipif(os.geteuid() == 0, reason="runs as root, who may read everything")
def test_a_file_without_permission_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = written(tmp_path, b"secret\n")
    path.chmod(0)
    with pytest.raises(BadInput, match=r"may not be read by this user; run `chmod \+r`"):
        choose([str(path)])


def test_no_permission_is_seen_through_the_access_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, b"secret\n")
    monkeypatch.setattr(os, "access", lambda *_args, **_more: False)
    with pytest.raises(BadInput, match=r"may not be read by this user"):
        list(read_file(path))


# What is in them


def test_an_empty_file_gives_no_lines_and_a_note(tmp_path: Path) -> None:
    path = written(tmp_path, b"")
    assert check_file(path) == f"{path} is empty"
    assert list(read_file(path)) == []


@pytest.mark.parametrize(
    "data",
    [b"\x7fELF" + bytes(range(256)) * 20, os.urandom(5000), b"PAR1" + b"\0" * 500],
    ids=["executable", "random", "nuls"],
)
def test_a_binary_file_is_refused_before_anything_is_read(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path, data)
    with pytest.raises(BadInput, match=r"is not a text log: .* give the log as text"):
        check_file(path)
    with pytest.raises(BadInput, match="is not a text log"):
        list(read_file(path))


def test_a_packing_that_is_not_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is 7-zip-compressed, which is not read; unpack it first"):
        check_file(written(tmp_path, b"7z\xbc\xaf\x27\x1c" + b"\1" * 30))


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"one\ntwo", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\r\ntwo\r", ["one", "two"]),
        (b"\n", [""]),
        (b"\xef\xbb\xbfone\ntwo\n", ["one", "two"]),
        (b"\xef\xbb\xbfone", ["one"]),
        (b"caf\xe9 \xff\ntwo\n", ["caf\\xe9 \\xff", "two"]),
        (
            b"a long enough line before the NUL \0 and after\nx\n",
            ["a long enough line before the NUL \\x00 and after", "x"],
        ),
        ("größe → 5\n".encode(), ["größe → 5"]),
        ("one\x0btwo\u2028three\x85\n".encode(), ["one\x0btwo\u2028three\x85"]),
        ("one\ntwö\n".encode("utf-16"), ["one", "twö"]),
        (b"\xfe\xff" + "one\ntwö".encode("utf-16-be"), ["one", "twö"]),
        (b"one\rtwo\rthree", ["one", "two", "three"]),
        ("one\rtwö\r".encode("utf-16"), ["one", "twö"]),
        (b"10 %\r20 %\rdone\nnext\n", ["10 %\r20 %\rdone", "next"]),
        (b"one\r", ["one"]),
    ],
)
def test_lines_are_what_a_reader_sees_and_odd_bytes_are_escaped(
    tmp_path: Path, data: bytes, lines: list[str]
) -> None:
    path = written(tmp_path, data)
    check_file(path)
    assert raws(path) == lines
    records = joined(list(read_file(path)))
    assert records["line"].to_list() == list(range(1, len(lines) + 1))
    assert records["lines"].sum() == len(lines)


@pytest.mark.long
def test_a_line_of_any_length_flows_in_bounded_memory(tmp_path: Path) -> None:
    size = 200 * 1024 * 1024
    path = tmp_path / "one-line.log.zst"
    with path.open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as out:
        for _ in range(size // (1024 * 1024)):
            out.write(b"x" * 1024 * 1024)
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from pipeline.sources.files import read_texts\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "path, before = Path(sys.argv[1]), peak()\n"
        "lines = size = 0\n"
        "texts = read_texts(path, note=print)\n"
        "for chunk in next(texts).chunks:\n"
        "    lines += int(chunk.records['lines'].sum())\n"
        "    size += int(chunk.records['raw'].str.len_bytes().sum())\n"
        "    assert chunk.records['raw'].str.len_bytes().max() <= 65536\n"
        "    assert set(chunk.records['line'].to_list()) == {1}\n"
        "print(lines, size, peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines, total, grown_mib = map(int, done.stdout.split())
    assert (lines, total) == (1, size)
    assert grown_mib < 150  # MiB; the line is 200


# Chunks and cursors


@pytest.mark.long
def test_reading_twice_gives_the_same_chunks_and_every_chunk_can_be_resumed(tmp_path: Path) -> None:
    trace = b"2026-11-20 10:00:00 ERROR broken\n\tat a.B.c(B.java:1)\n" + b"y" * 200_000 + b"\xff\n"
    path = written(tmp_path, HEADED + trace + HEADED[:5000] + b"end")
    first = list(read_file(path, max_records=700, max_bytes=40_000))
    again = list(read_file(path, max_records=700, max_bytes=40_000))
    assert [c.cursor for c in first] == [c.cursor for c in again]
    assert len(first) > 10
    assert first[-1].position == path.stat().st_size == total_bytes(path)
    assert first[-1].cursor.offset == path.stat().st_size
    for number, chunk in enumerate(first):
        assert chunk.records["raw"].str.len_bytes().sum() <= 40_000 or chunk.records.height == 1
        start = Cursor.unpack(chunk.cursor.pack())
        rest = list(read_file(path, start=start, max_records=700, max_bytes=40_000))
        assert [c.cursor for c in rest] == [c.cursor for c in first[number + 1 :]]
        assert all(a.records.equals(b.records) for a, b in zip(rest, first[number + 1 :], strict=True))
        assert all(c.formats == ("iso",) for c in rest)
    assert joined(first)["lines"].sum() == path.read_bytes().count(b"\n") + 1


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".log"])
def test_packed_files_resume_too_whatever_their_name(tmp_path: Path, suffix: str) -> None:
    half = len(HEADED) // 2  # two members, two frames, cut in the middle of a line
    pack = zstandard.ZstdCompressor().compress if suffix == ".zst" else gzip.compress
    path = written(tmp_path, pack(HEADED[:half]) + pack(HEADED[half:]), f"app{suffix}")
    chunks = list(read_file(path, max_records=5000))
    assert joined(chunks)["raw"].to_list() == HEADED.decode().splitlines()
    rest = list(read_file(path, start=chunks[0].cursor, max_records=5000))
    assert joined(rest).equals(joined(chunks[1:]))
    assert chunks[-1].position == path.stat().st_size


@pytest.mark.long
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gzip", "zstd"])
def test_a_cut_off_archive_gives_what_it_holds_and_then_says_so(tmp_path: Path, pack: object) -> None:
    noise = b"".join(b"%s\n" % os.urandom(40).hex().encode() for _ in range(20_000))
    packed = pack(noise)  # type: ignore[operator]
    path = written(tmp_path, packed[: len(packed) * 2 // 3])
    got: list[str] = []
    with pytest.raises(BadInput, match=r"ends early: .* lines were read"):
        for chunk in read_file(path):
            got.extend(chunk.records["raw"].to_list())
    whole = noise.decode().splitlines()
    assert len(got) > 5000
    assert got[:-1] == whole[: len(got) - 1]


def test_a_damaged_archive_gives_what_it_holds_and_then_says_so(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(os.urandom(300_000).hex().encode() + b"\n"))
    packed[len(packed) // 2 :] = b"\0" * (len(packed) - len(packed) // 2)
    got = 0
    with pytest.raises(BadInput, match=r"is damaged|ends early"):
        for chunk in read_file(written(tmp_path, bytes(packed))):
            got += int(chunk.records["raw"].str.len_bytes().sum())
    assert got > 100_000


def test_a_cursor_of_another_file_starts_at_the_beginning(tmp_path: Path) -> None:
    path = written(tmp_path, b"one\ntwo\n")
    cursor = list(read_file(path))[-1].cursor
    assert list(read_file(path, start=cursor)) == []
    path.write_bytes(b"one\ntwo\nthree\n")
    assert [c.records["raw"].to_list() for c in read_file(path, start=cursor)] == [["three"]]
    path.write_bytes(b"other content\n")
    assert [c.records["raw"].to_list() for c in read_file(path, start=cursor)] == [["other content"]]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"v": 1}', "null"])
def test_text_that_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(BadPayload, match="a cursor is not readable"):
        Cursor.unpack(text)


def test_a_cursor_of_a_newer_build_is_refused() -> None:
    packed = Cursor(path="a", identity="b").pack().replace('"v":1', '"v":9')
    with pytest.raises(BadPayload, match="version 9; this build reads up to 1"):
        Cursor.unpack(packed)


def test_a_named_pipe_is_read_as_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"one\ntwo\n",), daemon=True)
    assert choose([str(path)]).paths == (path,)
    assert check_file(path) == ""
    assert total_bytes(path) == 0
    writer.start()
    assert raws(path) == ["one", "two"]
    writer.join(timeout=10)


# Lines


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [b"\n", b"\r\n", b"\0", b"\xff", "é".encode(), "€".encode(), b"x^c", b"x" * 30, b"\xe2\x82"]
        ),
        max_size=60,
    ),
    st.lists(st.integers(0, 400), max_size=8),
    st.integers(16, 64),
)
def test_lines_do_not_depend_on_the_blocks_and_lose_nothing(
    parts: list[bytes], cuts: list[int], cap: int
) -> None:
    data = b"".join(parts)

    def rows(edges: list[int]) -> pl.DataFrame:
        cutter = LineCutter(cap=cap)
        frames = [cutter.push(data[a:b]) for a, b in zip(edges, [*edges[1:], len(data)], strict=True)]
        return pl.concat([*frames, cutter.finish()])

    whole = rows([0])
    assert rows([0, *sorted(min(c, len(data)) for c in cuts)]).equals(whole)
    assert whole["raw"].str.len_bytes().max() is None or whole["raw"].str.len_bytes().max() <= cap  # type: ignore[operator]
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    lines: list[str] = []
    for raw, part in whole.select("raw", "part").iter_rows():
        if part == 2:
            lines[-1] += raw
        else:
            lines.append(raw)
    assert len(lines) == len(expected)
    # pieces are cut between characters, but a byte that is none can be judged only within its piece
    if b"\xe2\x82" not in parts:
        assert lines == [decode(line.removesuffix(b"\r")) for line in expected]
    ends = whole["end"].to_list()
    assert [abs(e) for e in ends] == sorted(abs(e) for e in ends)
    assert not ends or abs(ends[-1]) == len(data)


@pytest.mark.parametrize(("tail", "rest"), [(b"OR tail\nthird\n", "OR tail"), (b"\nthird\n", "")])
def test_the_rest_of_a_last_line_that_had_no_newline_is_a_piece_of_that_line(
    tmp_path: Path, tail: bytes, rest: str
) -> None:
    path = tmp_path / "grows.log"
    path.write_bytes(b"first\npartial ERR")
    (chunk,) = read_file(path)
    with path.open("ab") as file:
        file.write(tail)
    (more,) = read_file(path, start=chunk.cursor)
    rows = [*chunk.records.iter_rows(named=True), *more.records.iter_rows(named=True)]
    assert [(r["raw"], r["line"], r["lines"]) for r in rows] == [
        ("first", 1, 1), ("partial ERR", 2, 1), (rest, 2, 0), ("third", 3, 1),
    ]  # fmt: skip
