"""A reader of NATS in a process that is killed as soon as its batches are in, before it knows.

python tests/killed_nats.py URL ACCEPTS, with settings in the environment
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from killed_intake import producer_of

from pipeline.settings import Settings
from pipeline.settings.nats import NatsSource
from pipeline.workers.nats.process import Gateway

ROOT = Path(__file__).resolve().parent.parent


def run_until_killed(url: str, settings: Settings, *, accepts: int) -> None:
    """Returns when the process has died of its own signal."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOGWEIR_")}
    done = subprocess.run(
        [sys.executable, __file__, url, str(accepts)],
        env={**clean, **settings.to_environ(), "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL


def main(url: str, accepts: str) -> None:
    producer = producer_of(Settings.load())
    accept_all, left = producer.accept_all, [int(accepts)]

    def accepting(*args: Any, **kwargs: Any) -> Any:
        answer = accept_all(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    producer.accept_all = accepting  # type: ignore[method-assign]
    Gateway(NatsSource.parse(url), producer, holder="killed", stop=threading.Event()).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
