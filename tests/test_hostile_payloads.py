"""Payloads and bundles that lie: refused with an error of ours, in bounded memory, and never the end of the process."""

import io
import json
import struct
from pathlib import Path

import polars as pl
import pytest
from test_bundle import edit, write

from bench._fuzz_targets import TARGETS, attempt, mutations
from bench.fuzz import NAMES
from pipeline.errors import BadBundle, BadPayload
from pipeline.models import bundle as bundles
from pipeline.opensearch.scan import as_text
from pipeline.records import Verdict, pack_frame, raw_frame, unpack_frame
from pipeline.sources.chunks import Cursor

FRAME = pack_frame(raw_frame([f"line {i}" for i in range(50)]))


def test_a_length_that_lies_is_refused_before_memory_is_asked_for() -> None:
    # The first compressed buffer: the eight bytes before zstd's mark say what it unpacks to.
    at = FRAME.index(b"\x28\xb5\x2f\xfd") - 8
    for stated in (1 << 40, (1 << 63) - 1):
        blob = FRAME[:at] + struct.pack("<q", stated) + FRAME[at + 8 :]
        with pytest.raises(BadPayload, match="unpacks to"):
            unpack_frame(blob)
    with pytest.raises(BadPayload):
        unpack_frame(FRAME[:at] + struct.pack("<q", -2) + FRAME[at + 8 :])


def test_a_bomb_is_refused_by_what_it_would_unpack_to() -> None:
    bomb = pack_frame(raw_frame(["x" * 60_000] * 2_000))
    assert len(bomb) < 1 << 20
    with pytest.raises(BadPayload, match="at most 67108864"):
        unpack_frame(bomb, max_bytes=64 << 20)
    assert unpack_frame(bomb).height == 2_000


@pytest.mark.parametrize(
    "frame",
    [
        pl.DataFrame({"a": pl.Series(["x"], dtype=pl.Categorical)}),
        pl.DataFrame({"a": [{"b": 1}]}),
        pl.DataFrame({"a": [b"x"]}),
        pl.DataFrame({f"c{n}": [1] for n in range(100)}),
    ],
    ids=["dictionary", "struct", "binary", "too many columns"],
)
def test_columns_of_a_kind_that_we_never_write_are_refused(frame: pl.DataFrame) -> None:
    with pytest.raises(BadPayload):
        unpack_frame(pack_frame(frame))


@pytest.mark.parametrize(
    "name", ["message", "stored", "manifest", "weights", "payload", "documents", "times"]
)
def test_a_thousand_mutations_of_what_is_read_are_answered_or_refused(name: str) -> None:
    target = TARGETS[name]
    for _, data in zip(
        range(60 if name in ("documents", "times") else 1000), mutations(target, 7), strict=False
    ):
        assert attempt(target, data) is None, data


def test_the_benchmark_offers_every_target() -> None:
    assert set(NAMES) == set(TARGETS)


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


def weights(entries: object, data: int = 16, stated: int | None = None) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header) if stated is None else stated) + header + bytes(data)


ONE = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def test_weights_as_they_are_written_pass_the_check() -> None:
    blob = weights({"a": ONE, "__metadata__": {"format": "pt"}})
    assert bundles.weights_header(io.BytesIO(blob), len(blob)) == {"a": (2, 2)}


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        weights({"a": ONE}, stated=1 << 60),
        weights({"a": ONE}, data=15),
        weights({"a": ONE | {"shape": [1 << 62, 1 << 62]}}),
        weights({"a": ONE | {"shape": [2] * 100}}),
        weights({"a": ONE | {"shape": [True, 4]}}),
        weights({"a": ONE | {"data_offsets": [-16, 0]}}),
        weights({"a": ONE, "b": ONE}),
        weights({"a": ONE | {"dtype": "PICKLE"}}),
        weights([1]),
        weights({"a": [0]}),
        struct.pack("<Q", 50_000) + b"[" * 50_000,
    ],
)
def test_a_header_of_weights_that_lies_is_refused(blob: bytes) -> None:
    with pytest.raises(BadBundle):
        bundles.weights_header(io.BytesIO(blob), len(blob))
