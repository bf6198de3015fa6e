"""Services beside their own past, and evidence that walks along the names in flagged lines."""

from dataclasses import replace
from datetime import UTC, datetime
from zlib import crc32

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.watching.units import unit_lines as folding
from pipeline.watching.units.blame import PASSED, names_of, passed_on, walked
from pipeline.watching.units.own_past import LEAST_OWN
from pipeline.watching.units.ranking import rank_units
from pipeline.watching.units.unit_lines import UNIT_LINES, UNUSUAL_P, UnitFold, UnitTable, unit_lines
from pipeline.watching.units.values import UnitEvidence

Line = tuple[str, int, int, str | None, int]  # unit, window, template, text of a flagged line, occasion


def folded(lines: list[Line]) -> UnitTable:
    """One line a second of each."""
    rows = [
        (unit, window, 100 * window + at, crc32((text or "").encode()) + template, template,
         text is not None, 0.001, False, text, occasion if text else None, *[None] * 6)
        for at, (unit, window, template, text, occasion) in enumerate(lines)
    ]  # fmt: skip
    fold = UnitFold()
    fold.add(pl.DataFrame(rows, schema=UNIT_LINES, orient="row", infer_schema_length=None))
    return fold.table()


def calm(unit: str, window: int, count: int) -> list[Line]:
    return [(unit, window, 1, None, 0)] * count


def flagged(unit: str, text: str, *occasions: int) -> list[Line]:
    return [(unit, 0, 2, text, occasion) for occasion in occasions]


def shares(table: UnitTable) -> dict[tuple[str, str], float]:
    names = table.units["unit"].to_list()
    return {(names[at], names[to]): share for at, to, share in passed_on(table).iter_rows()}


def test_a_caller_that_names_a_service_passes_its_evidence_on() -> None:
    table = folded(
        flagged("web", "upstream failed: orders POST answered 502", 1, 2, 3)
        + flagged("web", "request completed with 502", 1, 2, 3, 4)
        + flagged("orders", "upstream failed: payments answered 500", 1, 2)
        + calm("payments", 0, 3)
    )
    # Four occasions of web, three with the name; its other lines of these belong to the same failures.
    assert shares(table) == {("web", "orders"): PASSED * 3 / 4, ("orders", "payments"): PASSED}
    names = table.units["unit"].to_list()
    ended = dict(zip(names, walked(np.array([8.0, 1.0, 20.0]), passed_on(table)), strict=True))
    assert names == ["orders", "payments", "web"]
    assert ended["payments"] > ended["web"] > ended["orders"]
    assert sum(ended.values()) == pytest.approx(29.0)


def test_a_line_that_names_two_services_passes_half_to_each() -> None:
    table = folded(
        flagged("web", "hit of search is not in catalog", 1) + calm("search", 0, 1) + calm("catalog", 0, 1)
    )
    assert shares(table) == {("web", "catalog"): PASSED / 2, ("web", "search"): PASSED / 2}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("cannot reach http://orders:8080/stats", True),
        ("cannot reach orders.shop.svc:8080", True),
        ("no answer of Orders", True),
        ("GET /orders/7 failed", False),
        ("in /app/orders.py, line 3", False),
        ("reorders are late", False),
        ("orders.Place failed", False),
    ],
)
def test_a_name_is_a_word_of_its_own(text: str, named: bool) -> None:
    table = folded(flagged("web", text, 1) + calm("orders", 0, 1))
    assert shares(table) == ({("web", "orders"): PASSED} if named else {})


def test_pods_are_called_by_their_service_and_replicas_do_not_blame_each_other() -> None:
    assert "orders" in names_of("orders-7d9f8c6b5d-x2x9z")
    assert "orders" in names_of("shop/orders-2")
    assert names_of("shop-order") == {"shop-order"}
    table = folded(flagged("orders-1", "orders is out of memory", 1) + calm("orders-2", 0, 1))
    assert shares(table) == {}


def test_the_last_line_of_a_traceback_is_searched_for_names_too() -> None:
    message = "\n".join(
        ["unhandled error", *["  File x.py, line 1"] * 40, "socket.gaierror: no address of host orders"]
    )
    text = pl.DataFrame({"message": [message]}).select(folding.both_ends())["message"][0]
    assert len(text) <= folding.TEXT_CHARS + 5
    table = folded(flagged("web", text, 1) + calm("orders", 0, 1))
    assert shares(table) == {("web", "orders"): PASSED}


def stored(unit: str, text: str, anomalous: bool, p_value: float | None) -> pl.DataFrame:
    """UNIT_LINES of one stored line."""
    columns = {
        "message": text, "timestamp": datetime(2026, 11, 26, tzinfo=UTC), "timed": True, "template_id": 7,
        "pattern_id": crc32(text.encode()), "anomalous": anomalous, "p_value": p_value, "source": "pushed",
        "reasons": [],
    }  # fmt: skip
    line = pl.DataFrame([columns], schema_overrides={"p_value": pl.Float64, "reasons": pl.List(pl.String)})
    return unit_lines(line, pl.Series([unit]), pl.Series([0]), pl.Series([False]))


