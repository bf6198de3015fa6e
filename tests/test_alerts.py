"""Alert rules and dashboard ask for metrics that exist, and every alert has a section that says what to do,
and a test."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from pool_devices import put_devices
from prometheus_client import CollectorRegistry

from pipeline.gpu.pool import Pool
from pipeline.settings import Settings
from pipeline.workers.scrape import Scrape

ROOT = Path(__file__).resolve().parent.parent
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "logweir.json").read_text(encoding="utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
TESTS = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SELECTOR = re.compile(r"\b(logweir_\w+)\s*(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def expressions() -> list[str]:
    asked = [target["expr"] for panel in PANELS for target in panel["targets"]]
    tested = [series["series"] for test in TESTS for series in test["input_series"]]
    return [*(rule["expr"] for rule in RULES), *asked, *tested]


@pytest.fixture
def exported(client: "redis.Redis", settings: Settings) -> dict[str, list[dict[str, str]]]:
    """The label sets of every metric that an exporter shows on a real Redis where a model is live."""
    key = f"{{{settings.redis.key_prefix}}}:model"
    client.hset(key, mapping={"version": "m000001-0a1b2c3d", "published_ms": 1})
    put_devices(Pool(client, settings), 1, utilisation_percent=5, temperature_c=40)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scrape(client, settings))
    found: dict[str, list[dict[str, str]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def test_rules_dashboard_and_their_tests_ask_only_for_what_is_exported(
    exported: dict[str, list[dict[str, str]]],
) -> None:
    for expression in expressions():
        for name, matchers in SELECTOR.findall(expression):
            assert name in exported, f"{name} is not exported; it stands in {expression}"
            for label, how, value in MATCHER.findall(matchers):
                if label in ("job", "instance"):
                    continue
                known = {labels.get(label) for labels in exported[name]}
                for word in value.split("|") if "~" in how else [value]:
                    assert word in known, f"{label}={word} is no label of {name}; it stands in {expression}"


def test_what_expressions_group_by_is_a_label(exported: dict[str, list[dict[str, str]]]) -> None:
    labels = {label for sets in exported.values() for one in sets for label in one}
    for expression in expressions():
        for names in re.findall(r"\b(?:by|without|ignoring|on)\s*\(([^)]*)\)", expression):
            used = {name.strip() for name in names.split(",")}
            assert used <= labels | {"alertname", "severity"}, expression


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_sentence_a_runbook_and_a_test_of_when_it_comes_and_when_not(
    rule: dict[str, Any],
) -> None:
    name = rule["alert"]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"].endswith(".")
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    sections = sections_of(ROOT / page)
    assert anchor == name.lower() and anchor in sections, f"{page} has no section {name}"
    section = sections[anchor]
    assert "`" in section and len(section) > 150, f"the section {name} does not say where to look"
    checks = [check for test in TESTS for check in test["alert_rule_test"] if check["alertname"] == name]
    assert any(check["exp_alerts"] for check in checks) and any(not check["exp_alerts"] for check in checks)


def test_every_runbook_section_is_of_an_alert() -> None:
    sections = sections_of(ROOT / "docs" / "operations.md")
    assert {name for name in sections if name.startswith("logweir")} == {r["alert"].lower() for r in RULES}


def sections_of(page: Path) -> dict[str, str]:
    """The third-level sections of a page by their anchor."""
    parts = re.split(r"^### (\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        title.lower(): re.split(r"^#", body, flags=re.MULTILINE)[0]
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_the_dashboard_is_one_that_grafana_can_show() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and DASHBOARD["uid"] == "logweir"
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["title"] and panel["targets"] and panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_promtool_finds_no_fault_in_the_rules_and_their_tests_pass(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here; it is in Debian's package prometheus")

    def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [promtool, *arguments], cwd=folder, capture_output=True, text=True, timeout=100, check=False
        )

    for arguments in (("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")):
        done = run(PROMETHEUS, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    asked = [
        target["expr"].replace("$__rate_interval", "1m") for panel in PANELS for target in panel["targets"]
    ]
    records = [{"record": f"asked:{n}", "expr": expr} for n, expr in enumerate(asked)]
    (tmp_path / "asked.yml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": records}]}))
    done = run(tmp_path, "check", "rules", "asked.yml")
    assert done.returncode == 0 and f"{len(asked)} rules found" in done.stdout, done.stdout + done.stderr
    # That the tests can fail: an alert that never comes is noticed, each by its own test.
    rules = (PROMETHEUS / "alerts.yml").read_text(encoding="utf-8")
    (tmp_path / "alerts.yml").write_text(re.sub(r"(?m)^        labels:", "        for: 30d\n        labels:", re.sub(r"(?m)^        for: .*\n", "", rules)))  # fmt: skip
    shutil.copy(PROMETHEUS / "alerts_test.yml", tmp_path)
    broken = run(tmp_path, "test", "rules", "alerts_test.yml")
    words = broken.stdout + broken.stderr
    missed = {rule["alert"] for rule in RULES if f"alertname: {rule['alert']}, time:" in words}
    assert broken.returncode == 1 and missed == {rule["alert"] for rule in RULES}
