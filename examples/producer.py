"""Sends two lines to the pipeline that runs on a data directory: `python examples/producer.py DATA_DIR`."""

import sys
from pathlib import Path

from pipeline import Producer, Settings
from pipeline.records.delivery import Full

producer = Producer.connect(Settings.load(flags={"data_dir": Path(sys.argv[1])}))
answer = producer.send(["GET /cart 200", "payment refused"], workload="shop/web", batch_id="web-000017")
print(answer)
sys.exit(1 if isinstance(answer, Full) else 0)
