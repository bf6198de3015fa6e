"""One process of the intake for the tests of a file; each test has workloads of its own."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from intake_process import Intake, running_intake
from receiver import Receiver, running_receiver

from pipeline.settings import Settings


@pytest.fixture(scope="module")
def intake(redis_url: str, tmp_path_factory: "pytest.TempPathFactory") -> Iterator[Intake]:
    with running_intake(private(redis_url, tmp_path_factory.mktemp("intake"))) as process:
        yield process


@pytest.fixture(scope="module")
def receiver(redis_url: str, tmp_path_factory: "pytest.TempPathFactory") -> Iterator[Receiver]:
    with running_receiver(redis_url, tmp_path_factory.mktemp("receiver")) as made:
        yield made


def private(redis_url: str, folder: Path) -> Settings:
    return Settings(redis_url=redis_url, key_prefix=f"t{uuid.uuid4().hex[:12]}", data_dir=folder / "data")


@pytest.fixture
def workload() -> str:
    return f"w{uuid.uuid4().hex[:8]}"
