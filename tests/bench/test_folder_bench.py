"""The made-up log folder: what a run reads of it, and that it is the same each time."""

from datetime import UTC, datetime
from pathlib import Path

from bench._folder_lines import Machine
from pipeline.models.severity import severity_words
from pipeline.sources.files import choose
from pipeline.sources.formats import detect

BEGINS = datetime(2026, 9, 20, tzinfo=UTC)


def test_six_logs_of_a_healthy_machine_are_read_and_six_files_are_left_out(tmp_path: Path) -> None:
    Machine(1, BEGINS, 20).write(tmp_path / "log")
    chosen = choose([str(tmp_path / "log")])
    assert {path.name for path in chosen.paths} == {
        "alternatives.log", "auth.log", "dpkg.log", "history.log", "journal.json", "term.log",
    }  # fmt: skip
    skipped, left_out = chosen.notes
    assert skipped.startswith("skipped 3 files that are no text logs: ")
    assert "(1 explanatory text, 1 manual page, 1 package list): " in left_out
    formats = {path.name: detect(path.read_text().splitlines()[:200]) for path in chosen.paths}
    assert {name for name, found in formats.items() if found} == {
        "alternatives.log", "auth.log", "dpkg.log", "journal.json",
    }  # fmt: skip
    said = [line for path in chosen.paths for line in path.read_text().splitlines()]
    assert any("crash:" in line for line in said) and not any(map(severity_words, said))


def test_the_same_seed_makes_the_same_folder(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        Machine(seed, BEGINS, 5).write(tmp_path / name)
    texts = {name: (tmp_path / name / "auth.log").read_text() for name in "abc"}
    dumps = {name: (tmp_path / name / "apt/eipp.log.xz").read_bytes() for name in "abc"}
    assert texts["a"] == texts["b"] != texts["c"] and dumps["a"] == dumps["b"] != dumps["c"]
