"""The whole stack as an ACL user over TLS, with secrets of odd characters: it works, and no secret is seen
anywhere."""

import base64
import stat
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
from tls_redis import Certificates, tls_door

from e2e.harness import marked, ordinary, running, until
from tests.redis.test_hostile_redis import PASSWORD, allow, documented_line, server, socket_of

# What every form of the secrets holds, quoted, escaped or not.
MARKS = ("s3cret", "fl0wer", "0pensearch")
FLOWER = "eve:fl0wer%/?#@:&'"


def leaks(text: str) -> list[str]:
    return [mark for mark in MARKS if mark in text]


def page(url: str, login: str) -> str:
    request = urllib.request.Request(
        url, headers={"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return str(answer.read().decode())


def test_a_stack_works_as_the_documented_user_over_tls_and_shows_no_secret(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path)
    with server(tmp_path) as client:
        allow(client, documented_line())
        # Nobody else may do anything, so that whoever forgets to log in is seen.
        client.execute_command("ACL", "SETUSER", "watcher", "on", ">w", "~*", "&*", "+@all")
        with tls_door(socket_of(client), made) as port:
            login = f"logweir:{quote(PASSWORD, safe='')}"
            env = {
                "REDIS_URL": f"rediss://{login}@localhost:{port}/0?ssl_ca_certs={made.ca}",
                "LOGWEIR_FLOWER": "yes",
                "LOGWEIR_FLOWER_PORT": "5655",
                "FLOWER_BASIC_AUTH": FLOWER,
                "LOGWEIR_INTERNAL_CLAIM_TTL_MS": "10000",
            }
            client.auth("w", "watcher")
            client.execute_command("ACL", "SETUSER", "default", "off")
            with running(env) as up:
                sent = up.logweir("send", up.write(ordinary(50)), "--workload", "w", "--wait", "--json")
                assert sent.returncode == 0, sent.stderr
                said = {"send": sent.stdout + sent.stderr}
                flower = str(up.status()["flower"])
                broker = until(lambda: _maybe(flower + "/broker", FLOWER), what="Flower shows the broker")
                assert "ingest" in broker and "Unable to get queue information" not in broker
                said |= {"flower": broker + page(flower + "/workers", FLOWER)}
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    page(flower + "/", "eve:wrong")
                for verb in (
                    ("status",),
                    ("status", "--json"),
                    ("doctor",),
                    ("doctor", "--json"),
                    ("gpu", "top", "--json"),
                ):
                    done = up.logweir(
                        *verb,
                        OPENSEARCH_URL="http://u:0pensearch@127.0.0.1:1",
                        LOGWEIR_OPENSEARCH_PASSWORD="0pensearch",
                    )
                    said[" ".join(verb)] = done.stdout + done.stderr
                wrong = up.logweir(
                    "status", REDIS_URL=env["REDIS_URL"].replace("logweir:", "logweir:s3cret-and-")
                )
                assert "refuses the login" in wrong.stderr
                said["wrong password"] = wrong.stdout + wrong.stderr
                commands = [" ".join(process.cmdline()) for process in marked(up.mark)]
                assert len(commands) > 5
                assert not [c for c in commands if leaks(c)]
                assert stat.S_IMODE((up.data / "stack.json").stat().st_mode) == 0o600
                # The user loses its rights while the stack works: what it says of failing logins is looked at
                # too.
                allow(client, documented_line(), password="another")
                client.execute_command("CLIENT", "KILL", "USER", "logweir")
                logs = up.data / "logs"
                until(
                    lambda: (
                        "annot connect to rediss"
                        in "".join(p.read_text(errors="replace") for p in logs.iterdir())
                    ),
                    what="workers tell that they cannot log in",
                )
                allow(client, documented_line())
                up.stop(within_s=60)
                said |= {p.name: p.read_text(errors="replace") for p in logs.iterdir()}
                said |= {"err": up.err(), "out": (up.folder / "out").read_text()}
                assert {name: leaks(text) for name, text in said.items() if leaks(text)} == {}


def _maybe(url: str, login: str) -> str:
    try:
        return page(url, login)
    except OSError:
        return ""
