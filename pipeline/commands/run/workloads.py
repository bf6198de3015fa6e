"""The workload of each file of a run: its name, or its folder where the names are too many to be services."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pipeline.producer import workload_of_file
from pipeline.records.batch import as_workload_name

MOST_NAMES: Final = 1_000


def file_workloads(paths: Sequence[Path]) -> tuple[Callable[[Path], str], str]:
    """The rule for these files, and a note where folders name them: "" where files do."""
    names = {workload_of_file(path) for path in paths}
    if len(names) <= MOST_NAMES:
        return workload_of_file, ""
    above = Path(os.path.commonpath([path.absolute().parent for path in paths])).parent
    depth = max(len(_folders(path, above)) for path in paths)
    while depth > 1 and len({_folders(path, above)[:depth] for path in paths}) > MOST_NAMES:
        depth -= 1

    def by_folder(path: Path) -> str:
        text = "/".join(_folders(path, above)[:depth])
        return as_workload_name(text)[-100:] or workload_of_file(path)

    count = len({by_folder(path) for path in paths})
    return by_folder, (
        f"{len(names):,} names of files are too many for workloads: "
        f"{'the folder is one' if count == 1 else f'{count:,} folders are'}; --workload names another"
    )


def _folders(path: Path, above: Path) -> tuple[str, ...]:
    """The names of the folders of a file, from the first below `above` on."""
    parent = path.absolute().parent
    return parent.relative_to(above).parts if parent.is_relative_to(above) else ()
