"""Backfills in Redis, as their readers leave them."""

import redis

from pipeline.settings import Settings
from pipeline.sources.backfill.pieces import BackfillPlan, Piece
from pipeline.sources.backfill.plans import EndPieceArgs, Plans


def put_backfills(settings: Settings, client: "redis.Redis") -> None:
    """One of which half of the bytes is read, one that is complete, and one that is still listed."""
    plans = Plans(client, settings)
    for name, ended, planned in (("half", 1, True), ("whole", 2, True), ("listed", 0, False)):
        plans.begin(BackfillPlan(name=name, place=f"s3://logs/{name}"), parallel=1)
        pieces = [
            Piece(name="a.log", identity="i", size=400, changed=0.0, begin=begin, end=end, whole=False)
            for begin, end in ((0, 200), (200, 400))
        ]
        assert list(plans.add(name, [(pieces[0].object, pieces)])) == ["new"]
        if planned:
            plans.planned(name)
        lease = plans.leases.request(plans.resource(name, "0"), "reader")
        assert lease is not None
        for _ in range(ended):
            taken = plans.take(name, "0", lease)
            assert taken is not None
            args = EndPieceArgs(
                piece_id=taken.piece_id, slot="0", fate="done", lines=7, bytes=taken.piece.bytes
            )
            plans.finish(name, lease, args)
        plans.leases.release(lease)
