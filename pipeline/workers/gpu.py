"""`python -m pipeline.workers.gpu NAME [cpu|cuda]`: serves infer.gpu, under a share of the GPU pool.

With `cpu` everything is as on a GPU but the arithmetic: for benchmarks and tests on machines without one.
"""

from pipeline.imports import uncollected
from pipeline.settings import Settings, limit_polars
from pipeline.workers.exits import exit_code


def main(argv: list[str]) -> int:
    name, *device = argv
    settings = Settings.load()
    limit_polars()
    with uncollected():
        from pipeline.workers.bootstrap import serve

    return serve("infer-gpu", settings, name=name, device=device[0] if device else None)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
