"""The values of a template's variables."""

import re
import time

from hypothesis import given
from hypothesis import strategies as some

from pipeline.service.variables import MAX_HOLES, MAX_MESSAGE, TOP, values_of

WORDS = some.lists(
    some.lists(some.sampled_from(["a", "ab", "=", "(", "<*>", "<NUM>", "<IP>"]), min_size=1, max_size=4).map("".join),
    min_size=1,
    max_size=5,
)  # fmt: skip
HOLE = re.compile(r"<(\*|[A-Z][A-Z0-9_]*)>")


def by_expression(template: str, message: str) -> list[str] | None:
    """The plain way, which takes for ever on a hostile message."""
    parts = HOLE.split(" ".join(template.split()))[::2]
    found = re.fullmatch(r"(\S+?)".join(map(re.escape, parts)), " ".join(message.split()))
    return None if found is None else list(found.groups())


def test_each_variable_has_its_most_frequent_values() -> None:
    messages = [f"disk /dev/sd{'ab'[n % 3 == 0]} is full, {n % 2} bytes" for n in range(9)]
    device, amount = values_of("disk <*> is full, <NUM> bytes", [*messages, "of another template"])
    assert (device.place, device.mask, device.distinct, device.lines) == (1, "*", 2, 9)
    assert device.values == [("/dev/sda", 6), ("/dev/sdb", 3)]
    assert (amount.mask, dict(amount.values)) == ("NUM", {"0": 5, "1": 4})


def test_a_variable_that_is_part_of_a_word_has_its_value_without_the_rest() -> None:
    user, address, port = values_of("user=<*> from=<IP>:<NUM>,", ["user=a=b from=10.0.0.1:22,"])
    assert [one.values[0][0] for one in (user, address, port)] == ["a=b", "10.0.0.1", "22"]
    assert values_of("user=<*>", ["user="])[0].lines == 0
    assert values_of("nothing varies", ["nothing varies"]) == []


def test_no_more_values_are_kept_than_are_shown() -> None:
    (one,) = values_of("n <NUM>", [f"n {n}" for n in range(100)])
    assert (len(one.values), one.distinct, one.lines) == (TOP, 100, 100)
    many = values_of(" ".join(["<*>"] * (MAX_HOLES + 5)), ["a " * (MAX_HOLES + 5)])
    assert len(many) == MAX_HOLES and all(one.lines == 1 for one in many)


@given(WORDS, some.data())
def test_values_are_those_of_a_regular_expression(words: list[str], data: some.DataObject) -> None:
    template = " ".join(words)
    holes = HOLE.findall(template)
    filled = HOLE.sub(lambda _: data.draw(some.text("ab=(", min_size=1, max_size=3)), template)
    other = data.draw(some.text("ab=( ", max_size=12))
    for message in (filled, other):
        expected = by_expression(template, message)
        found = values_of(template, [message])
        assert len(found) == len(holes)
        if holes:
            assert [one.values[0][0] for one in found if one.lines] == (expected or [])
    assert not holes or values_of(template, [filled])[0].lines == 1


def test_a_hostile_message_takes_no_longer_than_another() -> None:
    template = "<*>".join(["", *["a"] * 20, "b"])
    hostile = ["a" * MAX_MESSAGE, "a" * 50_000, "ab" * (MAX_MESSAGE // 2) + "c", "<*>a" * (MAX_MESSAGE // 4)]
    began = time.process_time()
    values_of(template, hostile * 100)
    assert time.process_time() - began < 2  # a backtracking expression takes longer than the machine lasts
