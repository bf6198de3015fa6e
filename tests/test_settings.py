"""Settings: one precedence, nothing accepted by accident, no secret shown."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadSetting
from pipeline.gpu.policy.fairness import parse_tenants
from pipeline.settings import ITEMS, PUBLIC, Settings, page, unknown_variables, without_settings
from pipeline.settings.values import kept_results, masked_url
from pipeline.sources.chunks import MAX_BYTES, MAX_RECORDS


def config(folder: Path, text: str) -> Path:
    path = folder / "logweir.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    path = config(tmp_path, 'seed = 1\ntrain_span_s = 11\ntime_zone = "Europe/Berlin"\n')
    environ = {"LOGWEIR_SEED": "2", "LOGWEIR_TRAIN_SPAN_S": "12", "UNRELATED": "x"}
    got = Settings.load(flags={"seed": 3, "train_span_s": None}, environ=environ, config=path)
    assert (got.train.seed, got.train.span_s, got.intake.time_zone) == (3, 12, "Europe/Berlin")
    assert got.train.retrain_age_s == Settings().train.retrain_age_s
    assert got.intake.zone.key == "Europe/Berlin"


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = config(tmp_path, "seed = 1\n")
    assert Settings.load(environ={"LOGWEIR_CONFIG": str(path)}).train.seed == 1
    other = config(tmp_path, "seed = 7\n").rename(tmp_path / "other.toml")
    config(tmp_path, "seed = 1\n")
    assert Settings.load(environ={"LOGWEIR_CONFIG": str(path)}, config=other).train.seed == 7


def test_redis_url_has_the_name_that_users_know() -> None:
    assert Settings.load(environ={"REDIS_URL": "redis://h:1/2"}).redis.url == "redis://h:1/2"
    assert Settings.load(environ={"REDIS_URL": ""}).redis.url is None
    assert Settings.load(environ={}).redis.url is None


def test_several_mask_files_stand_in_one_variable(tmp_path: Path) -> None:
    both = os.pathsep.join(("a.toml", "b.toml"))
    assert Settings.load(environ={"LOGWEIR_MASKS": both}).intake.masks == (Path("a.toml"), Path("b.toml"))
    assert Settings.load(environ={"LOGWEIR_MASKS": ""}).intake.masks == ()
    assert Settings.load(environ={}, config=config(tmp_path, 'masks = ["a.toml"]')).intake.masks == (
        Path("a.toml"),
    )


def test_directories_follow_the_data_directory_unless_they_are_given() -> None:
    plain = Settings(data_dir=Path("d"))
    assert (plain.data.results, plain.data.models, plain.data.baseline) == (
        Path("d/results"),
        Path("d/models"),
        Path("d/baseline"),
    )
    assert plain.replace(results_dir=Path("r")).data.results == Path("r")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sede = 1", r"'sede' is not a setting; did you mean seed \(LOGWEIR_SEED\)"),
        ("qwxyz = 1", "'qwxyz' is not a setting; docs/settings.md lists them all"),
        ('seed = "many"', "seed = 'many' has the wrong type; it must be int"),
        ("seed = 1.5", "seed = 1.5 has the wrong type"),
        ("seed = true", "seed = True has the wrong type"),
        ("step_s = false", "step_s = False has the wrong type"),
        ("step_s = nan", "step_s"),
        ("train_span_s = inf", "train_span_s"),
        ("seed = -1", "seed = -1 is out of range; it must be at least 0"),
        ("drain_similarity = 1.5", "drain_similarity = 1.5 is out of range; it must be at most 1"),
        ('key_prefix = ["a"]', r"key_prefix = \['a'\] has the wrong type; it must be str"),
        ("key_prefix = 5", "key_prefix = 5 has the wrong type"),
        ("masks = 5", "masks = 5 has the wrong type"),
        ("masks = [1]", r"masks = \[1\] has the wrong type"),
        ("data_dir = 5", "data_dir = 5 has the wrong type"),
        ("[seed]\nx = 1", "seed = .* has the wrong type"),
        ('time_zone = "Mars/Base"', "time_zone 'Mars/Base' is not known; use an IANA name"),
        ('log_level = "loud"', "log_level 'loud' is not known"),
        ('key_prefix = ""', "key_prefix '' is empty"),
        ('key_prefix = "a{b"', "key_prefix"),
        ('key_prefix = "team[1]"', r"key_prefix 'team\[1\]' is empty or has one of the characters .* \[ \]"),
        ('key_prefix = "team?"', "key_prefix"),
        (r"key_prefix = 'a\b'", "key_prefix"),
        (
            'redis_url = "http://h"',
            "REDIS_URL must begin with redis://, rediss://, unix://, sentinel:// or sentinels://",
        ),
        ('redis_url = "localhost:6379"', "REDIS_URL must begin with"),
        ('redis_url = "redis://h:many/0"', "REDIS_URL"),
        ('redis_url = "redis://[::1"', "REDIS_URL"),
        ("seed = ", "not valid TOML"),
        ("seed = 2147483648", "it must be at most 2147483647"),
        (f"seed = {10**400}", "seed = .* is out of range"),
        ("metrics_port = 65536", "it must be at most 65535"),
        ("step_s = 3601", "it must be at most 3600"),
        ("redis_max_mib = 1048577", "it must be at most 1048576"),
        ("max_pending_mib = 1048577", "it must be at most 1048576"),
        ('intake = ["gopher://h"]', "intake 'gopher://h' has an unknown scheme; use one of http, https"),
        ('intake = ["https://h"]', "https needs \\?cert=FILE&key=FILE"),
        ('intake = ["http://h:4318/path"]', "is no address of a listener; write it like http://127"),
        ("gpu_infer_mib = 512", "gpu_infer_mib = 512 leaves .* gpu_context_mib = 512; raise gpu_infer_mib"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        Settings.load(environ={}, config=config(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("LOGWEIR_SEDE", "'sede' is not a setting; did you mean seed (LOGWEIR_SEED)?"),
        ("LOGWEIR_VERSION", "'version' is not a setting; docs/settings.md lists them all"),
        ("LOGWEIR_", "'' is not a setting; docs/settings.md lists them all"),
        ("LOGWEIR_SWEEP_S", "'sweep_s' is not a setting: its value is fixed; leave it out"),
        ("LOGWEIR_RESULTS_DIR", "'results_dir' is not a setting: its value is fixed; leave it out"),
        ("LOGWEIR_INTERNAL_SEED", "'internal_seed' is not a setting; docs/settings.md lists them all"),
    ],
)  # fmt: skip
def test_an_unknown_variable_is_ignored_and_reported_with_the_nearest_name(name: str, says: str) -> None:
    environ = {name: "a secret"}
    assert Settings.load(environ=environ) == Settings()
    assert unknown_variables(environ) == [f"{name} is ignored: {says}"]


def of_service(name: str, port: int) -> dict[str, str]:
    """The variables of a Service, as Kubernetes sets them in each pod of its namespace."""
    upper, tcp = name.upper().replace("-", "_"), f"tcp://10.0.0.7:{port}"
    return {
        f"{upper}_SERVICE_HOST": "10.0.0.7",
        f"{upper}_SERVICE_PORT": str(port),
        f"{upper}_SERVICE_PORT_HTTP": str(port),
        f"{upper}_PORT": tcp,
        f"{upper}_PORT_{port}_TCP": tcp,
        f"{upper}_PORT_{port}_TCP_PROTO": "tcp",
        f"{upper}_PORT_{port}_TCP_PORT": str(port),
        f"{upper}_PORT_{port}_TCP_ADDR": "10.0.0.7",
        f"{upper}_PORT_514_UDP": "udp://10.0.0.7:514",
    }


@pytest.mark.parametrize("name", ["logweir", "logweir-metrics", "logweir-flower", "logweir-internal"])
def test_the_variables_of_a_kubernetes_service_are_passed_over_silently(name: str) -> None:
    environ = of_service(name, 8080)
    assert Settings.load(environ=environ) == Settings()
    assert unknown_variables(environ) == []


def test_a_port_that_is_no_address_of_a_service_stays_a_setting() -> None:
    assert Settings.load(environ={"LOGWEIR_METRICS_PORT": "9101"}).stack.metrics_port == 9101
    with pytest.raises(BadSetting, match="metrics_port = 'http://h' has the wrong type"):
        Settings.load(environ={"LOGWEIR_METRICS_PORT": "http://h"})


@pytest.mark.parametrize("value", ["", "1.5", "true", "1e3", "nan"])
def test_a_variable_of_the_wrong_type_is_refused(value: str) -> None:
    with pytest.raises(BadSetting, match=r"seed = .* has the wrong type"):
        Settings.load(environ={"LOGWEIR_SEED": value})


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="cannot be read: No such file"):
        Settings.load(environ={}, config=tmp_path / "absent.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadSetting, match="not valid TOML"):
        Settings.load(environ={}, config=tmp_path / "bytes.toml")


SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@host:6379/0",
        f"rediss://ann:{SECRET}@host",
        f"redis://ann:{SECRET}%40%2F%3A@host",
        f"redis://ann:a@{SECRET}@host",
        f"unix://:{SECRET}@/run/redis.sock?db=0",
        f"unix:///run/redis.sock?db=0&password={SECRET}",
        f"redis://host/0?PASSWORD={SECRET}&db=1",
    ],
)
def test_a_password_is_never_shown(url: str) -> None:
    assert SECRET not in masked_url(url)
    assert "***" in masked_url(url)
    assert SECRET not in repr(Settings(redis_url=url))
    assert SECRET not in str(Settings(redis_url=url))


@pytest.mark.parametrize(
    "url", [f"redis://ann:a/{SECRET}#x@host:1/0", f"redis://ann:a?password={SECRET}@host"]
)
def test_a_password_that_makes_it_no_url_is_not_shown_either(url: str) -> None:
    assert SECRET not in masked_url(url)
    with pytest.raises(BadSetting, match="not a URL") as caught:
        Settings(redis_url=url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://host:6379/0", "unix:///run/a:b/redis.sock?db=0", "redis://ann@host"]
)
def test_a_url_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert masked_url(url) == url


def test_a_url_that_is_refused_is_not_shown(tmp_path: Path) -> None:
    for text in (f"http://:{SECRET}@h", f"redis://:{SECRET}@h:port", f"redis://:{SECRET}@[h"):
        with pytest.raises(BadSetting) as caught:
            Settings.load(environ={"REDIS_URL": text})
        assert SECRET not in str(caught.value)
    with pytest.raises(BadSetting) as caught:
        Settings.load(environ={}, config=config(tmp_path, f'redis_url = ["redis://:{SECRET}@h"]'))
    assert SECRET not in str(caught.value)


def value_of(name: str) -> st.SearchStrategy[Any]:
    # What separators, strips and empty texts would change; an environment cannot hold a NUL as it is.
    texts = st.text(st.sampled_from('ab ,:;"\\\n\t\0{}[]=é\U0001f600\udc80'), max_size=8)
    names = st.text(st.sampled_from("ab,;:é"), min_size=1, max_size=8)
    words = st.lists(texts, max_size=3).map(tuple)
    special: dict[str, st.SearchStrategy[Any]] = {
        "store_url": st.none() | texts,
        "results_keep": st.permutations(["lines=12h", "findings=1y", "size=2GiB"]).map(tuple),
        "sinks": st.sampled_from([("parquet",), ("opensearch",), ("opensearch", "parquet")]),
        "redis_url": st.none() | st.just("redis://:a%40b,c@h:1/0"),
        "key_prefix": names,
        "intake": st.lists(st.sampled_from(["http://h:1", "https://[::1]:2?cert=a,b&key=c"]), max_size=3).map(tuple),
        "time_zone": st.sampled_from(["UTC", "Europe/Berlin"]),
        "api": st.sampled_from(["", "http://h:1"]),
        "api_proxies": st.sampled_from(["", "10.0.0.0/8, ::1, user: Remote-User"]),
        "metrics_address": names,
        "flower_address": names,
        "train_source": st.sampled_from(["results", "opensearch:logs-*,-logs-old"]),
        "retrain_at": st.just(("02:30", "23:59")),
        "model_edition": st.just("transformer"),  # the one that takes an encoder
        "session_keys": st.lists(st.sampled_from(["user", "job=(a{1,3})"]), max_size=2, unique=True).map(tuple),
        "gpu_serve": st.sampled_from(["", "http://h:1"]),
        "gpu_tenants": st.just(("logweir", "research=1:4GiB")),
        "gpu_beat_s": st.floats(0.05, 0.1),
        "gpu_context_mib": st.integers(0, 1_000),
        "gpu_infer_mib": st.integers(1_001, 10**6),
        "opensearch_url": st.just("https://user:a%40b@h:9200"),
        "opensearch_prefix": st.just("own"),
        "opensearch_source": st.none() | st.just("app-*,-app-old"),
        "opensearch_fields": st.tuples(texts, texts, texts),
        "kafka_source": st.none() | st.just("kafka://a:1,b:2/one,two?start=latest"),
        "nats_source": st.none() | st.just("nats://a:1,b:2/raw_logs"),
    }  # fmt: skip
    if name in special:
        return special[name]
    item = ITEMS[name]
    least, most = item.meta.ge, item.meta.le
    strategies: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        float: st.floats(least, most, allow_nan=False),
        int: st.integers(int(least or 0), int(most or 0)),
        str: texts,
        Path: texts.map(Path),
        tuple[Path, ...]: st.lists(texts.map(Path), max_size=3).map(tuple),
        tuple[str, ...]: words,
    }
    value = (
        st.sampled_from(get_args(item.kind)) if get_origin(item.kind) is Literal else strategies[item.kind]
    )
    return st.none() | value if item.optional else value


@given(st.fixed_dictionaries({name: value_of(name) for name in ITEMS}))
def test_a_child_process_builds_the_same_settings_from_its_environment(values: dict[str, Any]) -> None:
    wanted = Settings(**values)
    environ = wanted.to_environ()
    assert all(value.isprintable() and value.isascii() for value in environ.values())
    assert Settings.load(environ=environ) == wanted


def test_a_variable_of_one_setting_counts_more_than_what_was_handed_down() -> None:
    environ = Settings(seed=3, masks=(Path("a:b"),)).to_environ() | {"LOGWEIR_SEED": "4"}
    assert Settings.load(environ=environ) == Settings(seed=4, masks=(Path("a:b"),))


def test_a_child_sees_no_variable_that_its_parent_did_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGWEIR_SEED", "REDIS_URL", "FLOWER_BASIC_AUTH", "LOGWEIR_CONFIG", "KEPT"):
        monkeypatch.setenv(name, "x")
    left = without_settings()
    assert left["KEPT"] == "x"
    assert not {"LOGWEIR_SEED", "REDIS_URL", "FLOWER_BASIC_AUTH", "LOGWEIR_CONFIG"} & left.keys()


def test_a_policy_is_taken_over_from_what_was_written_as_json() -> None:
    theirs = Settings(gpu_tenants=("logweir", "research=1:4GiB"), gpu_half_life_s=60, gpu_beat_s=0.2, seed=7)
    written = json.loads(json.dumps(theirs.policy()))
    ours = Settings(seed=3, gpu_backfill="strict")
    got = ours.under(written)
    assert got == theirs.replace(seed=3)
    assert ours.under({"seed": 9, "gpu_of_tomorrow": 1}) == ours
    with pytest.raises(BadSetting, match="gpu_backfill 'all' is not known"):
        ours.under({"gpu_backfill": "all"})


@pytest.mark.parametrize("name", ["metrics_address", "flower_address"])
def test_an_empty_address_is_refused(name: str) -> None:
    with pytest.raises(BadSetting, match=f"{name} is empty"):
        Settings(**{name: " "})


@pytest.mark.parametrize("text", ["a=1:4", "a=1:4096", "a=1:", "a=1:4k", "a=1:some"])
def test_a_quota_of_a_tenant_without_a_unit_is_refused_with_the_name_of_the_setting(text: str) -> None:
    says = f"gpu_tenants: the memory of 'a' is '{text[4:]}'; write it with its unit, as in a=1:4GiB"
    with pytest.raises(BadSetting, match=says):
        parse_tenants([text])


def test_every_number_has_a_least_and_a_most() -> None:
    numbers = {name: item.meta for name, item in ITEMS.items() if item.kind in (int, float)}
    assert {"seed", "step_s", "train_span_s", "sweep_s"} <= set(numbers)
    open_ended = [name for name, meta in numbers.items() if meta.ge is None or meta.le is None]
    assert open_ended == []


def test_every_setting_is_described() -> None:
    assert all(ITEMS[name].meta.description and f"| `{name}` |" in page() for name in PUBLIC)


def test_an_empty_variable_switches_the_intake_off() -> None:
    off = Settings.load(environ={"LOGWEIR_INTAKE": ""})
    assert off.intake.listeners == ()
    assert Settings().intake.listeners == ("http://127.0.0.1:4318",)


def test_there_are_few_settings() -> None:
    """More of them hide those that matter: a constant with its reason serves whoever nobody asks."""
    # 74 with `gpu_infer_processes`: how many scoring processes a machine can hold depends on its memory.
    # 75 with `follow_quiet_s`: how long programs write to a rotated log depends on their longest request.
    assert len(PUBLIC) <= 75 and len(set(ITEMS) - set(PUBLIC)) <= 21


def test_a_setting_has_one_name_and_one_place() -> None:
    settings = Settings()
    places = {(item.group, item.field) for item in ITEMS.values()}
    assert len(places) == len(ITEMS)
    for name, item in ITEMS.items():
        assert getattr(getattr(settings, item.group), item.field) == item.default == settings.flat()[name]
    with pytest.raises(AttributeError):
        settings.train.seed = 7  # type: ignore[misc]


@pytest.mark.parametrize("name", ["sweep_s", "claim_ttl_ms"])
def test_a_constant_is_refused_as_a_setting_with_that_remedy(tmp_path: Path, name: str) -> None:
    says = f"'{name}' is not a setting: its value is fixed; leave it out"
    with pytest.raises(BadSetting, match=says):
        Settings.load(environ={}, config=config(tmp_path, f"{name} = 5"))
    with pytest.raises(BadSetting, match=says):
        Settings.load(environ={}, flags={name: 5})


def test_the_fields_of_a_document_are_three_names() -> None:
    with pytest.raises(
        BadSetting, match=r"opensearch_fields = .* has the wrong type; it must be a list of 3 words"
    ):
        Settings.load(environ={"LOGWEIR_OPENSEARCH_FIELDS": "time,log"})
    got = Settings.load(environ={"LOGWEIR_OPENSEARCH_FIELDS": "time,log,level"})
    assert got.opensearch.fields == ("time", "log", "level")


def test_constants_reach_a_process_through_one_channel_of_the_environment() -> None:
    got = Settings.load(environ={"LOGWEIR_INTERNAL_SWEEP_S": "0.5"})
    assert got.internal.sweep_s == 0.5
    with pytest.raises(BadSetting, match="sweep_s = 3601 is out of range; it must be at most 3600"):
        Settings.load(environ={"LOGWEIR_INTERNAL_SWEEP_S": "3601"})
    assert not any(name in page() for name in ("sweep_s", "INTERNAL", "batch_records"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"gpu_beat_s": 6}, "gpu_beat_s = 6 is more than half of gpu_node_ttl_ms = 10000"),
        ({"gpu_node_ttl_ms": 1999}, "gpu_beat_s = 1 is more than half of gpu_node_ttl_ms = 1999"),
        ({"gpu_context_mib": 4096}, "gpu_infer_mib = 2048 leaves"),
        ({"sede": 1}, "'sede' is not a setting"),
        ({"sinks": ("paper",)}, "sinks 'paper' is not usable; name parquet or opensearch, or both"),
        ({"sinks": ()}, "sinks '' is not usable"),
        ({"retrain_at": ("25:00",)}, "retrain_at '25:00' is not a time of day"),
    ],
)
def test_values_are_checked_wherever_they_come_from(values: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        Settings(**values)
    with pytest.raises(BadSetting, match=says):
        Settings(**values)


@pytest.mark.long
@pytest.mark.parametrize(("before", "threads"), [(None, 1), ("", 1), ("2", 2), ("3", 3)])
def test_polars_takes_one_thread_unless_its_own_variable_says_more(before: str | None, threads: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "POLARS_MAX_THREADS"}
    if before is not None:
        env["POLARS_MAX_THREADS"] = before
    code = "from pipeline.settings import limit_polars; limit_polars(); import polars; print(polars.thread_pool_size())"
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert int(said.stdout) == threads


@pytest.mark.parametrize("module", ["pipeline.cli", "pipeline.workers.cpu", "pipeline.workers.gpu"])
def test_polars_is_not_imported_before_its_threads_are_told(module: str) -> None:
    code = f"import sys, {module}; sys.exit('polars' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_source_cuts_batches_as_they_are_shipped() -> None:
    assert (Settings().internal.batch_records, Settings().internal.batch_kib * 1024) == (
        MAX_RECORDS,
        MAX_BYTES,
    )


@pytest.mark.long
@pytest.mark.parametrize(("said", "threads"), [({}, 1), ({"POLARS_MAX_THREADS": "3"}, 3)])
def test_send_takes_one_polars_thread_unless_polars_own_variable_says_more(
    said: dict[str, str], threads: int
) -> None:
    code = """
