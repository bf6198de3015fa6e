"""The shippers of a chaos run against a real intake: a request whose answer was lost is in once."""

import random
from pathlib import Path

import pytest
from intake_process import running_intake

from bench._chaos import shippers
from bench._chaos.history import History
from bench._chaos.producers import Sender
from bench._chaos.proxy import Proxy
from bench._chaos.shippers import SHIPPERS, Shipper
from bench._chaos.told import Told
from pipeline.settings import Settings


@pytest.mark.long
def test_a_request_whose_answer_was_lost_or_that_met_a_full_pipeline_is_in_once(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shippers, "ANSWER_S", 1.0)
    with (
        running_intake(settings) as intake,
        Proxy(intake.port) as proxy,
        History(tmp_path / "history.jsonl") as history,
    ):
        history.note("begin")
        for app in SHIPPERS:
            shipper = Shipper(app, [proxy.port])
            sender = Sender(app, shipper.workload, history, shipper)
            sender.send(["one", "two"])
            assert proxy.half_open(1.0, random.Random(1)) == 1
            sender.send(["one", "two"])
            intake.ledger().intake.pause("a test", for_s=1.0)
            sender.send(["one", "two"])
            shipper.close()
            assert intake.accepted(shipper.workload) == 6
    told = Told.read(tmp_path / "history.jsonl")
    for app in SHIPPERS:
        tries = [[item["answer"] for item in told.batches[f"{app}-{n}"].operations] for n in (1, 2)]
        assert tries == [["asked", "accepted"], ["asked", "unknown", "asked", "accepted"]]
