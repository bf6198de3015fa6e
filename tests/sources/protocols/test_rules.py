"""Rules of a user that name workloads, in every protocol."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from pipeline.errors import BadSetting
from pipeline.sources.protocols import bulk, hec, journal, lines, loki, otlp_json
from pipeline.sources.protocols.contract import Decoded, Hints
from pipeline.sources.protocols.rules import FILTERS, WorkloadRules, read_rules
from pipeline.sources.protocols.streams import forward
from pipeline.sources.protocols.streams.syslog import syslog_records

ROOT = Path(__file__).resolve().parents[3]
Read = Callable[[str], WorkloadRules]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(text: str) -> WorkloadRules:
        path = tmp_path / "workloads.toml"
        path.write_text(text)
        return read_rules(path)

    return read


def name_of(rules: WorkloadRules, **hints: str) -> str:
    named = {hint.replace("label_", "label."): value for hint, value in hints.items()}
    return rules.named(lambda hint: named.get(hint, ""), "default")


TWO = """
[[rule]]
when = { namespace = ["kube-*", "monitoring"] }
workload = "platform/{namespace}"
[[rule]]
when.protocol = "loki"
when.label.tier = "?[ab]"
workload = "{label.team}/{app}"
"""


@pytest.mark.parametrize(
    ("hints", "workload"),
    [
        ({"namespace": "kube-system"}, "platform/kube-system"),
        ({"namespace": "monitoring", "app": "x"}, "platform/monitoring"),
        ({"namespace": "my-kube-x"}, "default"),
        ({"protocol": "loki", "label_tier": "1a", "label_team": "till", "app": "cart"}, "till/cart"),
        ({"protocol": "loki", "label_tier": "1c", "label_team": "till", "app": "cart"}, "default"),
        ({"protocol": "otlp", "label_tier": "1a", "label_team": "till", "app": "cart"}, "default"),
        ({"protocol": "loki", "label_tier": "1a", "label_team": "till"}, "default"),
        ({}, "default"),
    ],
)
def test_the_first_rule_whose_conditions_and_hints_are_there_names_the_workload(
    read: Read, hints: dict[str, str], workload: str
) -> None:
    rules = read(TWO)
    for _ in range(2):  # the second time it is remembered
        assert name_of(rules, **hints) == workload


def test_a_star_wants_a_value_and_an_empty_text_wants_none(read: Read) -> None:
    some = read("[[rule]]\nwhen = { pod = '*' }\nworkload = 'pods'")
    none = read("[[rule]]\nwhen = { pod = ['', 'x'] }\nworkload = 'machines'")
    assert [name_of(some), name_of(some, pod="a")] == ["default", "pods"]
    assert [name_of(none), name_of(none, pod="x"), name_of(none, pod="a")] == [
        "machines",
        "machines",
        "default",
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "controller",
            {
                "cart-7f9c5d8b6-x2x8k": "cart",
                "cart-api-68d4f7bb5c-zqvxs": "cart-api",
                "node-exporter-x2x8k": "node-exporter",
                "db-0": "db",
                "backup-28401120-h7xkq": "backup",
                "nightly": "nightly",
                "my-kafka": "my-kafka",
                "-0": "-0",
            },
        ),
        ("undated", {"app-2026.11.20": "app", "logs-000001": "logs", "app": "app"}),
        ("short", {"web-17.shop.example": "web-17", "web": "web", "192.0.2.7": "192.0.2.7", "fe80::1": "fe80::1"}),
        ("unnumbered", {"web-17": "web", "web17": "web", "web": "web"}),
    ],
)  # fmt: skip
def test_a_filter_takes_what_changes_out_of_a_name(name: str, values: dict[str, str]) -> None:
    assert {value: FILTERS[name][0](value) for value in values} == values


def test_filters_follow_one_another_and_a_value_that_they_leave_empty_passes_the_rule_over(
    read: Read,
) -> None:
    rules = read("[[rule]]\nworkload = '{ host | short|unnumbered }'")
    assert name_of(rules, host="web-17.shop.example") == "web"
    assert name_of(rules, host="17.shop.example") == "default"


def test_a_name_is_made_printable_and_is_never_too_long(read: Read) -> None:
    rules = read("[[rule]]\nworkload = '{app}/{pod}'")
    assert name_of(rules, app="a\nb", pod="c") == "a_b/c"
    assert len(name_of(rules, app="a" * 5_000, pod="c")) <= 200


def test_a_set_of_hints_is_looked_at_once(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = read(TWO)
    asked: list[int] = []
    ruling = WorkloadRules.ruling
    monkeypatch.setattr(WorkloadRules, "ruling", lambda *a: (asked.append(1), ruling(*a))[1])
    for _ in range(3):
        for app in ("cart", "till"):
            # `pod` is in no rule, so it makes no other set.
            for pod in ("a", "b"):
                name_of(rules, protocol="loki", app=app, pod=pod)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rule = 1", "Expected `array`, got `int`"),
        ("", "missing required field `rule`"),
        ("[[rule", "are no TOML"),
        ("x = 1\n[[rule]]\nworkload='a'", "unknown field `x`"),
        ("[[rule]]\nworkload = 'a'\nif = 1", "unknown field `if` - at `$.rule[0]`"),
        ("[[rule]]\nwhen = {namspace = 'x'}\nworkload = 'a'", "unknown hint 'namspace'; did you mean 'namespace'?"),
        ("[[rule]]\nworkload = '{label.}'", "unknown hint 'label.'"),
        ("[[rule]]\nworkload = '{pod|contoller}'", "unknown filter 'contoller'; known are controller,"),
        ("[[rule]]\nworkload = '{pod'", "'{pod' with a single brace"),
        ("[[rule]]\nworkload = ''", "length >= 1 - at `$.rule[0].workload`"),
        ("[[rule]]\nworkload = 7", "Expected `str`, got `int` - at `$.rule[0].workload`"),
        ("[[rule]]\nwhen = {pod = 7}\nworkload = 'a'", "wants pod to be 7"),
        ("[[rule]]\nwhen = {pod = []}\nworkload = 'a'", "has no text for pod"),
        ("[[rule]]\nwhen = 'x'\nworkload = 'a'", "Expected `object`, got `str` - at `$.rule[0].when`"),
        ("[[rule]]\nname = 1\nworkload = 'a'", "Expected `str`, got `int` - at `$.rule[0].name`"),
        ("[[rule]]\nworkload = 'a'\n[[rule]]\nworkload = 'b'", "rule 2 of {path} is never asked"),
        (f"[[rule]]\nworkload = '{'a' * 300}'", "300 characters; use at most 200"),
        ("[[rule]]\nwhen.pod='x'\nworkload = 'a'\n" * 1_001, "length <= 1000 - at `$.rule`"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_one_sentence_with_the_value_and_the_remedy(
    read: Read, tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(BadSetting) as error:
        read(text)
    assert said.replace("{path}", str(tmp_path / "workloads.toml")) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_shipped_example_is_sound() -> None:
    rules = read_rules(ROOT / "config" / "workloads.toml")
    assert name_of(rules, host="web-3.shop.example", program="nginx") == "shop/web/nginx"
    assert name_of(rules, protocol="bulk", index="legacy-app-2026.11.20") == "legacy/legacy-app"


def documents(*found: dict[str, Any], index: str = "app") -> bytes:
    return "".join(f'{{"create":{{"_index":"{index}"}}}}\n{json.dumps(one)}\n' for one in found).encode()


def attributes(found: dict[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in found.items()]


def otlp_body(**resource: str) -> bytes:
    named = {key.replace("_", "."): value for key, value in resource.items()}
    record = {"body": {"stringValue": "x"}}
    logs = {"resource": {"attributes": attributes(named)}, "scopeLogs": [{"logRecords": [record]}]}
    return json.dumps({"resourceLogs": [logs]}).encode()


POD = {
    "namespace_name": "shop",
    "pod_name": "cart-7f9c5d8b6-x2x8k",
    "labels": {"team": "till", "app": "cart"},
}
SYSLOG = b"<13>1 2026-11-20T10:00:00.003Z web-1.shop.example nginx - - - x"
ENTRY = b"_HOSTNAME=h1\nSYSLOG_IDENTIFIER=sshd\n_SYSTEMD_UNIT=ssh.service\nMESSAGE=x\n\n"
PUSH = json.dumps({"streams": [{"stream": {"app": "cart", "team": "till"}, "values": [["1", "x"]]}]}).encode()
EVENTS = json.dumps(
    {"index": "main", "host": "h1", "fields": {"team": "till"}, "event": {"a": {"b": 7}}}
).encode()
FORWARD = msgpack.packb(["kube.cart", [[1_795_168_800, {"log": "x", "kubernetes": POD}]]])


def of_forward(body: bytes, hints: Hints) -> Decoded:
    messages = map(forward.forward_message, forward.ForwardFraming().feed(body))
    return forward.forward_records([(m.tag, forward.forward_lines(m)) for m in messages if m], hints)


def of_syslog(body: bytes, hints: Hints) -> Decoded:
    return syslog_records([(body, "192.0.2.7")], hints)


@pytest.mark.parametrize(
    ("decode", "body", "template", "workload"),
    [
        (otlp_json.decode_json, otlp_body(k8s_namespace_name="shop", k8s_pod_name="cart-0"), "{namespace}/{pod|controller}", "shop/cart"),
        (otlp_json.decode_json, otlp_body(k8s_deployment_name="cart", k8s_pod_label_team="till"), "{label.team}/{app}", "till/cart"),
        (otlp_json.decode_json, otlp_body(service_name="cart"), "prod/{workload}", "prod/cart"),
        (otlp_json.decode_json, otlp_body(deployment_environment="prod"), "{label.deployment.environment}", "prod"),
        (bulk.decode_bulk, documents({"kubernetes": POD}), "{label.team}/{app}", "till/cart"),
        (bulk.decode_bulk, documents({"kubernetes": POD}), "{namespace}/{pod|controller}", "shop/cart"),
        (bulk.decode_bulk, documents({"log": {"file": {"path": "/x.log"}}}), "{label.log.file.path}", "/x.log"),
        (bulk.decode_bulk, documents({"a.b": {"c": True}}), "{label.a.b.c}", "true"),
        (bulk.decode_bulk, documents({}, index="app-2026.11.20"), "old/{index|undated}", "old/app"),
        (lines.decode_posted, b'{"message":"x","host":"h1","program":"cron"}', "{host}+{program}", "h1+cron"),
        (lines.decode_posted, b"x", "{protocol}/{key}/{peer}", "lines/web/127.0.0.1"),
        (loki.decode_push, PUSH, "{label.team}/{app}", "till/cart"),
        (hec.decode_events, EVENTS, "{index}/{host}/{label.team}/{label.a.b}", "main/h1/till/7"),
        (journal.decode_journal, ENTRY, "{host}/{program}/{label._SYSTEMD_UNIT}", "h1/sshd/ssh.service"),
        (of_syslog, SYSLOG, "{peer}/{host|short|unnumbered}/{program}", "192.0.2.7/web/nginx"),
        (of_forward, FORWARD, "{index}/{label.team}", "kube.cart/till"),
    ],
)  # fmt: skip
def test_every_protocol_gives_its_hints(
    read: Read, decode: Callable[[bytes, Hints], Decoded], body: bytes, template: str, workload: str
) -> None:
    rules = read(f"[[rule]]\nworkload = '{template}'")
    hints = Hints(content_type="application/json", protocol="lines", key="web", peer="127.0.0.1", rules=rules)
    assert decode(body, hints).records.workloads == [workload]


@pytest.mark.parametrize(
    ("decode", "body"),
    [
        (otlp_json.decode_json, otlp_body(service_name="cart")),
        (bulk.decode_bulk, documents({})),
        (lines.decode_posted, b"x"),
        (loki.decode_push, PUSH),
        (hec.decode_events, EVENTS),
        (hec.decode_raw, b"x"),
        (journal.decode_journal, ENTRY),
    ],
)
def test_a_workload_that_the_sender_chose_comes_before_all_rules(
    read: Read, decode: Callable[[bytes, Hints], Decoded], body: bytes
) -> None:
    rules = read("[[rule]]\nworkload = 'all'")
    hints = Hints(content_type="application/json", workload="chosen", rules=rules)
    assert decode(body, hints).records.workloads == ["chosen"]
    assert decode(body, Hints(content_type="application/json", rules=rules)).records.workloads == ["all"]
