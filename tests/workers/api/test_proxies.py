"""A proxy in front of the console says who somebody is; nobody else can."""

import os
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from api_process import Console, console
from intake_process import free_port
from polling import wait_until
from starlette.datastructures import Headers

from pipeline.errors import BadSetting
from pipeline.redis.keys import Keys
from pipeline.service.access.keys import SenderKeys
from pipeline.settings import Settings
from pipeline.settings.listeners import Listener
from pipeline.settings.proxies import parse_proxies
from pipeline.workers.api.access import Asker, Doorkeeper
from pipeline.workers.api.problems import AskRefused

PAIR = "user: Remote-User, groups: Remote-Groups"
FORWARDED = "user: X-Forwarded-User, groups: X-Forwarded-Groups"
TOKEN = re.compile(rb'name="token" value="([0-9a-f]{32})"')


def test_networks_and_roles_are_read() -> None:
    found = parse_proxies(PAIR + ", 10.1.0.0/16, fd00::5, *=read, sre=operate,the=team=admin")
    assert (found.user, found.groups) == ("Remote-User", "Remote-Groups")
    assert [found.trusts(a) for a in ("10.1.2.3", "::ffff:10.1.2.3", "10.2.0.1", "fd00::5", "no address")] == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert [found.scope_of(groups) for groups in ([], ["x"], ["sre"], ["sre", "the=team"])] == [
        "read", "read", "operate", "admin",
    ]  # fmt: skip
    assert parse_proxies("10.0.0.1, user:Remote-User").scope_of([]) == "read"
    assert parse_proxies(f"10.0.0.1, sre=read, {PAIR}").scope_of([]) is None
    assert not parse_proxies("").trusts("127.0.0.1")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ten", "'ten'"),
        ("10.0.0.1/8", "'10.0.0.1/8'"),
        ("10.0.0.1, a=send", "'a=send'"),
        ("sre=read", "no network"),
    ],
)
def test_wrong_ones_are_named(text: str, named: str) -> None:
    with pytest.raises(BadSetting, match=named):
        Settings(api_proxies=f"{PAIR}, {text}")


@pytest.mark.parametrize(
    "headers", ["*=read", "groups: Remote-Groups", "user: Remote User", "users: Remote-User"]
)
def test_a_proxy_without_the_header_of_its_users_is_refused(headers: str) -> None:
    with pytest.raises(BadSetting, match="user: Remote-User, groups: Remote-Groups"):
        Settings(api_proxies=f"10.0.0.1, {headers}")


@pytest.mark.parametrize(
    "forged",
    [
        {"X-Forwarded-User": "ann", "X-Auth-Request-User": "ann", "X-Forwarded-Email": "ann"},
        {"X-Forwarded-Groups": "sre", "X-Auth-Request-Groups": "sre", "Groups": "sre"},
    ],
)
def test_headers_that_the_proxy_does_not_set_count_for_nothing(
    settings: Settings, client: "redis.Redis", forged: dict[str, str]
) -> None:
    door = Doorkeeper(
        keys=SenderKeys(client, settings),
        listener=Listener.parse("http://127.0.0.1:4380", setting="api"),
        proxies=parse_proxies(f"127.0.0.1,staff=read,sre=admin,{PAIR}"),
    )

    def named(*headers: tuple[str, str]) -> Asker | None:
        raw = [(name.lower().encode(), value.encode()) for name, value in headers]
        request: Any = SimpleNamespace(client=SimpleNamespace(host="127.0.0.1"), headers=Headers(raw=raw))
        return door.proxied(request)

    own = [("Remote-User", "bob"), ("Remote-Groups", "staff")]
    honest, other = named(*own), named(*own, *forged.items())
    assert honest is not None and other is not None
    assert (other.name, other.key.scopes) == (honest.name, honest.key.scopes) == ("bob", ("read",))
    assert named(*forged.items()) is None
    for twice in (("Remote-Groups", "sre"), ("Remote-User", "ann")):
        with pytest.raises(AskRefused, match="comes twice"):
            named(*own, twice)


@pytest.fixture
def trusting(settings: Settings) -> Iterator[Console]:
    with console(settings, LOGWEIR_API_PROXIES=f"127.0.0.0/8,staff=read,sre=mark,{FORWARDED}") as found:
        yield found


