"""The recorded shop of twelve services is what its labels say, and equal scores are drawn by lot."""

import argparse
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from bench import detection
from bench._log_files import read_file
from bench._shop import place
from bench._shop_data import SHOP, TESTING, TUNING


@pytest.mark.parametrize("half", [TUNING, TESTING])
def test_labels_of_the_shop_fit_its_files(half: str) -> None:
    labels = json.loads((SHOP / half / "labels.json").read_text(encoding="utf-8"))
    faults = labels["faults"]
    assert set(Counter(fault["kind"] for fault in faults).values()) == {5}
    assert len({(fault["kind"], fault["service"]) for fault in faults}) == len(faults) == 40
    assert all(fault["start"] < fault["repaired"] < fault["end"] for fault in faults)
    assert all(a["end"] <= b["start"] for a, b in pairwise(faults))
    names = {f"{path.parent.name}/{path.name.removesuffix('.zst')}" for path in (SHOP / half).glob("*/*.zst")}
    assert names == set(labels["lines"]) and len(names) == 24
    services = {name.split("/")[1].removesuffix(".log") for name in names}
    assert {fault["service"] for fault in faults} <= services
    gateway = SHOP / half / "observed" / "gateway.log.zst"
    text = "\n".join(raw for chunk in read_file(gateway) for raw in chunk.records["raw"])
    assert text.count("\n") + 1 == labels["lines"]["observed/gateway.log"]
    known = set(re.findall(r'"trace_id":"([0-9a-f]{32})"', text))
    touched = [
        trace for fault in faults for trace in fault["traces"] if "-" not in trace
    ]  # not of batch jobs
    assert len(known & set(touched)) >= 0.9 * len(set(touched))  # the others were cut off before an answer


@pytest.mark.parametrize(
    ("scores", "first", "in_three"),
    [
        ({"a": 3.0, "b": 2.0, "c": 1.0, "d": 0.0}, 1.0, 1.0),
        ({"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0}, 0.25, 0.75),
        ({"a": 1.0, "b": 2.0, "c": 2.0, "d": 1.0}, 0.0, 0.5),
        ({"a": 0.0, "b": 2.0, "c": 2.0, "d": 1.0}, 0.0, 0.0),
    ],
)
def test_equal_scores_are_drawn_by_lot(scores: dict[str, float], first: float, in_three: float) -> None:
    found = place(scores, "a")
    assert (found.first, found.in_three) == (first, in_three)


def test_the_part_units_of_the_bench_gives_the_shop_and_origin_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(detection._units, "measure", lambda *_, **__: {"hdfs": {"auroc": 1.0}})
    monkeypatch.setattr(
        detection._shop, "measure", lambda: {"shop": {"auroc": 0.9}, "origin": {"faults": 40}}
    )
    values = detection.measure(tmp_path, argparse.Namespace(only=["units"], seeds=1, repeats=1))
    assert values["units"] == {"hdfs": {"auroc": 1.0}, "shop": {"auroc": 0.9}}
    assert values["origin"] == {"faults": 40}
