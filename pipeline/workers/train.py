"""`python -m pipeline.workers.train NAME [cpu|cuda]`: trains, one model at a time, under the exclusive lease."""

import sys

from pipeline.settings import Settings
from pipeline.workers.bootstrap import serve


def main(argv: list[str]) -> int:
    name, *device = argv
    return serve("train", Settings.load(), name=name, device=device[0] if device else None)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
