"""What a list of normal lines covers, and which lists are refused."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.commands.run import normal
from pipeline.commands.run.normal import NormalList
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import BadInput
from pipeline.report.findings import Finding

NOW = datetime(2026, 11, 20, 10, tzinfo=UTC)
MASKS = MaskSet.load()


def finding(template: str) -> Finding:
    return Finding(
        workload="app", template_id=1, template=template, count=1, lines=1, first_seen=NOW, last_seen=NOW,
        burst_end=NOW, level=None, score=1.0, reasons=(), samples=(), patterns=1,
    )  # fmt: skip


def listed(folder: Path, text: str) -> NormalList:
    path = folder / "normal.txt"
    path.write_text(text, encoding="utf-8")
    return NormalList.load([path], MASKS)


@pytest.mark.parametrize(
    ("row", "template"),
    [
        ("user <*> logged in from <IP>", "user <*> logged in from <IP>"),
        ("user  <*> logged   in from <IP>", "user <*> logged in from <IP>"),
        ("cache refreshed with 77 entries", "cache refreshed with <NUM> entries"),
        (
            "Nov 20 10:00:00 web1 app[7]: cache refreshed with 77 entries",
            "cache refreshed with <NUM> entries",
        ),
        ("user alice logged in from 10.0.0.1", "user <*> logged in from <IP>"),
    ],
)
def test_a_row_covers_its_template_as_text_as_line_and_with_its_header(
    tmp_path: Path, row: str, template: str
) -> None:
    known = listed(tmp_path, f"# what operators know\n\n{row}\n")
    assert known.covers(finding(template))
    assert not known.covers(finding("disk <*> is full"))
    assert not known.covers(finding(template + " twice"))


def test_an_empty_list_covers_nothing(tmp_path: Path) -> None:
    assert not listed(tmp_path, "\n# nothing yet\n").covers(finding("user <*> logged in"))
    assert not NormalList.load([], MASKS).covers(finding("user <*> logged in"))


def test_lists_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"--normal .*gone.txt cannot be read"):
        NormalList.load([tmp_path / "gone.txt"], MASKS)
    with pytest.raises(BadInput, match="cannot be read"):
        NormalList.load([tmp_path], MASKS)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="is not UTF-8 text"):
        NormalList.load([tmp_path / "binary"], MASKS)
    monkeypatch.setattr(normal, "MAX_ROWS", 2)
    with pytest.raises(BadInput, match="3 rows are more than the 2"):
        listed(tmp_path, "a\nb\nc\n")
    monkeypatch.setattr(normal, "MAX_BYTES", 2)
    with pytest.raises(BadInput, match="is larger than"):
        listed(tmp_path, "a\nb\nc\n")
