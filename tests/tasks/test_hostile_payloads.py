"""Payloads and bundles that lie: refused with an error of ours, in bounded memory, and never the end of the
process."""

import json
import subprocess
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import polars as pl
import pytest

from bench import _fuzz_targets
from bench._fuzz_child import TRIED, Watch, grouped, unpacked
from bench._fuzz_mutations import mutations
from bench._fuzz_seeds import LINES, RECORDS
from bench._fuzz_targets import TARGETS, Target, attempt
from bench.fuzz import NAMES, fuzz
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import BadBundle, BadPayload
from pipeline.models import bundle as bundles
from pipeline.opensearch.scan import as_text
from pipeline.records.schema import pack_frame, raw_frame, unpack_frame
from pipeline.records.verdict import Verdict
from pipeline.sources.chunks import Cursor
from pipeline.sources.formats import detect
from pipeline.sources.formats_delimited import is_layout
from pipeline.sources.formats_text import NAMES as FORMATS
from pipeline.sources.framing import Framer
from tests.models.test_bundle import edit, write

SIZE_BYTES = 8  # that a frame begins with: how large it is in memory
FRAME = pack_frame(raw_frame([f"line {i}" for i in range(50)]))


@pytest.mark.parametrize("at", range(0, len(FRAME), 7))
def test_a_frame_with_any_changed_byte_is_refused_before_memory_is_asked_for(at: int) -> None:
    changed = bytearray(FRAME)
    changed[at] ^= 0x7F
    if at < SIZE_BYTES:  # a size alone bounds what is read, and nothing is allocated by it
        changed[SIZE_BYTES - 1] = 0x7F
    with pytest.raises(BadPayload):
        unpack_frame(bytes(changed))


def test_a_bomb_is_refused_by_what_it_would_unpack_to() -> None:
    bomb = pack_frame(raw_frame(["x" * 60_000] * 2_000))
    assert len(bomb) < 1 << 20
    with pytest.raises(BadPayload, match="at most 67108864"):
        unpack_frame(bomb, max_bytes=64 << 20)
    assert unpack_frame(bomb).height == 2_000


