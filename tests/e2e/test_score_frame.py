"""`logweir models export` and `score_frame`: the verdicts of the pipeline on a host without one.

Where Ray, Dask or Spark is installed, it runs there, too: `pip install 'ray[data]' 'dask[dataframe]'
'pyspark[sql]'`, then `scripts/test tests/e2e/test_score_frame.py`. CI has none of them.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from e2e.harness import Up, novel, ordinary, sentence
from pipeline.errors import BadInput
from pipeline.gpu.job_files import pack_directory
from pipeline.tasks.frames import JUDGED_SCHEMA, score_frame
from pipeline.workers.serve.export_runner import ExportRunner

pytestmark = pytest.mark.long
SAME = ["pattern_id", "template_id", "score", "anomalous", "p_value", "reasons", "model_version"]


@pytest.fixture(scope="module")
def stack(trained: Up) -> Up:
    fire = "2026-11-20T12:00:00Z ERROR app: disk sda1 is on fire, giving up"
    lines = [*ordinary(350, start=1_000), *novel(12, "frames"), fire, "  at engine.c:12"]
    trained.send(lines, "shop")
    return trained


@pytest.fixture(scope="module")
def export(stack: Up) -> Path:
    out = stack.folder / "export"
    done = stack.logweir("models", "export", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["out"] == str(out)
    return out


def test_frames_get_the_verdicts_of_the_pipeline(stack: Up, export: Path) -> None:
    rows = stack.rows("shop").filter(pl.col("model_version").is_not_null())
    assert rows["anomalous"].any() and not rows["anomalous"].all()
    judged = score_frame(rows.select("raw"), export)
    assert judged.select(SAME).equals(rows.select(SAME))
    by_message = score_frame(rows.select("message", "level"), export)
    assert by_message.select(SAME).equals(rows.select(SAME))
    assert dict(judged.schema) == {"raw": pl.String, **JUDGED_SCHEMA}
    assert judged["template"].null_count() == 0


def test_a_served_export_gives_the_same_verdicts(stack: Up, export: Path, tmp_path: Path) -> None:
    rows = stack.rows("shop").filter(pl.col("model_version").is_not_null())
    archive = tmp_path / "export.tar"
    pack_directory(export, archive)
    runner = ExportRunner(archive, "GPU-none", device_mib=1_024, context_mib=512)
    archive.unlink()  # all of it is in memory
    assert runner.platform == "logweir, cpu"
    columns = {
        name: rows[of].fill_null("").to_list() for name, of in (("lines", "message"), ("level", "level"))
    }
    inputs = {
        name: np.array([text.encode() for text in texts], np.object_) for name, texts in columns.items()
    }
    found = runner.run(inputs, ["score", "p_value", "anomalous", "reasons"])
    assert found["score"].tolist() == rows["score"].to_list()
    assert found["anomalous"].tolist() == rows["anomalous"].to_list()
    np.testing.assert_array_equal(found["p_value"], rows["p_value"].fill_null(np.nan).to_numpy())
    assert [one.decode() for one in found["reasons"]] == [",".join(one) for one in rows["reasons"].to_list()]
    with pytest.raises(BadInput, match="send a level for each"):
        runner.run(inputs | {"level": inputs["level"][:1]}, ["score"])
    assert runner.run({"lines": inputs["lines"][:0]}, ["score"])["score"].tolist() == []


def test_a_second_export_over_the_first_is_refused(stack: Up, export: Path) -> None:
    assert f"{export} exists" in sentence(stack.logweir("models", "export", "--out", export))
    assert "needs --out DIR" in sentence(stack.logweir("models", "export"))
    assert "takes no --out" in sentence(stack.logweir("models", "list", "--out", "x"))
    assert "there is no model 'm9'" in sentence(stack.logweir("models", "export", "m9", "--out", "x"))
    blocked = stack.folder / "file"
    blocked.touch()
    said = sentence(stack.logweir("models", "export", "--out", blocked / "below"))
    assert "cannot be written" in said


def lines() -> list[str]:
    return [*ordinary(400), *novel(20, "engines")]


if importlib.util.find_spec("ray") is not None:

    @pytest.mark.filterwarnings("default")  # Ray warns of its own settings
    def test_ray_maps_it_over_batches(export: Path) -> None:
        ray = importlib.import_module("ray")
        os.environ["RAY_AUTH_MODE"] = "disabled"
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            dataset = ray.data.from_items([{"raw": line} for line in lines()]).repartition(4)
            judged = dataset.map_batches(
                score_frame, fn_kwargs={"export": str(export)}, batch_format="pyarrow", batch_size=100
            )
            found = {row["raw"]: (row["score"], row["anomalous"]) for row in judged.take_all()}
        finally:
            ray.shutdown()
        alone = score_frame(pl.DataFrame({"raw": lines()}), export)
        assert found == {raw: (s, a) for raw, s, a in alone.select("raw", "score", "anomalous").iter_rows()}


if importlib.util.find_spec("dask") is not None:

    def test_dask_maps_it_over_partitions(export: Path) -> None:
        dd, pd = importlib.import_module("dask.dataframe"), importlib.import_module("pandas")
        frame = pd.DataFrame({"raw": lines()})
        parts = dd.from_pandas(frame, npartitions=4)
        meta = score_frame(frame.head(2), export)
        judged = parts.map_partitions(score_frame, str(export), meta=meta).compute(scheduler="processes")
        assert judged.index.equals(frame.index)
        alone = score_frame(pl.DataFrame({"raw": lines()}), export)
        assert judged["score"].to_list() == alone["score"].to_list()
        assert judged["anomalous"].to_list() == alone["anomalous"].to_list()


if importlib.util.find_spec("pyspark") is not None:

    @pytest.mark.filterwarnings("default")  # Spark warns of its own settings
    def test_spark_maps_it_over_partitions(export: Path) -> None:
        spark = importlib.import_module("pyspark.sql").SparkSession.builder.master("local[2]").getOrCreate()
        wanted, folder = ["raw", "score", "anomalous"], str(export)

        def judged(batches: Iterator[Any]) -> Iterator[Any]:
            table_of = importlib.import_module("pyarrow").Table.from_batches
            for batch in batches:
                yield from score_frame(table_of([batch]), folder).select(wanted).to_batches()

        try:
            frame = spark.createDataFrame([(line,) for line in lines()], "raw string").repartition(4)
            rows = frame.mapInArrow(judged, "raw string, score double, anomalous boolean").collect()
        finally:
            spark.stop()
        found = {row["raw"]: (row["score"], row["anomalous"]) for row in rows}
        alone = score_frame(pl.DataFrame({"raw": lines()}), export)
        assert found == {raw: (s, a) for raw, s, a in alone.select("raw", "score", "anomalous").iter_rows()}
