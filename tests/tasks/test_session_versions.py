"""The version under which the watcher judges sessions."""

from types import SimpleNamespace
from typing import Any

from pipeline.errors import ModelUnavailable
from pipeline.settings import Settings
from pipeline.tasks.context import Context


class _Models:
    """Serves a version, and counts how often each model is asked for it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.live: str | None = "m1"
        self.serving = SimpleNamespace(version=self._version)

    def _version(self, model: str = "shared") -> str | None:
        self.asked.append(model)
        if self.live is None:
            raise ModelUnavailable("its files are gone")
        return self.live

    def session_model(self, version: str, workload: str, kind: str) -> str:
        return f"{version} {workload} {kind}"


def test_a_round_of_the_watcher_asks_each_model_once_for_its_version() -> None:
    context, models = Context(None, Settings()), _Models()
    as_any: Any = context
    as_any.models = models
    context.begin_watching()
    found = [context.session_model(f"shop-{number}", "user") for number in range(50)]
    assert found[7] == ("m1", "m1 shop-7 user") and len(models.asked) == 1
    models.live = "m2"
    assert context.session_model("shop-7", "user") == found[7], "a round has one version"
    context.begin_watching()
    assert context.session_model("shop-7", "user") == ("m2", "m2 shop-7 user")
    models.live = None
    context.begin_watching()
    assert [context.session_model(name, "user") for name in ("a", "b")] == [None, None]
    assert len(models.asked) == 3, "a model that cannot be read is no reason to ask again"
