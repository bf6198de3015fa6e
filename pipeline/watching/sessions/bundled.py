"""The session models of a model version."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.models import bundle
from pipeline.watching.sessions.keys import JOINT, split_model_name
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.sessions.model import load as load_session_models


def read_session_models(path: Path) -> dict[tuple[str | None, str], SessionModel]:
    """The session models of a bundle by workload and kind of key, under None those for all other workloads.

    Raises BadBundle."""
    manifest = bundle.load_manifest(path)
    blob = bundle.optional(path, bundle.SEQUENCES)
    models: dict[tuple[str | None, str], SessionModel] = {}
    if blob is not None:
        models.update({split_model_name(name): model for name, model in load_session_models(blob).items()})
    # A baseline often has another name than the workload it judges: `logweir run new.log --baseline old.log`.
    # If a model has learnt from several workloads, the sessions of one say nothing about those of another.
    if len({workload for workload, _ in models}) == 1 and len(manifest.workloads) <= 1:
        models.update({(None, kind): model for (_, kind), model in list(models.items())})
    return models


def session_model_of(
    models: Mapping[tuple[str | None, str], SessionModel], workload: str, kind: str
) -> SessionModel | None:
    """That of a workload's sessions of this kind, of `read_session_models`; of whole traces for JOINT."""
    own = models.get((workload, kind))
    return own if own is not None or workload == JOINT else models.get((None, kind))
