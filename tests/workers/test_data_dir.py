"""A new stack waits for the processes of an earlier one in its data directory, however that is spelled."""

import subprocess
from pathlib import Path

import pytest

from pipeline.redis.attach import state_file
from pipeline.settings import Settings
from pipeline.workers.stack import data_dir
from pipeline.workers.stack.stack import Stack


@pytest.mark.parametrize("named", ["disk/data", "link", "above/data", "disk/../disk/data"])
def test_a_new_stack_waits_for_the_processes_of_the_old_one(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "disk" / "data"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "above").symlink_to(real.parent)
    found = Stack(Settings(data_dir=tmp_path / named)).settings.data.dir
    state_file(found).parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(data_dir, "STOP_S", 0.1)
    with subprocess.Popen(["sleep", "60"], cwd=real) as old:
        try:
            data_dir.write_state(found, {"workers": {"ingest": old.pid}, "redis": []})
            data_dir.outlive(found)
            assert old.wait(5) < 0
        finally:
            old.kill()
