"""The API as it would answer some seconds ago: a store that was kept has its newest lines now."""

import sys
from datetime import timedelta

from pipeline.records import batch


def main(behind_s: float) -> None:
    """Starts it. Only what it takes from `utc_now` is moved: spans and ages, no timeouts."""
    today = batch.utc_now
    batch.utc_now = lambda: today() - timedelta(seconds=behind_s)
    # These take `utc_now` by its name, so they are imported behind the change.
    from pipeline.workers.api.server import main as serve
    from pipeline.workers.exits import exit_code

    raise SystemExit(exit_code(serve))


if __name__ == "__main__":
    main(float(sys.argv[1]))
