"""`logweir intake --explain`: it needs no running stack."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Verb, command_line

from pipeline.settings import Settings

RULES = """
[[rule]]
name = "by labels"
workload = "{label.team}/{app}"
[[rule]]
when = { pod = "*" }
workload = "{namespace}/{pod|controller}"
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return path


@pytest.fixture
def verb(
    rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Verb]:
    settings = Settings(data_dir=tmp_path / "data", workload_rules=rules)
    with command_line(settings, monkeypatch, capsys, "intake", columns=200) as run:
        yield run


def stdin(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(body)))


def test_an_example_says_which_rule_names_it_and_why_others_do_not(verb: Verb, rules: Path) -> None:
    said = verb("--explain", "namespace=shop", "pod=cart-7f9c5d8b6-x2x8k")
    assert said.code == 0
    assert said.out.splitlines() == [
        f"2 rules in {rules}",
        "namespace=shop, pod=cart-7f9c5d8b6-x2x8k",
        "  rule 1 (by labels) does not apply: label.team has no value",
        "  rule 2 names the workload shop/cart",
    ]


def test_where_no_rule_applies_the_name_of_the_protocol_stays(verb: Verb) -> None:
    assert "  no rule applies, so the workload is web-1/sshd" in verb("--explain", "workload=web-1/sshd").out
    assert "  no rule applies, so the name that the protocol gives stays" in verb("--explain", "host=a").out


def test_the_request_of_a_sender_is_explained_by_its_sets_of_hints(
    verb: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        {"message": f"x {n}", "app": "cart", "kubernetes": {"labels": {"team": "till"}}} for n in range(3)
    ]
    stdin(monkeypatch, "\n".join(map(json.dumps, [*lines, {"message": "y"}])).encode())
    said = verb("--explain", "protocol=lines", "key=web", "-", "--json")
    first, second = json.loads(said.out)
    assert (first["rule"], first["name"], first["workload"], first["records"]) == (
        1,
        "by labels",
        "till/cart",
        3,
    )
    assert first["hints"] == {
        "protocol": "lines",
        "key": "web",
        "peer": "127.0.0.1",
        "workload": "cart",
        "app": "cart",
        "label.team": "till",
    }
    assert (second["rule"], second["workload"], second["passed"]) == (
        None,
        "unknown",
        ["label.team has no value", "pod has no value"],
    )


@pytest.mark.parametrize(
    "protocol", ["otlp", "bulk", "loki", "hec", "lines", "journal", "syslog", "relp", "forward"]
)
def test_a_request_of_every_protocol_is_decoded(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    bodies = {
        "otlp": b'{"resourceLogs":[{"scopeLogs":[{"logRecords":[{"body":{"stringValue":"x"}}]}]}]}',
        "bulk": b'{"create":{}}\n{"message":"x"}\n',
        "loki": b'{"streams":[{"stream":{"app":"x"},"values":[["1","x"]]}]}',
        "hec": b'{"event":"x"}',
        "journal": b"MESSAGE=x\n\n",
        "forward": b"\x92\xa1t\x91\x92\x01\x81\xa3log\xa1x",
    }
    stdin(monkeypatch, bodies.get(protocol, b"x\n"))
    said = verb("--explain", f"protocol={protocol}", "-")
    assert said.code == 0, said.err
    assert f"protocol={protocol}, peer=127.0.0.1, workload=" in said.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--explain", "namspace=x"), "unknown hint 'namspace'; did you mean 'namespace'?"),
        (("--explain", "namespace"), "'namespace' is no hint with its value; write it as namespace=shop"),
        (("--explain", "-"), "the protocol is missing; beside - write protocol= and one of otlp,"),
        (("--explain", "-", "protocol=kafka"), "the protocol 'kafka' is unknown"),
        (("--explain", "-", "protocol=bulk"), "holds no record"),
        (("--explain", "-", "protocol=bulk", "app=x"), "app comes from the request"),
        (("--explain", "app=x", "--rules", "/nowhere"), "/nowhere cannot be read (No such file or directory)"),
        (("--rules", "/nowhere"), "--rules belongs to --explain"),
    ],
)  # fmt: skip
def test_a_wrong_example_is_one_sentence(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    stdin(monkeypatch, b"")
    ended = verb(*arguments)
    assert ended.code == 2
    assert said in ended.err


def test_other_rules_can_be_tried_before_they_are_set(verb: Verb, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[[rule]]\nworkload = 'all'")
    assert "rule 1 names the workload all" in verb("--explain", "pod=x", "--rules", other).out
    other.write_text("[[rule]]\nworkload = '{pods}'")
    wrong = verb("--explain", "pod=x", "--rules", other)
    assert (wrong.code, wrong.err) == (
        2,
        f"logweir: rule 1 of {other} has the unknown hint 'pods'; did you mean 'pod'?\n",
    )


def test_without_rules_it_says_so(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGWEIR_WORKLOAD_RULES", "")
    assert "no rule: workload_rules is not set" in verb("--explain", "pod=x").out