@pytest.mark.parametrize(
    ("anomalous", "p_value", "usual", "blamed"),
    [
        (False, UNUSUAL_P, False, True),  # a caller only warns of a wrong answer
        (False, UNUSUAL_P, True, False),  # and does so in good times too
        (False, UNUSUAL_P + 0.01, False, False),
        (False, None, False, False),
        (True, None, True, True),
    ],
)
def test_an_unusual_line_passes_blame_on_where_no_normal_unit_has_its_pattern(
    anomalous: bool, p_value: float | None, usual: bool, blamed: bool
) -> None:
    page = stored("web", "hit of search is unknown", anomalous, p_value)
    calm_line = stored("search", "4 hits", False, 1.0)
    assert calm_line.select("text", "occasion").row(0) == (None, None)
    judged, normal = UnitFold(), UnitFold()
    for one in (page, calm_line):
        judged.add(one)
    normal.add(page if usual else calm_line)
    table = judged.table()
    passed = passed_on(table, normal.table())
    names = table.units["unit"].to_list()
    assert [(names[at], names[to]) for at, to, _ in passed.iter_rows()] == [("web", "search")] * blamed


def test_units_of_another_window_are_not_blamed() -> None:
    table = folded([*flagged("web", "orders failed", 1), *calm("orders", 1, 1)])
    assert shares(table) == {}


@given(
    st.lists(st.floats(-1, 30), min_size=3, max_size=3),
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=3, max_size=3),
)
def test_the_walk_keeps_the_sum_even_in_circles(evidence: list[float], weights: list[list[float]]) -> None:
    rows = []
    for at, row in enumerate(weights):
        total = max(1.0, sum(row))
        rows += [(at, to, PASSED * w / total) for to, w in enumerate(row) if to != at]
    passed = pl.DataFrame(rows, schema=["at", "to", "share"], orient="row")
    found = walked(np.array(evidence), passed)
    assert found.sum() == pytest.approx(sum(evidence))
    assert (found >= np.minimum(0.0, evidence) - 1e-9).all()


def test_flags_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "MAX_FLAGS", 5)
    table = folded(flagged("web", "orders failed", *range(20)) + calm("orders", 0, 1))
    assert table.flags.height == 5
    assert shares(table) == {("web", "orders"): PASSED}  # the share of those that are kept


def past(windows: int) -> list[Line]:
    """A loud service, whose number of lines varies, and a quiet one that never does."""
    found: list[Line] = []
    for window in range(-windows, 0):
        found += calm("loud", window, 40 + 15 * (window % 3)) + calm("quiet", window, 4)
    return found


def test_a_service_is_measured_by_its_own_windows_where_it_has_enough() -> None:
    now = calm("loud", 0, 55) + calm("quiet", 0, 30)  # 30 lines are usual for the other one
    ranking = rank_units(folded(now), folded(past(LEAST_OWN + 3)), {})
    first = ranking.units[0]
    assert first.unit == "quiet"
    assert "its windows before" in first.reasons[0].text
    few = rank_units(folded(now), folded(past(LEAST_OWN - 1)), {})
    assert all("its windows before" not in reason.text for unit in few.units for reason in unit.reasons)


def test_a_service_that_fell_silent_is_ranked() -> None:
    now = calm("loud", 0, 55)
    ranking = rank_units(folded(now), folded(past(LEAST_OWN + 3)), {})
    assert (ranking.units[0].unit, ranking.units[0].lines) == ("quiet", 0)
    assert ranking.judged == 2


def test_the_named_service_comes_first_with_a_reason() -> None:
    now = calm("loud", 0, 50) + calm("quiet", 0, 4) + flagged("loud", "no answer of quiet", *range(6))
    ranking = rank_units(folded(now), folded(past(LEAST_OWN + 3)), {})
    assert ranking.units[0].unit == "quiet"
    reason = ranking.units[0].reasons[0]
    assert (reason.evidence, reason.text) == (UnitEvidence.NAMED, "anomalous or new lines of `loud` name it")


@pytest.mark.parametrize(
    "text",
    [
        "connect() failed, upstream: http://127.0.0.1:8001/cart",
        'connection to server at "127.0.0.1", port 8001 failed: Connection refused',
        "Can't create a connection to host 127.0.0.1 and port 8001 (timeout is 3)",
        "Error 111 connecting to localhost:8001. Connection refused.",
    ],
)
def test_an_address_names_the_only_unit_that_listens_on_its_port(text: str) -> None:
    table = folded(flagged("gateway", text, 1) + calm("web", 0, 1) + calm("orders", 0, 1))

    def said(**ports: int) -> UnitTable:
        listening = pl.DataFrame(
            {"unit": list(ports), "port": list(ports.values())}, schema=table.ports.schema
        )
        return replace(folded(calm("web", 0, 1)), ports=listening)

    names = table.units["unit"].to_list()
    for normal, blamed in (
        (said(web=8001, orders=8002), ["web"]),
        (said(web=8001, orders=8001), []),  # replicas, or one port in every pod
        (said(gateway=8001), []),
        (said(orders=8002), []),
    ):
        assert [names[to] for to in passed_on(table, normal)["to"].to_list()] == blamed


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("listening port=8001", 8001),
        ("Tomcat started on port(s): 8080 (http) with context path ''", 8080),
        ("Running on http://0.0.0.0:8000 (Press CTRL+C to quit)", 8000),
        ('listening on IPv4 address "127.0.0.1", port 5432', 5432),
        ("Listening on [::]:80", 80),
        ("listening on :9090", 9090),
        ("Running mode=standalone, port=6379.", 6379),
        ("Server started at 12:30:52", None),
        ("upstream 10.0.0.7:8080 refused the connection", None),
    ],
)
def test_a_program_says_on_which_port_it_listens(text: str, port: int | None) -> None:
    assert folding.listened_ports(pl.Series([None, text])).to_list() == [None, port]
