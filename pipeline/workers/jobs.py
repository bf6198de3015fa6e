"""`python -m pipeline.workers.jobs NAME`: starts the jobs of this machine. It needs `gpu_jobs = true`."""

from pipeline.errors import BadSetting
from pipeline.settings import Settings
from pipeline.workers.exits import exit_code


def main(argv: list[str]) -> int:
    (name,) = argv
    settings = Settings.load()
    if not settings.gpu.jobs:
        raise BadSetting(
            "gpu_jobs is off here, so this machine runs no commands of others; set gpu_jobs = true to allow it"
        )
    from pipeline.workers.bootstrap import serve

    return serve("gpu-jobs", settings, name=name)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
