"""The documents agree with the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.cli import parser
from pipeline.settings import page
from pipeline.workers.roles import ROLES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "samples" / "README.md"])


def test_the_settings_page_lists_the_settings_as_they_are() -> None:
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == page(), (
        "run: python -c 'from pipeline.settings import page; print(page(), end=\"\")' > docs/settings.md"
    )


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    """As scripts/docs does it: Sphinx resolves each link and anchor between pages, and imports what the API page names."""
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "trees", "docs", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-4000:]
    for name in ("index", "reference/commands", "reference/metrics", "api"):
        assert (tmp_path / f"{name}.html").exists()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_readme_names_only_verbs_that_exist() -> None:
    verbs = set(parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr,arg-type]
    used = set(re.findall(r"\blogweir ([a-z]+)\b", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert used <= verbs


def test_compose_has_a_service_for_every_role_and_one_image() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    assert set(services) >= {*ROLES, "redis", "beat", "flower", "metrics"}
    assert "--appendonly yes" in services["redis"]["command"]
    workers = {name: s for name, s in services.items() if name != "redis"}
    assert len({s["image"] for s in workers.values()}) == 1
    locks = workers.pop("gpu-locks")
    assert (locks["user"], locks["restart"], locks["profiles"]) == ("root", "no", ["gpu"])
    for name, service in workers.items():
        module, *rest = service["command"]
        assert (ROOT / (module.replace(".", "/") + ".py")).exists()
        if module == "pipeline.workers.cpu":
            assert rest[0] == name
    assert "gpu" in services["infer-gpu"]["profiles"]


def test_compose_probes_every_worker_by_its_own_name() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for name in {*ROLES, "beat", "agent"}:
        service = services[name]
        assert service["healthcheck"]["test"][-2:] == ["health", f"{service['command'][1]}@"]
        assert service["healthcheck"]["interval"] == "15s"


def test_compose_lets_every_gpu_service_lock_where_its_user_may_write() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    (place,) = services["gpu-locks"]["volumes"]
    assert services["gpu-locks"]["entrypoint"] == ["chmod", "1777", place.split(":")[1]]
    with_gpu = {name for name, s in services.items() if "deploy" in s}
    assert with_gpu == {"agent", "infer-gpu", "train-gpu"}
    for name in with_gpu:
        needs = services[name]["depends_on"]
        assert needs["gpu-locks"] == {"condition": "service_completed_successfully"}
        assert needs["redis"] == {"condition": "service_healthy"}
        assert (place in services[name]["volumes"]) == (name != "agent")