import sys, types
from pipeline.cli import main

def send(args):
    import polars
    print(polars.thread_pool_size())
    return 0

sys.modules["pipeline.commands.send.verb"] = types.SimpleNamespace(main=send)
sys.exit(main(["send", "app.log"]))
"""
    env = {k: v for k, v in os.environ.items() if k != "POLARS_MAX_THREADS"} | said
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) == threads


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ((), {"lines": 30.0, "findings": 395.0, "rates_5m": 30.0, "rates_1h": 395.0, "usage": 395.0}),
        (
            ("lines=12h", "findings=1y", "usage=3y"),
            {"lines": 0.5, "findings": 365.25, "rates_5m": 30.0, "rates_1h": 395.0, "usage": 1095.75},
        ),
        (
            ("lines=forever", "rates_5m=1w", "usage=forever"),
            {"findings": 395.0, "rates_5m": 7.0, "rates_1h": 395.0},
        ),
    ],
)
def test_a_table_of_results_that_is_not_named_stays_its_usual_time(
    words: tuple[str, ...], kept: dict[str, float]
) -> None:
    assert kept_results(words) == {name: days * 86_400 for name, days in kept.items()}


@pytest.mark.parametrize(
    "word",
    [
        "lines",
        "lines=30",
        "lines=0d",
        "lines=-1d",
        "line=30d",
        "size=forever",
        "size=30d",
        "=30d",
        "lines=1e9d",
    ],
)
def test_an_unusable_word_of_results_keep_is_refused_with_the_remedy(word: str) -> None:
    with pytest.raises(ValueError, match=r"is not usable; write lines"):
        kept_results([word])
    with pytest.raises(ValueError, match="names lines twice"):
        kept_results(["lines=1d", "lines=2d"])


@pytest.mark.parametrize(("said", "kept"), [({}, True), ({"_RJEM_MALLOC_CONF": "narenas:1"}, False)])
def test_freed_memory_is_kept_and_jemallocs_own_variable_stays(said: dict[str, str], kept: bool) -> None:
    code = """
import os, resource
from pipeline.settings.allocators import keep_freed_memory

keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    blocks = [bytearray(b"x") * (1 << 20) for _ in range(16)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, os.environ["_RJEM_MALLOC_CONF"])
"""
    env = {k: v for k, v in os.environ.items() if k != "_RJEM_MALLOC_CONF"} | said
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    faults, conf = done.stdout.split()
    assert int(faults) < 3 * (16 << 20) // 4096  # each round takes its pages anew otherwise
    assert conf.startswith("dirty_decay_ms:") is kept
