"""Values as the pages of the console show them, and its small charts."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fastapi import Request
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as some

from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.service.values import Line
from pipeline.workers.api.answering import check_parameters, parameters_of
from pipeline.workers.api.app import specified_app
from pipeline.workers.api.console import words
from pipeline.workers.api.console.app import ROUTERS, install_console, router
from pipeline.workers.api.console.asks import span_of
from pipeline.workers.api.console.charts import HEIGHT, CauseLane, bars, lane
from pipeline.workers.api.console.doors import of_page
from pipeline.workers.api.console.rates import whole_cells
from pipeline.workers.api.console.views import console_templates, link, static_url

AT = datetime(2026, 11, 20, 9, 30, tzinfo=UTC)
OBEYED = "\x1b\u202e\u2066\x07\x00\x85\u200b"


def line(**changes: object) -> Line:
    known = dict.fromkeys(Line.__slots__) | {
        "record_id": "a-1", "timestamp": AT, "workload": "shop/web", "message": "disk full", "fields": {},
        "level": "error", "anomalous": True, "score": 0.97, "p_value": 0.0004, "reasons": ["unlikely-tokens:full"],
    }  # fmt: skip
    return Line(**known | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (words.number(None), "–"), (words.number(0), "0"), (words.number(1_234), "1,234"),
        (words.number(2_100_000), "2.1 M"), (words.number(12_345_678), "12 M"),
        (words.share(None), "–"), (words.share(0), "0 %"), (words.share(0.004), "<1 %"), (words.share(0.12), "12 %"),
        (words.score(None), "warming"), (words.score(0.934), "0.93"),
        (words.bytes_size(None), "–"), (words.bytes_size(512), "512 B"), (words.bytes_size(3 << 30), "3.0 GiB"),
        (words.times(1.0), "="), (words.times(3.2), "3.2×"), (words.times(0.25), "÷4.0"), (words.times(120), "120×"),
        (words.length_of(40), "40 s"), (words.length_of(200), "3 min"), (words.length_of(7_200), "2 h"),
        (words.length_of(4 * 86_400), "4 d"), (words.ago(None), "–"),
        (words.iso_time(AT), "2026-11-20T09:30:00.000Z"), (words.level_class("fatal"), "s3"),
        (words.level_class("warning"), "s2"), (words.level_class(None), "s1"), (words.level_class("<b>"), "s1"),
        (words.severity_word(3), "error"), (words.severity_word(0), "unusual"), (words.total([[1, 2], [3, 4]]), [4, 6]),
        (words.pieces("a <*> of <NUM>"), [("a ", False), ("<*>", True), (" of ", False), ("<NUM>", True), ("", False)]),
        (words.quoted_parts("lines of `a` and `b <*>` name it"), [("lines of ", False), ("a", True), (" and ", False), ("b <*>", True), (" name it", False)]),
        (words.quoted_parts("x"), [("x", False)]), (words.quoted_parts("`cut"), [("cut", True)]),
        (words.sentence("It waits"), "It waits."), (words.sentence("It waits."), "It waits."), (words.trend_words([0, 0]), "Trend: no line"),
        (words.trend_words([0, 1_200, 3]), "Trend in 3 parts: at most 1,200 lines, in part 2; 3 in the last"),
        (link("/lines", {"q": "a b", "cursor": "c"}, {"since": "1h"}), "/lines?q=a+b&since=1h"),
        (link("/lines", {"q": "a"}, {"q": ""}), "/lines"),
    ],
)  # fmt: skip
def test_a_value_is_written_for_people(shown: object, wanted: object) -> None:
    assert shown == wanted


def test_an_age_looks_back_and_ahead() -> None:
    assert words.ago(utc_now() - timedelta(minutes=4)) == "4 min ago"
    assert words.ago(utc_now() + timedelta(hours=3, seconds=5)) == "in 3 h"
    today = utc_now()
    assert words.clock_time(today) == f"{today:%H:%M:%S}"
    assert words.clock_time(AT.replace(year=2024)) == "20 Nov 2024 09:30:00"
    assert words.clock_time(today, AT.replace(year=2024)) == f"{today.day} {today:%b} {today:%H:%M:%S}"


def test_why_a_line_scored_is_a_sentence_and_its_words_stand_out() -> None:
    scored = line()
    why = words.why_scored(scored)
    assert "full" in why and why.endswith("One normal line in 2,500 is as unlikely.")
    assert ("full", True) in words.message_pieces(scored)
    calm = line(anomalous=False, reasons=[], p_value=0.4)
    assert words.why_scored(calm) == "" and words.message_pieces(calm) == [("disk full", False)]
    assert words.why_scored(line(reasons=None, p_value=None)) == ""


@given(some.text(max_size=300), some.text(max_size=30))
def test_no_character_of_a_message_is_lost_or_obeyed(message: str, word: str) -> None:
    hostile = line(message=message + OBEYED, reasons=[f"unlikely-tokens:{word}", word])
    for found in (words.message_pieces(hostile), words.pieces(message + OBEYED)):
        text = "".join(piece for piece, _ in found)
        assert text == words.clip(message + OBEYED, words.MESSAGE)
        assert not set(text) & set(OBEYED)


def test_a_long_message_is_cut() -> None:
    assert (
        len("".join(piece for piece, _ in words.message_pieces(line(message="a" * 100_000)))) == words.MESSAGE
    )


def test_a_template_prints_every_text_escaped_and_visible() -> None:
    hostile = f"<script>'\"{{{{ 7*7 }}}}{OBEYED}"
    page = console_templates().from_string(
        "<p title='{{ text }}'>{{ text }}{{ text|clip }}{{ one|safe }}</p>"
    )
    html = page.render(text=hostile, one="<i>ours</i>")
    assert "<script" not in html and not set(html) & set(OBEYED) and html.count("{{ 7*7 }}") == 3
    assert html.count("'") == 2


@given(some.lists(some.integers(0, 10**12), max_size=200), some.text())
def test_bars_stay_inside_their_picture(values: list[int], label: str) -> None:
    drawn = bars(values, label=label, odd=values[::-1])
    for height in re.findall(r"v-([\d.]+)h", drawn):
        assert 0 < float(height) <= HEIGHT
    assert drawn.count("M") >= sum(value > 0 for value in values)
    assert re.fullmatch(r"<svg [^<>]*><path [^<>]*/><path [^<>]*/></svg>", drawn, re.DOTALL)


@given(some.integers(0, 10_000), some.integers(0, 10_000), some.integers(0, 10_000))
def test_the_lane_of_a_cause_lies_inside_its_incident(begin: int, first: int, more: int) -> None:
    start, end = AT, AT + timedelta(seconds=begin + first + more)
    row = CauseLane(start + timedelta(seconds=begin), start + timedelta(seconds=begin + first), 3)
    x, width = map(float, _place(lane(row, start, end)))
    assert 0 <= x <= 99.2 and width > 0 and x + width <= 100.01


def _place(drawn: str) -> tuple[str, str]:
    found = re.search(r'x="([\d.]+)" y="4" width="([\d.]+)"', drawn)
    assert found
    return found[1], found[2]


def test_the_address_of_a_file_changes_with_its_bytes() -> None:
    assert re.fullmatch(r"/static/[0-9a-f]{12}/console\.css", static_url("console.css"))
    with pytest.raises(KeyError):
        static_url("../app.py")


@pytest.mark.parametrize(("since", "cell"), [("24h", "1:00:00"), ("6h", "0:15:00"), ("7d", "7:00:00")])
def test_cells_of_rates_are_whole_minutes(since: str, cell: str) -> None:
    looked_at = span_of(since, None)
    shown = whole_cells(looked_at, since, None)
    assert str(shown.length / 24) == cell and shown.until == looked_at.until
    assert whole_cells(looked_at, since, "1m") is looked_at is whole_cells(looked_at, "2026-11-20", None)
    short = span_of("1h", None)
    assert whole_cells(short, "1h", None) is short


ROUTES = {
    route.path: parameters_of(route.dependant)
    for part in (router, *ROUTERS)
    for route in part.routes
    if isinstance(route, APIRoute) and route.methods == {"GET"}
}


@pytest.mark.parametrize(
    ("path", "given", "says"),
    [
        ("/lines", "wrokload", "/lines has no parameter 'wrokload'; did you mean 'workload'?"),
        ("/lines", "sice", "/lines has no parameter 'sice'; did you mean 'since'?"),
        ("/patterns", "marks", "/patterns has no parameter 'marks'; did you mean 'marked'?"),
        ("/gpu", "xyz", "/gpu has no parameter 'xyz'; use by, since"),
        ("/silences", "since", "/silences has no parameter 'since'; it has none"),
        ("/lines", "x" * 10_000, f"/lines has no parameter '{'x' * 60}'; use "),
    ],
)
def test_a_page_refuses_a_parameter_that_it_does_not_have(path: str, given: str, says: str) -> None:
    with pytest.raises(BadInput) as refused:
        check_parameters(path, of_page([*ROUTES[path], given]), ROUTES[path])
    assert str(refused.value).startswith(says)


def test_a_page_passes_over_its_zone_and_what_mail_programs_append() -> None:
    appended = ["zone", "utm_source", "utm_x", "fbclid", "gclid", "msclkid", "mc_cid", "mc_eid"]
    for path, known in ROUTES.items():
        check_parameters(path, of_page([*known, *appended]), known)
    assert of_page(["utm", "zones", "x_utm_"]) == ["utm", "zones", "x_utm_"]


def test_no_link_of_a_page_has_a_parameter_that_its_target_refuses() -> None:
    folder = Path(words.__file__).parent
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("templates/*.html")}
    texts["console.js"] = (folder / "static" / "console.js").read_text(encoding="utf-8")
    seen = set()
    for name, text in texts.items():
        for path, query in re.findall(
            r"""["`](/(?!api/)[^?"`{}]*(?:{{[^}]*}}[^?"`{}]*)?)\?([^"`]*)["`]""", text
        ):
            target = re.sub(r"T?{{[^}]*}}", "{x}", path)
            known = next((ROUTES[one] for one in ROUTES if re.sub(r"{[^}]*}", "{x}", one) == target), None)
            assert known is not None, (name, path)
            given = re.findall(r"(?:^|&(?:amp;)?)(\w+)=", re.sub(r"{%[^%]*%}|{{[^}]*}}", "", query))
            check_parameters(target, given, known)
            seen.add(target)
        own = ROUTES.get(f"/{name.removesuffix('.html')}")
        if own is not None:
            for changes in re.findall(r"\blink\(([^)]*)\)", text):
                check_parameters(name, re.findall(r"(?:^|, )(\w+)=", changes), own)
    assert {"/lines", "/patterns", "/patterns/{x}", "/compare", "/units", "/sessions", "/events"} <= seen


def test_a_fault_of_the_console_is_a_page_for_people_and_a_problem_for_programs() -> None:
    app = specified_app()
    install_console(app)

    def answered(path: str, **headers: str) -> str:
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": named}
        answer = asyncio.run(app.exception_handlers[Exception](Request(scope), ZeroDivisionError("secret")))  # type: ignore[arg-type]
        # A note on the page that is open is an answer that htmx takes.
        assert (
            answer.status_code == (200 if "hx_request" in headers else 500) and b"secret" not in answer.body
        )
        return str(answer.headers["content-type"])

    assert answered("/lines", accept="text/html,*/*").startswith("text/html")
    assert answered("/lines", hx_request="true").startswith("text/html")
    assert answered("/lines") == answered("/api/v1/lines", accept="text/html") == "application/problem+json"