@pytest.mark.parametrize("blob", [b"", FRAME[:10], FRAME[:-8], FRAME + b"x", FRAME[1:]], ids=len)
def test_a_frame_that_is_cut_or_longer_is_refused(blob: bytes) -> None:
    with pytest.raises(BadPayload, match="is damaged"):
        unpack_frame(blob)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_many_mutations_of_what_is_read_are_answered_or_refused(name: str) -> None:
    target = TARGETS[name]
    inputs = mutations(target.seeds(), target.words, 7, target.made)
    size = min(target.together, 512)  # a call takes about as long for 512 inputs as for 256
    for group in islice(grouped(inputs, size), 1000 if size == 1 else 512 // size):
        assert attempt(target, group) is None, group


def test_the_benchmark_offers_every_target() -> None:
    assert set(NAMES) == set(TARGETS)


@pytest.mark.long
def test_the_fuzzer_begins_with_lines_of_every_format() -> None:
    seeds = [*LINES, *RECORDS]
    found = {name for seed in seeds for name in detect(seed.split("\n"))}
    assert {name for name in found if not is_layout(name)} == set(FORMATS)
    assert {name[:3] for name in found if is_layout(name)} == {"csv", "w3c"}


@pytest.fixture
def whole_inputs(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Hundreds of inputs, of which framing loses nothing. What it frames is not parsed: the test before does
    that with all formats, which takes seconds."""
    monkeypatch.setattr(_fuzz_targets, "_parsed", lambda *_: None)
    inputs = [b"\x05INFO line %d of many\n" % n for n in range(300)]
    inputs[7] = b"\0ERROR disk full\n"
    assert attempt(TARGETS["framing"], inputs) is None
    return inputs


@pytest.mark.long
@pytest.mark.parametrize(
    "lose",
    [
        lambda rows: rows[1:],
        lambda rows: rows.with_columns(pl.col("raw").str.replace("disk", "disc")),
        lambda rows: rows.with_columns(pl.col("lines") + 1),
    ],
    ids=["a row", "a letter", "a count"],
)
def test_one_lost_line_among_hundreds_of_inputs_is_seen(
    lose: Callable[[pl.DataFrame], pl.DataFrame],
    whole_inputs: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Framer.feed_frame

    def feed_frame(self: Framer, lines: pl.DataFrame) -> pl.DataFrame:
        rows = whole(self, lines)
        return lose(rows) if rows["raw"].str.contains("disk").any() else rows

    monkeypatch.setattr(Framer, "feed_frame", feed_frame)
    assert isinstance(attempt(TARGETS["framing"], whole_inputs), AssertionError)


# ---- how the fuzzer finds the one among many


def watching(
    directory: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Sequence[bytes]], None]
) -> Watch:
    target = Target(name="own", run=run, seeds=lambda: [b"a"], together=64)
    monkeypatch.setitem(TARGETS, "own", target)
    return Watch("own", directory)


def found(directory: Path) -> dict[str, bytes]:
    """What was wrong, and the bytes that were kept."""
    return {
        json.loads(path.read_text())["what"]: path.with_suffix("").read_bytes()
        for path in directory.glob("finding-*.json")
    }


def test_the_one_input_that_raises_is_kept_and_every_input_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(inputs: Sequence[bytes]) -> None:
        if b"17" in inputs:
            raise ValueError("seventeen")

    watch = watching(tmp_path, monkeypatch, run)
    watch.try_together([b"%d" % n for n in range(50)])
    watch.try_together([b"x"])
    assert [(what.partition(" ")[0], kept) for what, kept in found(tmp_path).items()] == [
        ("ValueError", b"17")
    ]
    assert unpacked((tmp_path / TRIED).read_bytes()) == (51, [])


def test_inputs_that_raise_only_together_are_kept_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(inputs: Sequence[bytes]) -> None:
        if {b"3", b"20"} <= set(inputs):
            raise ValueError("both")

    watching(tmp_path, monkeypatch, run).try_together([b"%d" % n for n in range(32)])
    ((_, kept),) = found(tmp_path).items()
    assert {b"3", b"20"} <= set(unpacked(kept)[1])


def test_a_refusal_of_one_input_hides_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(inputs: Sequence[bytes]) -> None:
        for data in inputs:
            if data == b"2":
                raise BadPayload("refused")
            if data == b"30":
                raise ValueError("thirty")

    watching(tmp_path, monkeypatch, run).try_together([b"%d" % n for n in range(32)])
    assert list(found(tmp_path).values()) == [b"30"]


def test_one_slow_input_among_many_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("bench._fuzz_child.time.process_time", lambda: clock[0])

    def run(inputs: Sequence[bytes]) -> None:
        clock[0] += sum(1.5 if data == b"slow" else 0.01 for data in inputs)

    watch = watching(tmp_path, monkeypatch, run)
    for _ in range(40):
        watch.try_together([b"x"] * 64)
    watch.try_together([*[b"x"] * 40, b"slow", *[b"x"] * 23])
    assert found(tmp_path) == {"took 1.5 s": b"slow"}


def test_what_ended_the_process_is_halved_until_its_input_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    def run(inputs: Sequence[bytes]) -> None:
        if b"17" in inputs:
            raise Died

    def child(*_args: object, **_other: object) -> subprocess.CompletedProcess[bytes]:
        try:
            watch = watching(tmp_path / "own", monkeypatch, run)
            if not watch.executions:
                watch.try_together([b"%d" % n for n in range(40)])
        except Died:
            return subprocess.CompletedProcess((), -9)
        return subprocess.CompletedProcess((), 0)

    monkeypatch.setattr("bench.fuzz.subprocess.run", child)
    watching(tmp_path, monkeypatch, run)  # so that fuzz() knows the target
    values = fuzz("own", 60, 1, tmp_path / "own")
    assert found(tmp_path / "own") == {"died with -9: ": b"17"}
    # The parts before it that were tried to their end, and the one that it died of.
    assert values["executions"] == 10 + 5 + 2 + 1


# ---- found by bench/fuzz.py ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blob", [b"\x95\x01\x01\xc0\xc0\x07", b"\x95\x01\xa1x\xc0\xc0\x90", b"\x95\xc0\x01\xc0\xc0\x90"]
)
def test_a_verdict_of_other_types_is_refused(blob: bytes) -> None:
    with pytest.raises(BadPayload):
        Verdict.unpack(blob)


def test_a_cursor_at_infinity_is_refused() -> None:
    with pytest.raises(BadPayload):
        Cursor.unpack('{"v": 1, "path": "a", "identity": "b", "offset": 1e999, "line": 0, "inside": false}')


def test_half_a_character_of_a_document_can_be_stored() -> None:
    assert as_text("a\ud800") == "a\\ud800"
    assert as_text({"a": "\ud800"}) == '{"a":"\\ud800"}'


def test_a_mask_that_reads_on_stops_at_the_end_of_its_line() -> None:
    masks = MaskSet.load()
    first, second = "Failed password for root from ", ".0.0.7"
    assert masks.mask_one(f"{first}\n{second}") == f"{masks.mask_one(first)} <NL> {masks.mask_one(second)}"
    assert masks.mask_one(f"{first}\n{second}") != masks.mask_one(f"{first}{second}")


# ---- bundles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"seed": 1e999}, {"seed": float("nan")}, {"files": {"model.safetensors": {"size": 1e999, "sha256": ""}}}, {"held_out": ["x"]}],
    ids=str,
)  # fmt: skip
def test_a_manifest_of_absurd_numbers_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    write(tmp_path / "v1")
    edit(tmp_path / "v1", lambda data: data.update(change))
    with pytest.raises(BadBundle):
        bundles.load_manifest(tmp_path / "v1")


def test_a_manifest_of_lists_without_end_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    (tmp_path / "v1" / bundles.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(BadBundle):
        bundles.load_manifest(tmp_path / "v1")
