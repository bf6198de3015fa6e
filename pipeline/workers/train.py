"""`python -m pipeline.workers.train NAME [cpu|cuda]`: trains, one model at a time.

On a GPU it takes the device for itself through the pool, from the fit on, and its child ends after every
training."""

from pipeline.imports import uncollected
from pipeline.settings import Settings
from pipeline.workers.exits import exit_code


def main(argv: list[str]) -> int:
    name, *device = argv
    with uncollected():
        from pipeline.workers.bootstrap import serve
    return serve("train-gpu" if device == ["cuda"] else "train", Settings.load(), name=name)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
