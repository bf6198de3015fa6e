"""`python -m pipeline.workers.cpu ROLE NAME`: a worker that never sees a GPU (ingest, infer-cpu, drain,
store, beat)."""

from pipeline.imports import uncollected
from pipeline.settings import Settings, limit_polars
from pipeline.settings.allocators import keep_freed_memory
from pipeline.workers.exits import exit_code


def main(argv: list[str]) -> int:
    role, name = argv
    settings = Settings.load()
    if role == "beat":
        with uncollected():
            from pipeline.workers.loops import beat

        return beat(settings)
    limit_polars()
    keep_freed_memory()
    with uncollected():
        from pipeline.workers.bootstrap import serve

    return serve(role, settings, name=name)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
