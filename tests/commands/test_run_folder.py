"""The plan of `logweir run FOLDER` names what of the folder is not a log."""

from pathlib import Path

from pipeline.commands.run.inputs import plan_run
from pipeline.sources.folders import Filter

STANZAS = "".join(f"Package: p{n}\nVersion: 1.{n}\nStatus: installed\nConflicts: sftp\n\n" for n in range(20))


def test_files_that_are_not_logs_are_in_no_run_and_no_baseline_unless_they_are_named(tmp_path: Path) -> None:
    for name in ("now", "before"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "app.log").write_text("2026-11-20 10:00:00 INFO ready\n")
        (tmp_path / name / "dump.log").write_text(STANZAS)
    now, before = str(tmp_path / "now"), str(tmp_path / "before")
    places = {"out": tmp_path / "out", "workload": None, "report": None, "wanted": Filter()}
    plan = plan_run([now], [before], **places)  # type: ignore[arg-type]
    assert plan.inputs == (tmp_path / "now/app.log",) and plan.baseline == (tmp_path / "before/app.log",)
    assert [note.partition(":")[0] for note in plan.notes] == [
        "left out 1 file whose content is not a log (1 package list)"
    ] * 2
    named = plan_run([f"{now}/dump.log"], [], **places)  # type: ignore[arg-type]
    assert named.inputs == (tmp_path / "now/dump.log",) and not named.notes
