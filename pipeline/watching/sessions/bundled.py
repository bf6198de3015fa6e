"""The session models of a model version."""

from pathlib import Path

from pipeline.models import bundle
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.sessions.model import load as load_session_models


def read_session_models(path: Path) -> dict[str | None, SessionModel]:
    """The session models of a bundle by workload, under None the one for all other workloads.

    Raises BadBundle."""
    manifest = bundle.load_manifest(path)
    blob = bundle.optional(path, bundle.SEQUENCES)
    models: dict[str | None, SessionModel] = {}
    if blob is not None:
        models.update(load_session_models(blob))
    # A baseline often has another name than the workload it judges: `logweir run new.log --baseline old.log`.
    # If a model has learnt from several workloads, the sessions of one say nothing about those of another.
    if len(models) == 1 and len(manifest.workloads) <= 1:
        models[None] = next(iter(models.values()))
    return models
