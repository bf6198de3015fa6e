"""Where served models go: the decision by itself, and their records under real Redis."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from pipeline.errors import BadBundle, BadInput, NotFound
from pipeline.gpu.homes import (
    IN_USE_MS,
    NO_SERVER,
    SILENT_MS,
    SUPERSEDED_MS,
    Home,
    Pending,
    ServeState,
    choose_home,
    next_load,
    serve_state,
    surplus,
)
from pipeline.gpu.placing import Loaded, LoadState
from pipeline.gpu.served import (
    KEPT_VERSIONS,
    LoadFault,
    ModelFormat,
    ServedModel,
    ServedModels,
    ServeNode,
    ServeRoom,
    checked_model_name,
)
from pipeline.gpu.served_files import fetch_model_file, format_of, put_model_file, sweep_model_files
from pipeline.settings import Settings
from pipeline.store.choose import open_store

NOW = 1_000_000


def a_model(name: str = "m", mib: int = 100, **changes: Any) -> ServedModel:
    plain = ServedModel(
        tenant="t", name=name, version=1, format=ModelFormat.ONNX, memory_mib=mib, sha256="0" * 64, size=1
    )
    return replace(plain, **changes)


def a_node(name: str, mib: int = 300, **changes: Any) -> ServeNode:
    plain = ServeNode(
        name=f"serve@{name}", node=name, url=f"http://{name}:4390", lease_id=f"lease-{name}",
        rooms=(ServeRoom(uuid=f"GPU-{name}", memory_mib=mib),), formats=tuple(ModelFormat), beat_ms=NOW,
    )  # fmt: skip
    return replace(plain, **changes)


def on(name: str, model: ServedModel, *, used_ms: int = NOW, state: LoadState = LoadState.READY) -> Loaded:
    return Loaded(
        model=model.model, uuid=f"GPU-{name}", holder=f"serve@{name}", lease_id=f"lease-{name}", claim="c",
        state=state, used_ms=used_ms,
    )  # fmt: skip


def view(
    models: list[ServedModel], loaded: list[Loaded], nodes: list[ServeNode], *wanted: ServedModel
) -> Pending:
    return Pending(
        now_ms=NOW, models=models, loaded=loaded, nodes=nodes, wanted={one.field for one in wanted}
    )


def test_a_model_goes_to_the_tightest_room_of_all_nodes_and_only_that_node_loads_it() -> None:
    model = a_model(mib=150)
    both = view([model], [], [a_node("a", 300), a_node("b", 200)])
    assert choose_home(both, model) == Home(lease_id="lease-b", uuid="GPU-b")
    assert next_load(both, "lease-a") is None
    assert next_load(both, "lease-b") == (model, Home(lease_id="lease-b", uuid="GPU-b"))


def test_replicas_go_to_devices_of_their_own_and_a_missing_one_says_why() -> None:
    model = a_model(replicas=2)
    nodes = [a_node("a"), a_node("b")]
    assert choose_home(view([model], [on("a", model)], nodes), model).uuid == "GPU-b"
    assert choose_home(view([model], [on("a", model), on("b", model)], nodes), model) == Home()
    state, why = serve_state(view([model], [on("a", model)], nodes[:1]), model)
    assert (state, why) == (
        ServeState.READY, "each of 1 devices has a copy; a further one needs another",
    )  # fmt: skip


def test_idle_models_make_room_only_for_one_that_is_asked_for_and_the_oldest_first() -> None:
    old, new, busy = a_model("old"), a_model("new"), a_model("busy")
    loaded = [
        on("a", new, used_ms=NOW - IN_USE_MS - 1),
        on("a", old, used_ms=NOW - IN_USE_MS - 2),
        on("a", busy),
    ]
    model = a_model("more")
    models = [old, new, busy, model]
    why = choose_home(view(models, loaded, [a_node("a")]), model).why
    assert why == "it needs 100 MiB, and 0 MiB are free; idle ones make room when it is asked for"
    home = choose_home(view(models, loaded, [a_node("a")], model), model)
    assert [entry.model.name for entry in home.unload] == [old.model.name]
    large = a_model("large", 300)
    assert choose_home(view([*models, large], loaded, [a_node("a")], large), large).why == (
        "it needs 300 MiB, and 0 MiB are free; all others are in use"
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"beat_ms": NOW - SILENT_MS - 4_000}, "serve@a has been silent for 9 s"),
        ({"lease_id": "", "why": "waits for a lease"}, "serve@a waits for a lease"),
        (
            {"formats": (ModelFormat.LOGWEIR,)},
            "serve@a cannot load the format onnx; install the extra serve there",
        ),
        (
            {"faults": (LoadFault(model="t/m/1", why="it is no ONNX", until_ms=NOW + 7_500),)},
            "serve@a could not load it (it is no ONNX) and tries again in 8 s",
        ),
        (
            {"rooms": (ServeRoom(uuid="GPU-a", memory_mib=90),)},
            "it needs 100 MiB, and the largest lease has 90 MiB (gpu_serve_mib)",
        ),
    ],
)
def test_a_pending_model_says_why(changes: dict[str, Any], why: str) -> None:
    model = a_model()
    assert serve_state(view([model], [], [a_node("a", **changes)]), model) == (ServeState.PENDING, why)
    # A node that can is not held up by one that cannot.
    assert choose_home(view([model], [], [a_node("a", **changes), a_node("b")]), model).uuid == "GPU-b"


def test_a_pending_model_without_nodes_says_what_to_set() -> None:
    model = a_model()
    assert serve_state(view([model], [], []), model) == (ServeState.PENDING, NO_SERVER)


def test_a_copy_on_a_silent_node_is_named_until_its_lease_ends() -> None:
    model = a_model()
    gone = a_node("b", beat_ms=NOW - SILENT_MS - 1_000)
    state, why = serve_state(view([model], [on("b", model)], [a_node("a"), gone]), model)
    assert state is ServeState.PENDING
    assert why == "serve@b has been silent for 6 s; its copy counts until its lease ends"
    assert choose_home(view([model], [], [a_node("a"), gone]), model).uuid == "GPU-a"


def test_a_model_that_loads_is_neither_loaded_twice_nor_ready() -> None:
    model = a_model()
    loading = view([model], [on("a", model, state=LoadState.LOADING)], [a_node("a"), a_node("b")])
    assert choose_home(loading, model) == Home()
    assert serve_state(loading, model) == (ServeState.LOADING, "serve@a is loading it")


def test_removed_and_superseded_copies_are_surplus_once_the_newest_is_ready() -> None:
    old, new, removed = a_model(), a_model(version=2), a_model("removed")
    idle = [on("a", one, used_ms=NOW - SUPERSEDED_MS - 1) for one in (old, removed)]
    nodes = [a_node("a")]
    assert surplus(view([old, new], idle, nodes), "lease-a") == [idle[1]]
    both = [*idle, on("a", new)]
    assert surplus(view([old, new], both, nodes), "lease-a") == idle
    assert surplus(view([old, new], both, nodes, old), "lease-a") == [idle[1]]
    assert surplus(view([old, new], both, nodes), "lease-b") == []
    assert next_load(view([old], [], nodes), "lease-a") and not next_load(
        view([old, new], both, nodes), "lease-a"
    )


def test_versions_count_up_and_the_fourth_removes_the_first(
    client: "redis.Redis", settings: Settings
) -> None:
    served = ServedModels(client, settings)
    for number in range(1, KEPT_VERSIONS + 1):
        new, old = served.put(a_model())
        assert (new.version, old) == (number, [])
    new, old = served.put(a_model())
    assert (new.version, [one.version for one in old]) == (4, [1])
    served.put(a_model(tenant="other"))
    assert [one.field for one in served.all()] == ["other/m/1", "t/m/2", "t/m/3", "t/m/4"]
    assert set(served.wanted()) == {"t/m/1", "t/m/2", "t/m/3", "t/m/4", "other/m/1"}
    served.fulfil(new)
    assert "t/m/4" not in served.wanted()
    assert [one.version for one in served.remove("t", "m", 3)] == [3]
    assert len(served.remove("t", "m")) == 2
    with pytest.raises(NotFound, match="t has no model m of version 9"):
        served.remove("t", "m", 9)


def test_a_damaged_record_hides_no_other_and_silent_nodes_are_forgotten(
    client: "redis.Redis", settings: Settings
) -> None:
    served = ServedModels(client, settings)
    served.put(a_model())
    client.hset(served._served, "broken", b'{"name": 7')
    assert [one.name for one in served.all()] == ["m"]
    served.report(a_node("a", beat_ms=0))
    served.report(a_node("b", beat_ms=2**52, faults=(LoadFault(model="t/m/1", why="no", until_ms=1),)))
    (node,) = served.nodes()
    assert (node.name, node.rooms[0].memory_mib, node.faults[0].why) == ("serve@b", 300, "no")
    assert client.hlen(served._nodes) == 1


def test_files_of_models_are_stored_by_their_hash_and_checked(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    file = tmp_path / "m.onnx"
    file.write_bytes(b"weights")
    sha256, total = put_model_file(store, file)
    fetch_model_file(store, sha256, total, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"weights"
    assert sweep_model_files(store, ()) == 0, "its record may still come"
    store.put(f"served/{sha256}", b"weighty")
    with pytest.raises(BadBundle, match="is damaged"):
        fetch_model_file(store, sha256, total, tmp_path / "copy")
    with pytest.raises(BadBundle, match="lacks the model"):
        fetch_model_file(store, "f" * 64, 1, tmp_path / "copy")


def test_formats_and_names_are_checked_before_anything_is_stored(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    (tmp_path / "export").mkdir()
    assert format_of(tmp_path / "m.onnx") is ModelFormat.ONNX
    for wrong in ("export", "absent.onnx"):
        with pytest.raises(BadInput, match=r"no export|does not exist"):
            format_of(tmp_path / wrong)
    (tmp_path / "export" / "export.json").touch()
    assert format_of(tmp_path / "export") is ModelFormat.LOGWEIR
    for name in ("", "a/b", ".a", "ä", "a" * 64):
        with pytest.raises(BadInput, match="no name of a model"):
            checked_model_name(name)
