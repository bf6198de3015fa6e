"""`python -m pipeline.workers.gpu NAME`: serves infer.gpu, under a shared lease for every batch."""

import sys

from pipeline.settings import Settings
from pipeline.workers.bootstrap import serve


def main(argv: list[str]) -> int:
    (name,) = argv
    return serve("infer-gpu", Settings.load(), name=name)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
