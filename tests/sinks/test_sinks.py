"""Every kind of sink keeps the same contract, and the settings choose among them."""

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from sink_contract import SinkContract, rows

from pipeline.errors import SinkUnavailable
from pipeline.records.batch import Purpose
from pipeline.settings import Settings
from pipeline.sinks.choose import sinks_for
from pipeline.sinks.opensearch import OpenSearchSink
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.several import Several
from pipeline.sinks.sink import Last, Sink, at_once


class TestParquet(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> Sink:
        return ParquetSink(tmp_path / "results")


class TestOpenSearch(SinkContract):
    @pytest.fixture
    def sink(self, search_settings: Settings) -> Sink:
        return OpenSearchSink(search_settings)


class TestSeveral(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path: Path, search_settings: Settings) -> Sink:
        return Several([ParquetSink(tmp_path / "results"), OpenSearchSink(search_settings)])


def test_several_reads_from_the_first_sink_that_has_the_batch(tmp_path: Path) -> None:
    one, two = ParquetSink(tmp_path / "one"), ParquetSink(tmp_path / "two")
    both = Several([one, two])
    two.write("b", rows(2))
    got = both.read("b", "shop")
    assert got is not None
    assert got.height == 2
    both.write("b", rows(3))
    for sink in (one, two, both):
        got = sink.read("b", "shop")
        assert got is not None
        assert got.height == 3
    both.remove("b", "shop")
    assert one.read("b", "shop") is None
    assert two.read("b", "shop") is None


def test_a_batch_that_one_of_several_could_not_take_is_not_reported_as_stored(tmp_path: Path) -> None:
    class Down(ParquetSink):
        def write(self, batch_id: str, frame: pl.DataFrame, *, last: Last = at_once) -> None:
            raise SinkUnavailable("down")

    with pytest.raises(SinkUnavailable):
        Several([ParquetSink(tmp_path / "one"), Down(tmp_path / "two")]).write("b", rows())


def test_the_settings_choose_the_sinks_and_keep_the_purposes_apart(tmp_path: Path) -> None:
    here = Settings(data_dir=tmp_path, opensearch_url="http://localhost:9")
    plain = sinks_for(here)
    assert {p: s.objects.url for p, s in plain.items() if isinstance(s, ParquetSink)} == {
        Purpose.SCORE: here.data.results.as_uri(),
        Purpose.BASELINE: here.data.baseline.as_uri(),
    }
    bucket = Settings(data_dir=tmp_path, store_url="s3://logs/team")
    assert (bucket.data.results_url, bucket.data.baseline_url) == (
        "s3://logs/team/results",
        "s3://logs/team/baseline",
    )
    search = sinks_for(here.replace(sinks=("opensearch",)))
    assert {p: s.prefix for p, s in search.items() if isinstance(s, OpenSearchSink)} == {
        Purpose.SCORE: "logweir-results",
        Purpose.BASELINE: "logweir-baseline",
    }
    both = sinks_for(here.replace(sinks=("opensearch", "parquet")))
    assert all(isinstance(sink, Several) for sink in both.values())


@pytest.mark.long
def test_choosing_parquet_never_loads_the_client_of_opensearch() -> None:
    code = (
        "import sys; from pipeline.settings import Settings; from pipeline.sinks.choose import sinks_for;"
        "sinks_for(Settings()); print('opensearchpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
