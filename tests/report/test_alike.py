"""Templates that are one to a reader: they differ in user agent, referrer or address alone."""

import time

import pytest

from pipeline.report.alike import common_form, request_alone

NGINX = 'connect() failed (<NUM>: Connection refused), client: <IP>, server: a.example, host: "a.example"'


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (NGINX, NGINX + ', referrer: "<URL>"'),
        (NGINX, NGINX.replace("client: <IP>", "client: unix:")),
        (
            '"GET <PATH> HTTP/1.1" 502 <NUM> "-" "okhttp/<NUM>"',
            '"GET <PATH> HTTP/1.1" 502 <NUM> "<URL>" "Mozi',
        ),
        ('"GET <PATH> HTTP/1.1" 502 <NUM> "-" <*>', '"GET <PATH> HTTP/1.1" 502 <NUM> <*> "curl/<NUM>"'),
        ("no answer from <IP>:<NUM>", "no answer from <IP>"),
        ("failed remote_addr=<IP> code=<NUM>", "failed remote_addr=- code=<NUM>"),
        ('{"user_agent": "a b", "e": "x"}', '{"user_agent": "c", "e": "x"}'),
    ],
)
def test_who_asked_makes_no_second_finding(one: str, other: str) -> None:
    assert common_form(one, []) == common_form(other, [])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('"GET <PATH> HTTP/1.1" 502 <NUM> "-" "a"', '"GET <PATH> HTTP/1.1" 500 <NUM> "-" "a"'),
        ('"GET /a HTTP/1.1" 502 <NUM> "-" "a"', '"GET /b HTTP/1.1" 502 <NUM> "-" "a"'),
        ('"GET /a HTTP/1.1" 502 <NUM> "-" "a" upstream=x', '"GET /a HTTP/1.1" 502 <NUM> "-" "a" upstream=y'),
        ('relation "orders" does not exist', 'relation "users" does not exist'),
        ("the client left", "the server left"),
    ],
)
def test_what_happened_does(one: str, other: str) -> None:
    assert common_form(one, []) != common_form(other, [])


def test_a_status_under_a_wildcard_is_taken_from_the_lines() -> None:
    template = '"GET <PATH> HTTP/1.1" <*> <NUM> "-" "a"'
    lines = [f'"GET /a HTTP/1.1" {status} 12 "-" "a"' for status in (500, 502)]
    assert common_form(template, lines[:1]) != common_form(template, lines[1:])


def test_a_finding_of_an_access_log_is_shown_as_its_request_and_status() -> None:
    template = '"POST <PATH> HTTP/1.1" <*> <NUM> <*> "Mozilla/<NUM> (X11)"'
    assert request_alone(template, "502") == '"POST <PATH> HTTP/1.1" 502 …'
    assert request_alone(template, "") == "" and request_alone("no request", "502") == ""


@pytest.mark.parametrize(
    "piece", ['"', " ", '"A HTTP/', "client: ", "<", "\\", ", ", "client", '"GET HTTP/" 1 1 ']
)
def test_no_line_takes_long(piece: str) -> None:
    began = time.monotonic()
    common_form(piece * (100_000 // len(piece)), [piece * 4_000])
    assert time.monotonic() - began < 2
