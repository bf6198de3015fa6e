"""Works on 4 GiB of a GPU of this machine, lent by the stack on a data directory: `python
examples/gpu_lease.py DATA_DIR`."""

import sys
import time
from pathlib import Path

from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Need
from pipeline.redis.attach import attached
from pipeline.redis.connection import connect
from pipeline.settings import Settings, see_only

settings = attached(Settings.load(flags={"data_dir": Path(sys.argv[1])}))
pool = Pool(connect(settings), settings)
with pool.lease(Need(memory_mib=4096, node=this_node()), timeout_s=60) as held:
    see_only(held.lease.parts[0].uuid)  # before anything starts CUDA
    print("working on", held.lease.parts[0].uuid, flush=True)
    for _step in range(10):
        time.sleep(0.1)  # stands for a step of the work
        if held.lost.is_set() or held.asked.is_set():
            sys.exit(f"stopped before the end: {held.why()}")
