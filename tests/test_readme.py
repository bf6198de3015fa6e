"""What the README says, word for word: its ```bash blocks are run in a copy of the project, in order, in one
shell."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import polars as pl
import pytest

ROOT = Path(__file__).resolve().parent.parent


def copied(folder: Path) -> Path:
    """The project as a clone would have it, with this environment instead of a second one."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    copy = folder / "logweir"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    return copy


def wanted() -> str:
    """What scripts/_setup.sh calls the packages of today."""
    script = "source scripts/_setup.sh && version_of_packages"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, check=True, text=True)
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_commands_of_the_readme_do_what_it_says(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / f".installed-dev-{wanted()}").exists():
        pytest.skip(
            "the environment is not as scripts/test makes it, so scripts/run would install the copy into it"
        )
    copy = copied(tmp_path)
    text = (copy / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 3
    (tmp_path / "home").mkdir()
    env = {**os.environ, "HOME": str(tmp_path / "home")}
    script = "set -euxo pipefail\n" + "\n".join(blocks)
    log = tmp_path / "said.txt"
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=copy, env=env, stdout=out, stderr=out, start_new_session=True
        )
        try:
            shell.wait(400)
        finally:
            # What a failing script leaves in the background must not outlive the test.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
    said = log.read_text(encoding="utf-8", errors="replace")
    assert shell.returncode == 0, said[-4000:]
    assert re.search(r"\d+ findings\b[^.;]*\bin 33,\d{3} lines", said), said[-4000:]
    assert "Accepted(" in said
    assert (copy / "logweir-out" / "report.html").stat().st_size < 5_000_000
    stored = pl.read_parquet(copy / "demo/results/**/*.parquet", hive_partitioning=False)
    assert stored.filter(pl.col("workload") == "shop/web").height == 2
