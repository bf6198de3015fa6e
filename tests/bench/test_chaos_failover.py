"""The judge of a chaos run whose Redis fails over: which steps back are allowed, and which are not."""

from pathlib import Path
from typing import Any

import pytest

from bench._chaos.history import History
from bench._chaos.samples import Watch
from bench._chaos.told import Told
from pipeline.settings import Settings

SENTINEL = "sentinel://a,b,c/0?master=main"
SINGLE = "redis://127.0.0.1/0"


def sample(server: str, *, accepted: int, token: int = 3, generation: int = 2) -> dict[str, Any]:
    version = "2" if generation == 2 else "1"
    return {
        "server": server,
        "workloads": {
            "shop": {
                **dict.fromkeys(("dead", "discarded", "skipped", "in_flight", "letters"), 0),
                "accepted": accepted,
                "stored": accepted,
            }
        },
        "due": {"batches": 0, "bytes": 0, "roots": 0, "root_bytes": 0, "halves": 0, "stages": {}},
        "counts": {},
        "dead": {"letters": 0, "bytes": 0},
        "models": {"shared": {"version": version, "generation": generation, "token": 1, "fault": ""}},
        "leases": {"drain": {"holder": "one", "token": token, "deadline": 1}},
        "tokens": {"drain": token},
        "gpu_tokens": {},
        "running": [],
        "messages": {},
        "memory": [1, 2],
        "rss": [],
    }


def wrong(folder: Path, url: str, *samples: dict[str, Any]) -> list[str]:
    with History(folder / "history.jsonl") as history:
        history.note("begin", seed=1, minutes=0.1, settings={})
        for one in samples:
            history.note("sample", **one)
        history.note("end")
    history_read = Told.read(folder / "history.jsonl")
    settings = Settings(redis_url=url, data_dir=folder)
    return [v.what for v in Watch(history_read, settings, 1_024.0).violations()]


def test_another_master_may_lack_the_last_steps_that_did_not_wait_for_it(tmp_path: Path) -> None:
    before, after = sample("a", accepted=20), sample("b", accepted=10, token=2)
    assert wrong(tmp_path, SENTINEL, before, after) == []


@pytest.mark.parametrize(("url", "server"), [(SENTINEL, "a"), (SINGLE, "b")])
def test_the_same_master_and_a_single_redis_may_not(tmp_path: Path, url: str, server: str) -> None:
    """A single Redis has another run id after a restart, and syncs before it answers."""
    before, after = sample("a", accepted=20), sample(server, accepted=10, token=2)
    found = "\n".join(wrong(tmp_path, url, before, after))
    assert "accepted lines of shop went from 20 back to 10" in found
    assert "the newest token of drain went from 3 back to 2" in found


def test_another_master_has_the_live_model_of_the_one_before(tmp_path: Path) -> None:
    before, after = sample("a", accepted=20), sample("b", accepted=20, generation=1)
    assert "went from 2 to 1" in "\n".join(wrong(tmp_path, SENTINEL, before, after))
