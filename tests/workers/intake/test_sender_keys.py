"""Keys of senders: what Redis keeps of them, and what a request may do with one."""

import argparse
import base64
from datetime import timedelta

import pytest
import yaml
from command_line import Verb
from intake_process import Intake, running_intake

from pipeline.commands import flags
from pipeline.errors import BadInput
from pipeline.redis.connection import connect
from pipeline.service.access import keys as keys_module
from pipeline.service.access.keys import SenderKeys
from pipeline.service.access.snippets import SNIPPETS, snippet_lines, snippet_text
from pipeline.settings import Settings
from pipeline.settings.listeners import Listener
from pipeline.workers.intake.access import check_access
from pipeline.workers.intake.refusals import Refusal, RequestRefused
from pipeline.workers.intake.server import check_keys, check_listeners


def ring_of(settings: Settings) -> SenderKeys:
    return SenderKeys(connect(settings), settings)


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def allowed(settings: Settings, authorization: str | None = None, *, loopback: bool = True) -> str:
    """The name of the key that a request has, or why it is refused."""
    headers = {"host": "localhost"} | ({"authorization": authorization} if authorization else {})
    try:
        key = check_access(headers, ring_of(settings).lately(), host="127.0.0.1", loopback=loopback)
    except RequestRefused as refused:
        return refused.kind.value
    return key.name if key else "open"


def test_redis_keeps_no_key_that_would_open_the_door(settings: Settings) -> None:
    secret = ring_of(settings).add("web", workload="shop/web")
    stored = connect(settings).hgetall(ring_of(settings).key)
    assert stored and secret not in str(stored)


def test_a_key_is_taken_in_every_form_that_a_client_can_send(settings: Settings) -> None:
    secret = ring_of(settings).add("web")
    encoded = base64.b64encode(f"id:{secret}".encode()).decode()
    for text in (
        f"Bearer {secret}",
        f"bearer {secret}",
        f"Splunk {secret}",
        f"ApiKey {secret}",
        f"ApiKey {encoded}",
    ):
        assert allowed(settings, text) == "web"
    for pair in (("anybody", secret), (secret, ""), ("x", secret)):
        assert allowed(settings, basic(*pair)) == "web"


def test_one_key_closes_the_door_for_everybody_without_one(settings: Settings) -> None:
    assert allowed(settings) == "open"
    assert allowed(settings, loopback=False) == Refusal.KEY_MISSING
    ring_of(settings).add("web")
    assert allowed(settings) == Refusal.KEY_MISSING
    assert allowed(settings, "Bearer wrong") == allowed(settings, basic("a", "b")) == Refusal.KEY_WRONG
    assert allowed(settings, "Digest x") == allowed(settings, "Basic ") == Refusal.KEY_MISSING


def test_the_last_key_that_is_revoked_opens_it_for_this_machine_only(settings: Settings) -> None:
    ring = ring_of(settings)
    secret = ring.add("web")
    assert ring.revoke("web") and not ring.revoke("web")
    assert allowed(settings, f"Bearer {secret}", loopback=False) == Refusal.KEY_MISSING
    assert allowed(settings) == "open"


