"""A fault of the surroundings never counts against a batch; a fault inside its records does."""

import errno
import shutil
from pathlib import Path

import pytest

from pipeline.errors import BadInput, BadMask, BadSetting
from pipeline.ledger.renewal import ClaimRenewal
from pipeline.messages.app import make_app
from pipeline.producer import Producer
from pipeline.records.delivery import Claim, Stage
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.tasks import drain, ingest, store
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform

MASK = '[[mask]]\nname="ZQX"\npattern="zq+"\nexample="a zq here"\n'
FAULTS = (
    BadMask("masks file x.toml cannot be read"),
    BadSetting("LOGWEIR_X is unknown"),
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.EFBIG, "File too large"),
    NotADirectoryError(errno.ENOTDIR, "Not a directory"),
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.ENOTCONN, "Transport endpoint is not connected"),
    RuntimeError("can't start new thread"),
    ModuleNotFoundError("No module named 'transformers'"),
)


def sent(context: Context, batch_id: str = "b") -> None:
    lines = [f"INFO request {n} took {n} ms" for n in range(8)]
    Producer(context.ledger, context.submit, context.settings).send(lines, workload="shop", batch_id=batch_id)


def tried(context: Context, step: object = ingest.step) -> str | None:
    context.client.hset(context.ledger.keys.batch("b"), "not_before", 0)
    return perform(context, Stage.INGEST, "b", step)  # type: ignore[arg-type]


def attempts(context: Context) -> int:
    """Of the next claim, which counts itself."""
    context.client.hset(context.ledger.keys.batch("b"), "not_before", 0)
    claim = context.ledger.claim("b", Stage.INGEST, "the test")
    assert isinstance(claim, Claim)
    return claim.attempts


@pytest.mark.parametrize("text", [None, '[[mask]]\nname="ZQ'], ids=["gone", "half written"])
def test_lines_wait_unclaimed_until_their_worker_can_read_its_masks(
    settings: Settings, tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "masks.toml"
    if text is not None:
        file.write_text(text)
    settings = settings.replace(masks=(file,))
    context = Context(make_app(settings), settings)
    sent(context)
    for _ in range(context.settings.internal.max_attempts + 2):
        assert str(file) in (tried(context) or "")
    assert context.ledger.backlog.totals()["shop"].get("dead", 0) == 0
    file.write_text(MASK)
    assert tried(context) is None, "the same process goes on once the file is repaired"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_fault_of_the_surroundings_gives_the_batch_back_uncounted(
    settings: Settings, fault: Exception
) -> None:
    context = Context(make_app(settings), settings)
    sent(context)

    def fails(_context: Context, _claim: Claim) -> None:
        raise fault

    for _ in range(context.settings.internal.max_attempts + 2):
        assert tried(context, fails)
    assert context.ledger.backlog.totals()["shop"].get("dead", 0) == 0
    assert attempts(context) == 1


@pytest.mark.parametrize("fault", FAULTS[2:], ids=lambda fault: type(fault).__name__)
def test_a_fault_beside_the_step_gives_back_uncounted_what_the_process_holds(
    settings: Settings, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as no thread for the renewals: after the claim, and before its step."""
    context = Context(make_app(settings), settings)
    sent(context)

    def fails(_: object) -> None:
        raise fault

    monkeypatch.setattr(ClaimRenewal, "start", fails)
    for _ in range(context.settings.internal.max_attempts + 2):
        assert str(fault) in (tried(context) or "")
    assert attempts(context) == 1


@pytest.mark.parametrize(
    "fault",
    [
        ValueError("bad"),
        OSError("no errno"),
        OSError(errno.ENAMETOOLONG, "File name too long"),
        RuntimeError("a bug"),
        BadInput("the format of a batch"),
    ],
)
def test_a_fault_inside_the_records_counts_as_an_attempt(settings: Settings, fault: Exception) -> None:
    context = Context(make_app(settings), settings)
    sent(context)

    def fails(_context: Context, _claim: Claim) -> None:
        raise fault

    assert tried(context, fails)
    assert attempts(context) == 2


def stored(context: Context, batch_id: str) -> str | None:
    """What keeps the batch from being done; None once it is."""
    for stage, step in ((Stage.INGEST, ingest.step), (Stage.DRAIN, drain.step), (Stage.STORE, store.step)):
        if context.ledger.state(batch_id) == stage.value:
            context.client.hset(context.ledger.keys.batch(batch_id), "not_before", 0)
            if (why := perform(context, stage, batch_id, step)) is not None:
                return why
    assert context.ledger.state(batch_id) == "done"
    return None


@pytest.mark.parametrize("restarted", [False, True])
def test_no_process_begins_results_anew_in_an_empty_folder_in_their_place(
    settings: Settings, restarted: bool
) -> None:
    context = Context(make_app(settings), settings)
    sent(context, "first")
    assert stored(context, "first") is None
    if restarted:
        context = Context(make_app(settings), settings)
    results = settings.data.results
    away = results.rename(results.with_name("unmounted"))
    results.mkdir()
    sent(context)
    for _ in range(context.settings.internal.max_attempts + 2):
        assert "are gone; mount their folder" in (stored(context, "b") or "")
    assert not list(results.rglob("*.json"))
    shutil.rmtree(results)
    away.rename(results)
    assert stored(context, "b") is None
    assert parquet_of(settings).manifest().totals()["rows"] == 16
