"""The output directory of a run: the earlier report stays until a whole new one takes its place."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.commands.run import place
from pipeline.commands.run.inputs import MARKER
from pipeline.errors import BadInput, SinkUnavailable
from pipeline.workers.stack.data_dir import lock


def stage(out: Path, word: str) -> None:
    """What a run leaves when it has written everything."""
    place.open_place(out)
    staged = place.staging(out)
    (staged / f"results/date={word}").mkdir()
    (staged / f"results/date={word}/x.parquet").write_text(word)
    for name in place.NAMES[1:]:
        (staged / name).write_text(word)


def done(out: Path, word: str, report: Path | None = None) -> None:
    stage(out, word)
    place.swap(out, report)
    place.close_place(out, keep_state=False)


def words(out: Path) -> list[str]:
    """The words of results, templates, summary and report."""
    files = [*sorted((out / "results").rglob("*.parquet")), *(out / name for name in place.NAMES[1:])]
    return [path.read_text() for path in files]


def killed_at(rename: int, work: Callable[[], None]) -> bool:
    """Do it in a child that is killed (SIGKILL) at this rename; False when it had fewer."""
    child = os.fork()
    if child == 0:
        try:
            seen = 0

            def strike(event: str, _: object) -> None:
                nonlocal seen
                if event == "os.rename":
                    seen += 1
                    if seen == rename:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(strike)
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the child ends here, whatever comes
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def test_a_run_takes_the_place_of_the_earlier_one_and_leaves_nothing_aside(tmp_path: Path) -> None:
    done(tmp_path / "o", "old")
    done(tmp_path / "o", "new")
    assert words(tmp_path / "o") == ["new"] * 4
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == sorted([MARKER, *place.NAMES])
    assert [p.name for p in (tmp_path / "o" / MARKER).iterdir()] == ["lock"]


def test_a_run_that_does_not_get_to_its_end_leaves_the_earlier_report(tmp_path: Path) -> None:
    out = tmp_path / "o"
    done(out, "old")
    stage(out, "new")  # killed here: nobody tidies up
    assert words(out) == ["old"] * 4
    stage(out, "newer")  # the next one is stopped in order
    place.close_place(out, keep_state=True)
    assert words(out) == ["old"] * 4 and not place.staging(out).exists()


@pytest.mark.long
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_kill_between_any_two_renames_leaves_whole_files_and_the_next_run_does_the_rest(
    tmp_path: Path, elsewhere: bool
) -> None:
    for rename in range(1, 20):
        out = tmp_path / str(rename)
        report = tmp_path / f"{rename}.html" if elsewhere else None
        done(out, "old", report)
        stage(out, "new")
        struck = killed_at(rename, lambda out=out, report=report: place.swap(out, report))  # type: ignore[misc]
        decided = (out / MARKER / "ready").exists() or not place.staging(out).exists()
        page = report or out / "report.html"
        assert page.read_text() in ("old", "new")
        place.open_place(out)
        kept = [*sorted((out / "results").rglob("*.parquet")), out / "summary.json", page]
        assert {path.read_text() for path in kept} == {"new" if decided else "old"}
        assert not list(tmp_path.glob(".*.part"))
        if not struck:
            break
    assert 5 < rename < 19


@pytest.mark.parametrize("spelled", ["plain", "dots", "link"])
def test_the_report_of_the_output_directory_may_be_named_by_any_path(tmp_path: Path, spelled: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    out = tmp_path / "real/out"
    report = {
        "plain": out / "report.html",
        "dots": out / "../out/report.html",
        "link": tmp_path / "link/out/report.html",
    }[spelled]
    for word in ("old", "new"):
        done(out, word, report)
        assert words(out) == [word] * 4
    assert [p.name for p in (out / MARKER).iterdir()] == ["lock"]


def test_a_report_elsewhere_replaces_that_of_the_earlier_run_and_the_next_run_goes_on_after_a_kill(
    tmp_path: Path,
) -> None:
    out, first, second = tmp_path / "o", tmp_path / "first.html", tmp_path / "second.html"
    done(out, "old")
    stage(out, "new")
    with pytest.MonkeyPatch.context() as patch:  # killed once the run is decided
        patch.setattr(place, "_finish", lambda _: None)
        place.swap(out, first)
    done(out, "newer", second)
    assert (first.read_text(), second.read_text()) == ("new", "newer")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first.html", "o", "second.html"]
    assert not (out / "report.html").exists()


def test_the_copy_of_a_report_whose_run_was_killed_is_removed_by_the_next_run(tmp_path: Path) -> None:
    stage(tmp_path / "o", "new")
    assert killed_at(1, lambda: place.swap(tmp_path / "o", tmp_path / "r.html"))
    assert (tmp_path / ".r.html.part").exists()
    place.open_place(tmp_path / "o")
    assert [p.name for p in tmp_path.iterdir()] == ["o"]


def test_ctrl_c_between_two_renames_ends_them_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done(tmp_path / "o", "old")
    stage(tmp_path / "o", "new")
    rename, calls = Path.rename, []

    def interrupted(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        place.swap(tmp_path / "o", None)
    assert words(tmp_path / "o") == ["new"] * 4


def test_a_report_elsewhere_that_cannot_be_written_leaves_both_places_as_they_are(tmp_path: Path) -> None:
    report = tmp_path / "r" / "report.html"
    report.parent.mkdir()
    done(tmp_path / "o", "old", report)
    stage(tmp_path / "o", "new")
    report.rename(tmp_path / "kept.html")
    report.parent.rmdir()
    with pytest.raises(SinkUnavailable, match=r"o or .*report\.html cannot be written .No such file"):
        place.swap(tmp_path / "o", report)
    place.close_place(tmp_path / "o", keep_state=False)
    assert (tmp_path / "o/summary.json").read_text() == "old" == (tmp_path / "kept.html").read_text()


def test_a_directory_in_which_another_run_works_is_refused_and_left_alone(tmp_path: Path) -> None:
    done(tmp_path / "o", "old")
    stage(tmp_path / "o", "new")
    with lock(tmp_path / "o" / MARKER):
        with pytest.raises(BadInput, match=rf"process {os.getpid()}\) already works in"):
            place.open_place(tmp_path / "o")
        place.close_place(tmp_path / "o", keep_state=False)
        assert (place.staging(tmp_path / "o") / "report.html").read_text() == "new"


def test_a_new_output_directory_is_this_users_alone_and_an_existing_one_keeps_its_rights(
    tmp_path: Path,
) -> None:
    before = os.umask(0o022)
    try:
        place.open_place(tmp_path / "a/new")
        (tmp_path / "open").mkdir(mode=0o755)
        place.open_place(tmp_path / "open")
        with lock(tmp_path / "data"):
            pass
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/new", "open", "data")]
    assert modes == [0o755, 0o700, 0o755, 0o700]
