"""Bundles: written whole, verified before they are read."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.errors import BadBundle
from pipeline.models import bundle as bundles
from pipeline.models.bundle import BundleFile, Manifest, TrainingStats
from pipeline.models.evidence import Evidence, Normal
from pipeline.models.known.patterns import KNOWN_SCHEMA, KnownPatterns, load_known
from pipeline.models.threshold import calibrate
from pipeline.watching.sessions.bundled import read_session_models
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.sessions.model import dump as dump_session_models

STATS = TrainingStats(
    lines=30,
    distinct=3,
    fitted=3,
    templates=2,
    held_out_templates=2,
    left_out=0,
    seconds=1.5,
    epochs=4.0,
    steps=20,
    loss=0.5,
    held_out_above=0.0,
    parameters=1000,
    device="cpu",
)
KNOWN = pl.DataFrame(
    {
        "pattern_id": [1, 2, 2**64 - 1],
        "count": [20, 9, 1],
        "template_id": [1, 1, 2],
        "severe": [False, True, False],
        "baseline": [True, False, False],
    },
    schema=KNOWN_SCHEMA,
)


def manifest_of(files: Mapping[str, BundleFile]) -> Manifest:
    return Manifest(
        version="v1",
        created=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        mask_version="abc",
        tokens=("<IP>",),
        config={"model": {"hidden": 8}},
        calibration=calibrate([Normal(evidence=Evidence(surprisal=s)) for s in (1.0, 2.0, 3.0)], total=30),
        stats=STATS,
        seed=1,
        files=files,
    )


def write(out: Path, more: Mapping[str, bytes] | None = None) -> Manifest:
    return bundles.write_bundle(
        out,
        writers={
            bundles.WEIGHTS: lambda p: _bytes(p, b"weights"),
            bundles.TOKENIZER: lambda p: _bytes(p, b"{}"),
            bundles.KNOWN_FILE: KNOWN.write_parquet,
            bundles.WORDS: lambda p: _bytes(p, b"words"),
            bundles.NOVELTY: lambda p: _bytes(p, b"grams"),
            bundles.PRIOR: lambda p: _bytes(p, b"weights of words"),
            **{name: partial(_bytes, data=data) for name, data in (more or {}).items()},
        },
        manifest=manifest_of,
    )


def _bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def edit(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((out / bundles.MANIFEST).read_text(encoding="utf-8"))
    change(data)
    (out / bundles.MANIFEST).write_text(json.dumps(data), encoding="utf-8")


def test_a_written_bundle_loads_as_the_same_manifest(tmp_path: Path) -> None:
    made = write(tmp_path / "models" / "v1")
    assert bundles.load_manifest(tmp_path / "models" / "v1") == made


def test_nothing_but_the_bundle_is_left_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        bundles.write_bundle(tmp_path / "v1", writers={bundles.WEIGHTS: broken}, manifest=manifest_of)
    assert list(tmp_path.iterdir()) == []


def test_a_version_is_never_written_twice(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    with pytest.raises(BadBundle, match="never written twice"):
        write(tmp_path / "v1")


def test_a_bundle_may_hold_further_files_which_are_verified_like_the_others(tmp_path: Path) -> None:
    write(tmp_path / "v1", {bundles.SEQUENCES: b"sessions"})
    write(tmp_path / "v2")
    assert bundles.SEQUENCES in bundles.load_manifest(tmp_path / "v1").files
    assert bundles.optional(tmp_path / "v1", bundles.SEQUENCES) == b"sessions"
    assert bundles.optional(tmp_path / "v2", bundles.SEQUENCES) is None
    (tmp_path / "v1" / bundles.SEQUENCES).write_bytes(b"sessionz")
    with pytest.raises(BadBundle, match=r"sequences\.msgpack does not match"):
        bundles.load_manifest(tmp_path / "v1")


def test_an_optional_file_that_the_manifest_does_not_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    (tmp_path / "v1" / bundles.SEQUENCES).write_bytes(b"slipped in")
    with pytest.raises(BadBundle, match=r"does not name.*sequences\.msgpack"):
        bundles.load_manifest(tmp_path / "v1")


def test_an_earlier_format_names_the_remedy(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    edit(tmp_path / "v1", lambda d: d.update(format=bundles.BUNDLE_FORMAT - 1))
    with pytest.raises(BadBundle, match="train again"):
        bundles.load_manifest(tmp_path / "v1")


@pytest.mark.parametrize("name", sorted(bundles.FILE_CAPS))
def test_an_altered_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / "v1")
    path = tmp_path / "v1" / name
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(BadBundle, match=name):
        bundles.load_manifest(tmp_path / "v1")


@pytest.mark.parametrize("name", [bundles.WEIGHTS, bundles.MANIFEST])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / "v1")
    (tmp_path / "v1" / name).unlink()
    with pytest.raises(BadBundle, match=name):
        bundles.load_manifest(tmp_path / "v1")


def test_a_truncated_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    (tmp_path / "v1" / bundles.WEIGHTS).write_bytes(b"wei")
    with pytest.raises(BadBundle, match="3 bytes, its manifest says 7"):
        bundles.load_manifest(tmp_path / "v1")


def test_a_link_is_refused_even_when_its_target_matches(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    weights = tmp_path / "v1" / bundles.WEIGHTS
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadBundle, match="not a regular file"):
        bundles.load_manifest(tmp_path / "v1")


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    (tmp_path / "v1" / bundles.WEIGHTS).unlink()
    os.mkfifo(tmp_path / "v1" / bundles.WEIGHTS)
    with pytest.raises(BadBundle, match="not a regular file"):
        bundles.load_manifest(tmp_path / "v1")


def test_a_file_the_manifest_does_not_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    (tmp_path / "v1" / "extra.pkl").write_bytes(b"")
    with pytest.raises(BadBundle, match=r"extra\.pkl"):
        bundles.load_manifest(tmp_path / "v1")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "model.pkl"])
def test_a_name_outside_the_closed_list_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "v1")
    edit(tmp_path / "v1", lambda d: d["files"].update({name: {"size": 1, "sha256": "0" * 64}}))
    with pytest.raises(BadBundle, match="unknown files"):
        bundles.load_manifest(tmp_path / "v1")


def test_a_file_over_its_cap_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    with (tmp_path / "v1" / bundles.TOKENIZER).open("r+b") as f:
        f.truncate(bundles.FILE_CAPS[bundles.TOKENIZER] + 1)  # sparse: no disk is used
    with pytest.raises(BadBundle, match="at most"):
        bundles.load_manifest(tmp_path / "v1")


def test_a_newer_format_names_the_remedy(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    edit(tmp_path / "v1", lambda d: d.update(format=bundles.BUNDLE_FORMAT + 1))
    with pytest.raises(BadBundle, match="upgrade Logweir"):
        bundles.load_manifest(tmp_path / "v1")


@pytest.mark.parametrize(
    "field", ["version", "calibration", "stats", "files", "created", "mask_version", "tokens"]
)
def test_a_manifest_without_a_field_is_refused(tmp_path: Path, field: str) -> None:
    write(tmp_path / "v1")
    edit(tmp_path / "v1", lambda d: d.pop(field))
    with pytest.raises(BadBundle):
        bundles.load_manifest(tmp_path / "v1")


@pytest.mark.parametrize("text", ["", "[]", "null", '{"format": "x"}', "{" * 50])
def test_a_manifest_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path / "v1")
    (tmp_path / "v1" / bundles.MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(BadBundle):
        bundles.load_manifest(tmp_path / "v1")


def test_known_patterns_count_by_pattern_and_by_template(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    known = load_known(tmp_path / "v1")
    assert len(known) == 3
    assert known.count(1) == 20 and known.count(2**64 - 1) == 1 and known.count(5) == 0
    assert known.template_count(1) == 29 and known.template_count(9) == 0
    assert known.template_of(2) == 1 and known.template_of(5) is None
    assert 2 in known and 5 not in known
    assert known.template_severe(1) and not known.template_severe(2)


def test_an_unreadable_pattern_file_is_a_bad_bundle(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    (tmp_path / "v1" / bundles.KNOWN_FILE).write_bytes(b"not parquet")
    with pytest.raises(BadBundle, match="not readable"):
        load_known(tmp_path / "v1")


def test_pattern_columns_of_another_shape_are_a_bad_bundle(tmp_path: Path) -> None:
    write(tmp_path / "v1")
    pl.DataFrame({"pattern_id": ["x"]}).write_parquet(tmp_path / "v1" / bundles.KNOWN_FILE)
    with pytest.raises(BadBundle, match="expected"):
        load_known(tmp_path / "v1")


def test_an_empty_sample_knows_no_pattern() -> None:
    assert KnownPatterns(KNOWN.clear()).count(1) == 0


def test_a_parent_version_is_kept() -> None:
    made = replace(manifest_of({}), parent="v0")
    assert Manifest.from_json(made.to_json()).parent == "v0"


@pytest.mark.parametrize(("trained_on", "others"), [([], True), (["shop"], True), (["cart", "shop"], False)])
def test_sessions_of_one_of_several_workloads_say_nothing_of_another(
    tmp_path: Path, trained_on: list[str], others: bool
) -> None:
    rules = SessionModel.fit([(1, 2, 3)] * 60)
    write(tmp_path / "v1", {bundles.SEQUENCES: dump_session_models({"shop\0trace": rules})})
    edit(tmp_path / "v1", lambda manifest: manifest.update(workloads=trained_on))
    known = read_session_models(tmp_path / "v1")
    assert ("shop", "trace") in known and ((None, "trace") in known) is others


def test_sessions_of_a_damaged_bundle_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "v1", {bundles.SEQUENCES: b"sessions"})
    (tmp_path / "v1" / bundles.SEQUENCES).write_bytes(b"other")
    for name in ("v1", "none"):
        with pytest.raises(BadBundle):
            read_session_models(tmp_path / name)
