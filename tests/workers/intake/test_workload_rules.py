"""The intake names workloads by the rules of its file, also by a new version of it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from intake_process import TIMEOUT_S, Intake, running_intake
from polling import wait_until

from pipeline.settings import Settings

pytestmark = pytest.mark.long  # starts processes

DOCUMENT = b'{"message":"x","app":"cart","kubernetes":{"labels":{"team":"%s"}}}'
RULES = "[[rule]]\nwhen = { key = '%s' }\nworkload = '%s/{label.team}'"


@pytest.fixture
def intake(settings: Settings, tmp_path: Path) -> Iterator[Intake]:
    (tmp_path / "rules.toml").write_text(RULES % ("*", "first"))
    with running_intake(settings.replace(workload_rules=tmp_path / "rules.toml")) as process:
        yield process


def test_rules_name_workloads_and_are_read_again(intake: Intake, tmp_path: Path) -> None:
    """One process for all of it: the scope of a key, a new file, and a wrong one."""
    from pipeline.redis.connection import connect
    from pipeline.service.access.keys import SenderKeys

    keys = SenderKeys(connect(intake.settings), intake.settings)

    def status(team: bytes, **headers: str) -> int:
        return intake.ask("/lines", DOCUMENT % team, Content_Type="application/x-ndjson", **headers).status

    assert status(b"till") == 200
    assert intake.workloads() == {"cart"}, "a rule on the key does not apply where there is none"
    secret = keys.add("web", patterns=["first/*"])
    bearer = {"Authorization": f"Bearer {secret}"}
    assert wait_until(lambda: status(b"till") == 401, timeout_s=TIMEOUT_S)
    assert (status(b"till", **bearer), status(b"tal", **bearer)) == (200, 200)
    assert {"first/till", "first/tal"} <= intake.workloads()

    # The scope of the key holds for the name by the rules.
    (tmp_path / "rules.toml").write_text(RULES % ("web", "second"))
    assert wait_until(lambda: status(b"till", **bearer) == 403, timeout_s=TIMEOUT_S)
    assert not any(name.startswith("second") for name in intake.workloads())

    (tmp_path / "rules.toml").write_text(RULES.replace("key", "kee") % ("web", "first"))
    assert wait_until(lambda: "intake.rules_refused" in intake.log.read_text(), timeout_s=TIMEOUT_S)
    assert "unknown hint 'kee'; did you mean 'key'?" in intake.log.read_text()
    assert status(b"till", **bearer) == 403, "the rules before it stay"


def test_an_intake_with_wrong_rules_does_not_start(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text("[[rule]]\nworkload = '{pods}'")
    env = {**os.environ, **settings.to_environ(), "LOGWEIR_WORKLOAD_RULES": str(tmp_path / "rules.toml")}
    ended = subprocess.run(
        [sys.executable, "-m", "pipeline.workers.intake"],
        env=env,
        capture_output=True,
        check=False,
        text=True,
    )
    assert ended.returncode == 2
    assert "unknown hint 'pods'; did you mean 'pod'?" in ended.stderr
