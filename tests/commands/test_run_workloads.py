"""The workloads of a run: names of files, or folders where these are too many."""

from pathlib import Path

from pipeline.commands.run.workloads import MOST_NAMES, file_workloads

TOP = Path("/logs")


def rule(*paths: Path) -> tuple[dict[Path, str], str]:
    of, note = file_workloads(paths)
    return {path: of(path) for path in paths}, note


def test_the_name_of_a_file_is_its_workload() -> None:
    named, note = rule(*(TOP / f"s{n}.log" for n in range(MOST_NAMES)), TOP / "s1.log.2.gz")
    assert len(set(named.values())) == MOST_NAMES and not note
    assert named[TOP / "s1.log.2.gz"] == "s1"


def test_folders_are_workloads_where_names_are_too_many() -> None:
    named, note = rule(*(TOP / f"host{n % 3}" / f"job-{n}.log" for n in range(3_000)))
    assert set(named.values()) == {"logs/host0", "logs/host1", "logs/host2"}
    assert note == (
        "3,000 names of files are too many for workloads: 3 folders are; --workload names another"
    )


def test_one_folder_is_one_workload() -> None:
    named, note = rule(*(TOP / f"job-{n}.log" for n in range(MOST_NAMES + 1)))
    assert set(named.values()) == {"logs"} and "the folder is one" in note


def test_too_many_folders_are_gathered_in_those_above() -> None:
    named, _ = rule(*(TOP / f"ns{n % 2}" / f"pod{n}" / f"{n}.log" for n in range(3_000)))
    assert set(named.values()) == {"logs/ns0", "logs/ns1"}


def test_files_at_the_root_have_a_name() -> None:
    named, _ = rule(*(Path("/") / f"job-{n}.log" for n in range(MOST_NAMES + 1)))
    assert all(named.values())


def test_odd_names_of_folders_are_cut_and_printable() -> None:
    folder = TOP / ("\x1b[2J" + "n" * 200)
    named, _ = rule(*(folder / f"job-{n}.log" for n in range(MOST_NAMES + 1)))
    (name,) = set(named.values())
    assert len(name) <= 100 and name.isprintable()
