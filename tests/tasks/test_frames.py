"""`score_frame`: rows stay as they are, whatever they hold; what is no frame or no export is refused."""

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.test_trainer import run, sample, sentences

import pipeline
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.templates import Template
from pipeline.errors import BadBundle, BadInput
from pipeline.records.schema import LEARN_SCHEMA
from pipeline.tasks.frames import JUDGED_SCHEMA, score_frame, write_export
from pipeline.training.sampling import Sampler

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frames")
    lines = sentences(120)
    run(sample(lines), folder / "bundle", mask_version=MaskSet.load().version)
    templates = [
        Template(template_id=number, text=line, severe=False, workload="w")
        for number, line in enumerate(lines, start=1)
    ]
    write_export(folder / "export", model=folder / "bundle", templates=templates, masks=(), similarity=0.7)
    return folder / "export"


def test_it_is_a_name_of_the_package(export: Path) -> None:
    judged = pipeline.score_frame(pl.DataFrame({"message": sentences(3)}), export)
    assert judged["template_id"].to_list() == [1, 2, 3]
    assert judged["template"].to_list() == sentences(3)
    assert not judged["anomalous"].any()


def test_a_line_of_no_template_has_none_and_nothing_is_learnt(export: Path) -> None:
    frame = pl.DataFrame({"message": ["disk sda1 is on fire"] * 2, "level": ["FATAL", None]})
    for _ in range(2):
        judged = score_frame(frame, export)
        assert judged["template_id"].to_list() == [None, None] and judged["template"].null_count() == 2
        assert judged["anomalous"][0] and judged["reasons"].list.first().to_list() == ["new-template"] * 2


@pytest.mark.parametrize("baseline", [True, False])
def test_a_calm_new_line_is_a_new_template_for_a_model_that_was_trained_from_documents(
    tmp_path: Path, baseline: bool
) -> None:
    masks = MaskSet.load()
    sampler = Sampler(masks, limit=1_000)
    documents = pl.DataFrame({"message": sentences(120) * 20, "workload": "w"})
    unknown = [pl.lit(None, dtype=t).alias(n) for n, t in LEARN_SCHEMA.items() if n not in documents.columns]
    sampler.add(documents.with_columns(unknown).select(list(LEARN_SCHEMA)), baseline=baseline)
    run(sampler.sample().frame, tmp_path / "bundle", mask_version=masks.version)
    known = [Template(template_id=1, text="some other line", severe=False, workload="w")]
    write_export(tmp_path / "export", model=tmp_path / "bundle", templates=known, masks=(), similarity=0.7)
    new = [
        "quantum flux inverted beyond horizon sector gamma",
        "zebra stampede rerouted through marble corridor tonight",
        "violet harpsichord tuned against copper moonlight",
    ]
    judged = score_frame(pl.DataFrame({"message": new}), tmp_path / "export")
    assert judged["reasons"].list.first().to_list() == ["new-template"] * 3
    assert judged["anomalous"].all() and judged["template_id"].null_count() == 3


texts = st.none() | st.text(st.characters(codec="utf-8"), max_size=30) | st.sampled_from(sentences(20))


@given(st.lists(texts, max_size=20), st.sampled_from(["message", "raw"]))
@settings(max_examples=40, deadline=None)
def test_rows_stay_in_order_and_those_without_text_get_nulls(
    export: Path, values: list[str | None], name: str
) -> None:
    frame = pl.DataFrame({"n": range(len(values)), name: values}, schema={"n": pl.Int64, name: pl.String})
    judged = score_frame(frame, export)
    assert judged.select("n", name).equals(frame)
    assert dict(judged.select(list(JUDGED_SCHEMA)).schema) == JUDGED_SCHEMA
    assert judged["score"].is_not_null().to_list() == [value is not None for value in values]
    if name == "message":  # the formats of headers are told by all rows together
        alone = {value: score_frame(pl.DataFrame({name: [value]}), export)["score"][0] for value in values}
        assert judged["score"].to_list() == [alone[value] for value in values]


def test_columns_of_an_earlier_judgement_are_replaced(export: Path) -> None:
    first = score_frame(pl.DataFrame({"message": sentences(3)}), export)
    assert score_frame(first.with_columns(score=pl.lit("x")), export).equals(first)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (pl.DataFrame({"text": ["a"]}), "columns text"),
        (pl.DataFrame(), "columns none"),
        (pl.DataFrame({"message": [1]}), "column 'message' of Int64"),
        (pl.LazyFrame({"message": ["a"]}), "not LazyFrame"),
        ({"message": ["a"]}, "not dict"),
        (None, "not NoneType"),
    ],
)
def test_what_is_no_frame_of_texts_is_refused(export: Path, frame: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        score_frame(frame, export)


def damaged(export: Path, tmp_path: Path, name: str, content: bytes | None) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(export, copy)
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content)
    return copy


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("export.json", None, "is no export of a model"),
        ("export.json", b"{}", "cannot be read"),
        ("export.json", b'{"v":9,"version":"m","similarity":0.7}', "export again"),
        ("templates.parquet", b"PAR1", "cannot be read"),
        ("model/known.parquet", b"x", "known.parquet has 1 bytes"),
        ("masks/000.toml", b'[[masks]]\nname="X"\npattern="zq+"\ntoken="<ZQ>"\nexample="zq"\n', "masks"),
    ],
)
def test_a_damaged_export_is_refused(
    export: Path, tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    with pytest.raises(Exception, match=says) as caught:
        score_frame(pl.DataFrame({"message": ["a"]}), damaged(export, tmp_path, name, content))
    assert isinstance(caught.value, BadBundle | BadInput), caught.value


def test_an_export_is_whole_or_not_there(export: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        write_export(
            tmp_path / "out",
            model=export / "model",
            templates=(),
            masks=(tmp_path / "nothing",),
            similarity=0.7,
        )
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadBundle):
        score_frame(pl.DataFrame({"message": ["a"]}), tmp_path / "nowhere")