def test_names_and_numbers_of_keys_are_bounded(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = ring_of(settings)
    ring.add("web")
    with pytest.raises(BadInput, match="there is a key 'web' already"):
        ring.add("web")
    for name in ("", "a\nb", "x" * 61):
        with pytest.raises(BadInput, match="is no name of a key"):
            ring.add(name)
    monkeypatch.setattr(keys_module, "MAX_KEYS", 1)
    with pytest.raises(BadInput, match="the limit"):
        ring.add("other")


def test_a_listener_that_others_reach_needs_a_key_first(settings: Settings) -> None:
    exposed = [Listener.parse("http://127.0.0.1:4318"), Listener.parse("http://0.0.0.0:4318")]
    with pytest.raises(
        BadInput, match=r"at http://0\.0\.0\.0:4318 would take lines from everybody; make a key"
    ):
        check_keys(exposed, ring_of(settings))
    check_keys(exposed[:1], ring_of(settings))
    ring_of(settings).add("web")
    check_keys(exposed, ring_of(settings))


def test_an_intake_without_a_listener_is_refused() -> None:
    with pytest.raises(BadInput, match="has no listener"):
        check_listeners([])


def test_protocols_without_keys_are_open_where_their_listener_says_so(settings: Settings) -> None:
    check_keys([Listener.parse("syslog+udp://0.0.0.0"), Listener.parse("relp://0.0.0.0")], ring_of(settings))
    with pytest.raises(BadInput, match="would take lines from everybody"):
        check_keys([Listener.parse("grpc://0.0.0.0")], ring_of(settings))


@pytest.fixture(scope="module")
def keyed(intake: Intake) -> dict[str, str]:
    """A process with three keys: of any workload, of one, of some."""
    ring = ring_of(intake.settings)
    secrets = {
        "any": ring.add("any"),
        "one": ring.add("one", workload="fixed"),
        "some": ring.add("some", patterns=["shop/*"]),
    }
    return {name: f"Bearer {secret}" for name, secret in secrets.items()}


def test_each_protocol_says_in_its_own_words_that_a_key_is_missing_or_wrong(
    intake: Intake, keyed: dict[str, str]
) -> None:
    for path in ("/v1/logs", "/_bulk", "/loki/api/v1/push", "/lines", "/upload"):
        assert intake.ask(path, b"x").status == 401
        assert intake.ask(path, b"x", Authorization="Bearer wrong").status == 401
    assert "www-authenticate" in intake.ask("/_bulk", b"x").headers
    assert intake.ask("/services/collector", b"x").json == {"text": "Token is required", "code": 2}
    wrong = intake.ask("/services/collector", b"x", Authorization="Splunk wrong")
    assert (wrong.status, wrong.json["code"]) == (403, 4)
    assert intake.ask("/services/collector/ack", b'{"acks":[0]}').status == 401


def test_a_key_chooses_the_workload_or_bounds_it(intake: Intake, keyed: dict[str, str]) -> None:
    assert intake.ask("/lines?workload=a", b"x", Authorization=keyed["any"]).status == 200
    assert intake.ask("/lines?workload=b", b"x", Authorization=keyed["one"]).status == 200
    assert intake.ask("/lines?workload=shop/web", b"x", Authorization=keyed["some"]).status == 200
    refused = intake.ask("/lines?workload=till", b"x", Authorization=keyed["some"])
    assert (
        refused.status == 403
        and "the key 'some' may not send for the workload 'till'" in refused.json["error"]
    )
    # The process is shared, so other tests have workloads there too.
    assert {"a", "fixed", "shop/web"} <= intake.workloads()
    assert intake.workloads().isdisjoint({"b", "till"})


def test_the_same_declared_key_of_two_senders_is_two_requests(intake: Intake, keyed: dict[str, str]) -> None:
    for key in ("any", "one"):
        assert (
            intake.ask("/lines?workload=c", b"x", Authorization=keyed[key], Idempotency_Key="k").status == 200
        )
    assert intake.accepted("c") == 1


def test_keys_are_made_listed_and_revoked_by_a_verb(logweir: Verb, settings: Settings) -> None:
    made = logweir("keys", "add", "web", "--workload", "shop/web")
    secret = made.out.splitlines()[0]
    assert made.code == 0 and "from now on every request to the intake needs a key" in made.out
    assert allowed(settings, f"Bearer {secret}") == "web"
    logweir("keys", "add", "till", "--only", "shop/*")
    ring_of(settings).add("old", lasts=timedelta(0))
    shown = logweir("keys", "list").out
    assert shown.count("expired 20") == 1
    assert "all as shop/web" in shown and "shop/*" in shown and secret not in shown
    assert logweir("keys", "revoke", "web").code == 0
    again = logweir("keys", "revoke", "web")
    assert again.code == 2 and "there is no key 'web'" in again.err


def test_the_verb_intake_shows_addresses_and_whole_configurations(logweir: Verb, settings: Settings) -> None:
    shown = logweir("intake").out
    assert "lines come in at http://127.0.0.1:4318" in shown and "none is needed on this machine" in shown
    for keyed in (False, True):
        for name in SNIPPETS:
            text = logweir("intake", "--snippets", name).out
            assert "4318" in text and ("KEY" in text) is keyed and "{url}" not in text
        vector = yaml.safe_load(logweir("intake", "--snippets", "vector").out)["sinks"]["logweir"]
        assert vector["endpoints"] == ["http://127.0.0.1:4318/es"] and ("auth" in vector) is keyed
        (fluent,) = yaml.safe_load(logweir("intake", "--snippets", "fluent-bit").out)["pipeline"]["outputs"]
        assert (fluent["host"], fluent["port"], "http_passwd" in fluent) == ("127.0.0.1", 4318, keyed)
        if not keyed:
            ring_of(settings).add("web")


def test_rsyslog_is_shown_relp_where_there_is_a_listener_for_it() -> None:
    urls = ["http://127.0.0.1:4318", "relp://127.0.0.1:2514"]
    assert 'type="omrelp" target="127.0.0.1" port="2514"' in snippet_text("rsyslog", urls, keyed=True)
    assert "omelasticsearch" in snippet_text("rsyslog", urls[:1], keyed=False)
    assert dict(snippet_lines(urls))["rsyslog"].startswith('action(type="omrelp"')
    assert snippet_lines(urls[1:]) == []


def test_the_flag_names_the_shippers_that_there_are() -> None:
    parser = argparse.ArgumentParser()
    flags.intake(parser)
    (snippets,) = (action for action in parser._actions if action.dest == "snippets")
    assert snippets.choices == tuple(SNIPPETS)


def test_a_key_of_a_model_has_a_tenant_and_no_other_key_has_one(settings: Settings) -> None:
    ring = ring_of(settings)
    ring.add("plain")
    ring.add("own", scopes=("infer",))
    ring.add("theirs", scopes=("infer", "read"), tenant="research")
    assert {key.name: key.tenant for key in ring.look()} == {
        "plain": "",
        "own": "logweir",
        "theirs": "research",
    }
    for scopes, tenant in ((("read",), "research"), (("infer",), "a tenant")):
        with pytest.raises(BadInput, match="with the scope infer"):
            ring.add("wrong", scopes=scopes, tenant=tenant)


def test_a_process_off_loopback_without_a_key_ends_with_one_sentence(settings: Settings) -> None:
    with running_intake(settings, start=False) as intake, pytest.raises(AssertionError) as caught:
        intake.start(LOGWEIR_INTAKE="http://0.0.0.0:0")
    assert "would take lines from everybody" in str(caught.value) and "Traceback" not in str(caught.value)