@pytest.mark.long
def test_a_trusted_proxy_names_the_user_and_the_groups(trusting: Console, client: "redis.Redis") -> None:
    status, headers, body = trusting.ask(
        "/", X_Forwarded_User="ann", X_Forwarded_Groups="sre,staff", Host="logs.example"
    )
    assert (status, b"signed in as ann" in body) == (200, True)
    cookie = headers["set-cookie"].partition(";")[0]
    assert "httponly" in headers["set-cookie"].lower()
    assert "samesite=strict" in headers["set-cookie"].lower()
    # A form needs the token of this browser, and the origin of the public name.
    _, _, page = trusting.ask(
        "/", X_Forwarded_User="ann", X_Forwarded_Groups="sre", Host="logs.example", Cookie=cookie
    )
    token = TOKEN.search(page)
    assert token is not None
    form = {"token": token[1].decode(), "state": "normal", "pattern": "T1"}
    who = {
        "X_Forwarded_User": "ann",
        "Host": "logs.example",
        "Cookie": cookie,
        "Origin": "http://logs.example",
    }
    refused, _, _ = trusting.ask("/do/mark", "POST", form, **who, X_Forwarded_Groups="staff")
    other, _, _ = trusting.ask(
        "/do/mark", "POST", form, **{**who, "Origin": "http://evil.example"}, X_Forwarded_Groups="sre"
    )
    strange, _, _ = trusting.ask(
        "/do/mark", "POST", {**form, "token": "0" * 32}, **who, X_Forwarded_Groups="sre"
    )
    assert (refused, other, strange) == (403, 403, 403)
    taken, _, body = trusting.ask("/do/mark", "POST", form, **who, X_Forwarded_Groups="sre")
    assert taken in (400, 404), body  # there is no T1; the form itself was taken
    nobody, _, body = trusting.ask("/", X_Forwarded_User="bob", X_Forwarded_Groups="guests")
    assert (nobody, b"api_proxies" in body) == (403, True)
    without, headers, _ = trusting.ask("/")
    assert (without, headers["location"]) == (303, "/in")
    # REST wants keys, whoever stands in front.
    rest, _, _ = trusting.ask("/api/v1/status", X_Forwarded_User="ann", X_Forwarded_Groups="sre")
    assert rest == 401


@pytest.mark.long
def test_nobody_else_names_a_user(settings: Settings, client: "redis.Redis") -> None:
    from pipeline.service.access.own_key import make_own_key

    settings.data.dir.mkdir(parents=True, exist_ok=True)
    make_own_key(settings.data.dir)
    with console(settings, LOGWEIR_API_PROXIES=f"10.0.0.0/8,*=admin,{FORWARDED}") as found:
        for forged in ({}, {"X_Forwarded_For": "10.0.0.1"}, {"Forwarded": "for=10.0.0.1"}):
            status, _, _ = found.ask("/", X_Forwarded_User="ann", **forged)
            assert status == 303
        status, _, _ = found.ask("/", Host="logs.example", X_Forwarded_User="ann")
        assert status == 421
    assert not list(client.scan_iter(Keys(settings.redis.key_prefix).console_session("*")))


@pytest.mark.long
def test_the_recipe_for_caddy_works(trusting: Console, tmp_path: Path) -> None:
    caddy = shutil.which("caddy")
    if caddy is None:
        pytest.skip("needs caddy")
    port = free_port()
    hashed = subprocess.run(
        [caddy, "hash-password", "--plaintext", "secret"], capture_output=True, text=True, check=True
    ).stdout.strip()
    page = (Path(__file__).resolve().parents[3] / "docs" / "console.md").read_text(encoding="utf-8")
    recipe = re.search(r"```caddy\n(.*?)```", page, re.DOTALL)
    assert recipe is not None
    config = (
        recipe[1]
        .replace("logs.example.com", f"http://127.0.0.1:{port}")
        .replace("HASH", hashed)
        .replace("127.0.0.1:4380", f"127.0.0.1:{trusting.port}")
    )
    path = tmp_path / "Caddyfile"
    path.write_text("{\n admin off\n}\n" + config)
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    with subprocess.Popen(
        [caddy, "run", "--config", path, "--adapter", "caddyfile"], env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            front = Console(trusting.settings, port)

            def status(**headers: str) -> int:
                try:
                    return front.ask("/", **headers)[0]
                except OSError:
                    return 0

            assert wait_until(lambda: status() == 401, timeout_s=20)
            basic = "Basic " + b64encode(b"ann:secret").decode()
            code, _, body = front.ask(
                "/", Authorization=basic, X_Forwarded_User="root", X_Forwarded_Groups="nobody"
            )
            assert (code, b"signed in as ann" in body) == (200, True)
        finally:
            process.terminate()
