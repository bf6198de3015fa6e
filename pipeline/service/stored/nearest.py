"""The normal session that is nearest to one, and how they differ, by the models of the live version."""

from collections.abc import Mapping, Sequence
from typing import Final

import redis

from pipeline.controller.watchlist import model_of
from pipeline.drain.learner import template_texts
from pipeline.errors import LogweirError
from pipeline.models.registry import Registry
from pipeline.redis.connection import answering
from pipeline.redis.keys import SHARED, Keys
from pipeline.service.stored.values import EventDifference, NearestSession
from pipeline.service.values import Line
from pipeline.settings import Settings
from pipeline.watching.sessions.bundled import read_session_models, session_model_of
from pipeline.watching.sessions.keys import KINDS
from pipeline.watching.sessions.model import SessionModel

SHOWN: Final = 50  # differences


def nearest_sessions(
    client: "redis.Redis", settings: Settings, lines: Sequence[Line], kind: str
) -> list[NearestSession]:
    """Of each workload with records among these, which are those of one session.

    `kind`: of its key, "" where it is not known. A version that cannot be read gives none: a session is shown
    without its neighbour."""
    registry = Registry(client, settings)
    live = {one.model: one.version for one in registry.live()}
    models: dict[str, Mapping[tuple[str | None, str], SessionModel]] = {}
    found = []
    texts: dict[int, str] = {}
    for workload in sorted({line.workload for line in lines}):
        version = live.get(model_of(workload, settings.train.own_models), live.get(SHARED))
        if version is None:
            continue
        if version not in models:
            try:
                models[version] = registry.read(version, read_session_models)
            except LogweirError:
                models[version] = {}
        # A key that only a field holds names no kind.
        known = (session_model_of(models[version], workload, one) for one in ([kind] if kind else KINDS))
        model = next((one for one in known if one is not None), None)
        events = [line.template_id for line in lines if line.workload == workload and line.template_id]
        if model is None or not events:
            continue
        size, differences = model.beside_nearest(events)
        if size:
            if differences and not texts:
                with answering():
                    texts = template_texts(client, Keys(settings.redis.key_prefix))
            found.append(
                NearestSession(
                    workload=workload,
                    version=version,
                    learnt=model.sessions,
                    events=size,
                    differences=[
                        EventDifference(template_id=event, template=texts.get(event), here=here, there=there)
                        for event, here, there in differences[:SHOWN]
                    ],
                )
            )
    return found
