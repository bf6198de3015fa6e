"""The answers that the settings name: from Parquet files where they are a sink, else from OpenSearch."""

from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers
from pipeline.sinks.answers.bounds import LIMIT_S, MEMORY
from pipeline.sinks.choose import parquet_of


def answers_of(settings: Settings, *, limit_s: float | None = LIMIT_S, memory: str = MEMORY) -> Answers:
    """Answers about scored results; close them. `limit_s`, `memory`: of a question to files.

    Raises BadSetting without an OpenSearch that is named."""
    if "parquet" in settings.data.sinks:
        from pipeline.sinks.answers.files import FileAnswers  # DuckDB takes 0.1 s to import

        return FileAnswers(
            parquet_of(settings), cache=settings.data.dir / "cache", limit_s=limit_s, memory=memory
        )
    from pipeline.sinks.answers.indices import IndexAnswers

    return IndexAnswers(settings)
