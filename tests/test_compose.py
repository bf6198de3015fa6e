"""docker-compose.yml and the files beside it agree with the code. tests/e2e/test_images.py starts them."""

import re
from pathlib import Path

import compose
import pytest
import yaml

from pipeline.gpu.node.host_lock import MODE
from pipeline.settings import ITEMS, PUBLIC, Settings
from pipeline.workers.roles import ROLES

ROOT = Path(__file__).resolve().parent.parent


def test_compose_has_a_service_for_every_role_and_one_image() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    assert "--appendonly yes" in services["redis"]["command"]
    workers = {name: s for name, s in services.items() if name != "redis"}
    assert len({s["image"] for s in workers.values()}) == 1
    locks = workers.pop("gpu-locks")
    assert (locks["user"], locks["restart"], locks["profiles"]) == ("root", "no", ["gpu"])
    # The programs that the code can start: worker roles, and the modules that are loops of their own.
    programs = {
        path.parent.name if path.stem == "__main__" else path.stem
        for path in (ROOT / "pipeline" / "workers").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    programs -= {"cpu", "gpu", "jobs", "train", "tethered"}  # of the roles; the last one ends orphans
    assert workers.keys() == ROLES.keys() | programs | {"beat"}
    for name, service in workers.items():
        module, *rest = service["command"]
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists()
        if module == "pipeline.workers.cpu":
            assert rest[0] == name
        assert service.get("profiles", []) == PROFILES.get(name, [])


# Services with a device, another server or a login are asked for; all others start by themselves.
PROFILES = {
    **{name: ["gpu"] for name in ("agent", "infer-gpu", "train-gpu")},
    "gpu-jobs": ["gpu-jobs"],
    "serve": ["serve"],
    "source": ["opensearch"],
    "kafka": ["kafka"],
    "nats": ["nats"],
    "flower": ["flower"],
    "intake": ["intake"],
    "api": ["api"],
}


def test_every_setting_reaches_every_service_and_a_user_has_the_last_word() -> None:
    names = {ITEMS[name].variable for name in PUBLIC}
    said = {variable: f"of {variable}" for variable in names} | {"REDIS_PASSWORD": "secret"}
    found = compose.services(
        [ROOT / "docker-compose.yml"],
        said,
        profiles=["gpu", "gpu-jobs", "serve", "opensearch", "kafka", "nats", "flower", "intake", "api"],
    )
    # A port of a container is open to the others of its network; which one it is, Compose publishes.
    open_to = {
        "metrics": {"LOGWEIR_METRICS_ADDRESS"},
        "flower": {"LOGWEIR_FLOWER_ADDRESS"},
        "intake": {"LOGWEIR_INTAKE"},
        "api": {"LOGWEIR_API"},
        "serve": {"LOGWEIR_GPU_SERVE"},
    }
    for name in found.keys() - {"redis"}:
        environment = found[name].environment
        assert names <= environment.keys()
        assert {v for v in names if environment[v] != said[v]} == open_to.get(name, set())
    plain = compose.services([ROOT / "docker-compose.yml"], {})
    assert plain.keys() == found.keys() - PROFILES.keys() - {"gpu-locks"}
    assert Settings.load(environ=plain["store"].environment).redis.url == "redis://redis:6379/0"


def test_a_further_host_runs_the_workers_alone() -> None:
    """The files `.env` are those of the page on more machines."""
    of_first, of_further = compose.dot_envs(ROOT / "docs" / "machines.md")
    first = compose.services([ROOT / "docker-compose.yml"], of_first)
    files = [ROOT / name for name in of_further["COMPOSE_FILE"].split(":")]
    further = compose.services(files, of_further)
    assert first.keys() - further.keys() == {"redis", "beat", "metrics"}
    assert further.keys() == {name for name in ROLES if "gpu" not in name}
    assert first["redis"].keys["ports"] == ["10.0.0.1:6379:6379"]
    assert first["redis"].command[-1] == of_first["REDIS_PASSWORD"]
    for name, service in further.items():
        assert service.keys == first[name].keys
        assert service.environment["REDIS_URL"] == of_further["REDIS_URL"]
        assert first[name].environment["REDIS_URL"] == of_first["REDIS_URL"]
        assert "--volume=/mnt/logweir:/store" in service.options("p")
        assert service.keys["depends_on"]["redis"]["required"] is False


def test_redis_listens_to_other_hosts_with_a_password_only() -> None:
    with pytest.raises(ValueError, match="set a REDIS_PASSWORD too"):
        compose.services([ROOT / "docker-compose.yml"], {"REDIS_BIND": "10.0.0.1"})
    both = {"REDIS_BIND": "10.0.0.1", "REDIS_PASSWORD": "secret"}
    redis = compose.services([ROOT / "docker-compose.yml"], both)["redis"]
    assert redis.keys["ports"] == ["10.0.0.1:6379:6379"]
    assert redis.command[-2:] == ["--requirepass", "secret"]
    redis = compose.services([ROOT / "docker-compose.yml"], {})["redis"]
    assert redis.keys["ports"] == ["127.0.0.1:6379:6379"]
    assert redis.command[-2:] == ["--requirepass", ""]


def test_the_example_of_an_env_file_names_variables_that_exist_and_no_secret() -> None:
    lines = (ROOT / "deploy" / "env.example").read_text(encoding="utf-8").splitlines()
    named = {found[1]: found[2] for line in lines if (found := re.fullmatch(r"(?:# )?([A-Z_]+)=(.*)", line))}
    known = {ITEMS[name].variable for name in PUBLIC}
    compose_text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    of_compose = set(re.findall(r"\$\{(\w+)", compose_text)) | {"COMPOSE_FILE"}
    of_bucket = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"}
    assert of_compose <= named.keys() <= known | of_compose | of_bucket
    for file in named["COMPOSE_FILE"].split(":"):
        assert (ROOT / file).exists()
    assert not [line for line in lines if line and not line.startswith("#")]


def test_compose_probes_every_worker_by_its_own_name() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for name in {*ROLES, "beat", "agent"}:
        service = services[name]
        assert service["healthcheck"]["test"][-2:] == ["health", f"{service['command'][1]}@"]
        assert service["healthcheck"]["interval"] == "15s"


def test_compose_lets_every_gpu_service_lock_where_its_user_may_write() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    (place,) = services["gpu-locks"]["volumes"]
    made = ["install", "-d", "-m", f"{MODE:o}", "-g", "10001", place.split(":")[1]]
    assert services["gpu-locks"]["entrypoint"] == made
    with_gpu = {name for name, s in services.items() if "deploy" in s}
    assert with_gpu == {"agent", "infer-gpu", "gpu-jobs", "serve", "train-gpu"}
    for name in with_gpu:
        needs = services[name]["depends_on"]
        assert needs["gpu-locks"] == {"condition": "service_completed_successfully"}
        assert needs["redis"]["condition"] == "service_healthy"
        assert (place in services[name]["volumes"]) == (name != "agent")
