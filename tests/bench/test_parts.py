"""What the speed benchmarks are made of: varied copies of a log, lines without a cache, flame graphs."""

from pathlib import Path
from xml.etree import ElementTree

import polars as pl
import pytest

from bench import _flame
from bench._varied import varied, write_cycles
from pipeline.drain.masking.mask_set import MaskSet

LOG = """\
2026-11-20 10:00:00,148 INFO dfs.DataNode: Receiving block blk_-1608999687919862906 src: /10.250.19.102:54106
2026-11-20 10:00:01,148 INFO dfs.DataNode: Served 9876543 bytes to 10.250.19.102
2026-11-20 10:00:02,148 ERROR dfs.DataNode: failed
java.io.IOException: broken 12345
\tat org.apache.Foo.bar(Foo.java:4711)
"""


def masked(lines: list[str]) -> list[str]:
    return MaskSet.load().mask(pl.Series(lines, dtype=pl.String))["masked"].to_list()


@pytest.mark.long
def test_a_varied_copy_says_the_same_with_other_parameters(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(LOG)
    assert "\n".join(varied(path, 0)) + "\n" == LOG
    seen = {"\n".join(varied(path, cycle)) for cycle in range(9)}
    assert len(seen) == 9
    for text in seen:
        assert [line[:25] for line in text.splitlines()[:3]] == [line[:25] for line in LOG.splitlines()[:3]]
        assert "10.250.19.102" in text, "an address whose numbers are out of bounds is none"
        assert masked(text.splitlines()[:2]) == masked(LOG.splitlines()[:2])


def test_cycles_have_as_many_lines_as_asked_for(tmp_path: Path) -> None:
    for name, copies in (("a", 4), ("b", 1)):
        (tmp_path / f"{name}.log").write_text(LOG * copies)
    (tmp_path / "made").mkdir()
    sources = {name: tmp_path / f"{name}.log" for name in "ab"}
    made = write_cycles(sources, tmp_path / "made", 100)
    lines = [path.read_text().count("\n") for path in made]
    # A record is not cut in the middle.
    assert 100 <= sum(lines) <= 105
    assert lines[0] >= 3.5 * lines[1]


def test_a_flame_graph_is_a_picture_of_the_stacks(tmp_path: Path) -> None:
    (tmp_path / "store-1.folded").write_text(
        "other/x.main;pipeline/step.perform;polars/frame.select<&> 30\nother/x.main;pipeline/step.perform "
        "10\nother/x.idle 60\n"
    )
    (tmp_path / "ingest-2.folded").write_text("pipeline/step.perform 1000\n")
    to = tmp_path / "store.svg"
    assert _flame.draw(tmp_path, "store", "pipeline/step.perform", to) == 40
    with pytest.raises(RuntimeError, match="no sample of a process 'store' holds the frame 'pipeline/gone"):
        _flame.draw(tmp_path, "store", "pipeline/gone.main", to)
    titles = [
        e.text for e in ElementTree.fromstring(to.read_text()).iter("{http://www.w3.org/2000/svg}title")
    ]
    assert titles == ["pipeline/step.perform 100.0%", "polars/frame.select<&> 75.0%"]
