"""What only one process may do at a time, by name."""

from typing import Final

from pipeline.redis.shards import MOST, of_shard

# The resource names single leases are taken on; GPUs have a pool of their own (pool.py).
# Whoever trains, on whatever device, holds this; its token is the fence of a publish.
TRAINING: Final = "training"
# The single writer of the template tree of shard 0; those of other shards are of_shard(DRAIN, n).
DRAIN: Final = "drain"
# Whoever polls the log indices of an OpenSearch: two would read the same documents at once.
SOURCE: Final = "source"
# Whoever folds observations into what is watched.
WATCH: Final = "watch"
RESOURCES: Final = (TRAINING, *(of_shard(DRAIN, n) for n in range(MOST)), SOURCE, WATCH)
