"""Reads everything that decisions about served models are made from."""

import redis

from pipeline.gpu.homes import Pending
from pipeline.gpu.placement import PlacedModels
from pipeline.gpu.served import ServedModels
from pipeline.settings import Settings


def read_pending(client: "redis.Redis", settings: Settings) -> Pending:
    """The models, copies, nodes and wishes of now. Raises RedisUnavailable."""
    served = ServedModels(client, settings)
    models, nodes, wanted = served.all(), served.nodes(), served.wanted()
    scoring = [node for node in nodes if node.scores]
    nodes = [node for node in nodes if not node.scores]
    now_ms, loaded = PlacedModels(client, settings).look()  # last: a node is never older than its copies
    return Pending(now_ms=now_ms, models=models, loaded=loaded, nodes=nodes, wanted=wanted, scoring=scoring)
