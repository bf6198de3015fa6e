"""The answers that the settings name: from Parquet files where they are a sink, else from OpenSearch."""

from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers
from pipeline.sinks.choose import parquet_of


def answers_of(settings: Settings) -> Answers:
    """Answers about scored results; close them. Raises BadSetting without an OpenSearch that is named."""
    if "parquet" in settings.data.sinks:
        from pipeline.sinks.answers.files import FileAnswers  # DuckDB takes 0.1 s to import

        return FileAnswers(parquet_of(settings), cache=settings.data.dir / "cache")
    from pipeline.sinks.answers.indices import IndexAnswers

    return IndexAnswers(settings)
