"""A mistyped command line names the nearest words, and the usage of the verb that was meant."""

import pytest

from pipeline.cli import ONLY_HERE, REMOTE, VERBS, main, parser


@pytest.mark.parametrize(
    ("line", "usage", "says"),
    [
        ("rnu a.log", "usage: logweir [-h]", "'rnu' is not known; did you mean run?"),
        ("frobnicate", "usage: logweir [-h]", "'frobnicate' is not known; choose from run, up, status"),
        ("run --lmit 3 a.log", "usage: logweir run", "unrecognized arguments: --lmit; did you mean --limit?"),
        ("status --jsno", "usage: logweir status", "--jsno; did you mean --json?"),
        ("status extra", "usage: logweir status", "unrecognized arguments: extra\n"),
        ("watch ad x", "usage: logweir watch", "'ad' is not known; did you mean add?"),
        ("gpu submt", "usage: logweir gpu", "'submt' is not known; did you mean submit?"),
        ("gpu usage --snice 3d", "usage: logweir gpu usage", "--snice 3d; did you mean --since?"),
        ("--jsno status", "usage: logweir [-h]", "unrecognized arguments: --jsno"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest_and_the_usage_of_its_verb(
    capsys: pytest.CaptureFixture[str], line: str, usage: str, says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(line.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(usage) and says in said


@pytest.mark.parametrize(
    "line",
    ["run {}", "run a.log --out {}", "send a.log --workload {}", "gpu run --memory {}", "train --cancel {}"],
)
def test_an_empty_value_is_refused(capsys: pytest.CaptureFixture[str], line: str) -> None:
    """`logweir send "$FILE"` without a value would send the current folder."""
    with pytest.raises(SystemExit) as ended:
        parser().parse_args([word.format("") for word in line.split()])
    assert ended.value.code == 2
    assert "'' is empty; give a value, or leave it out" in capsys.readouterr().err


def test_send_refuses_a_workload_that_none_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["send", __file__, "--workload", "x" * 300]) == 2
    assert "is not usable; use 1 to 200 printable characters" in capsys.readouterr().err


def test_an_empty_argument_of_another_program_is_its_own() -> None:
    assert parser().parse_args(["gpu", "run", "--", "python", ""]).program[-1] == ""


def test_what_was_right_is_taken_as_before() -> None:
    args = parser().parse_args(["run", "a.log", "--limit", "3"])
    assert (args.files, args.limit) == (["a.log"], 3)
    assert parser().parse_args(["train", "--cancel"]).cancel is False
    assert parser().parse_args(["gpu", "run", "--", "python", "--lmit"]).program[-1] == "--lmit"


def test_a_key_without_the_address_of_an_api_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--key", "x", "status"]) == 2
    assert "name the API with --url" in capsys.readouterr().err


def test_every_verb_asks_an_api_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = {verb.name for verb in VERBS}
    assert REMOTE | ONLY_HERE.keys() == verbs and not REMOTE & ONLY_HERE.keys()
    # These read, and are left out: they show files, the state of one machine, or its own addresses.
    assert ONLY_HERE.keys() - {"run", "up", "drain", "stop", "send"} == {
        "console", "doctor", "formats", "intake", "store",
    }  # fmt: skip
    for verb, why in ONLY_HERE.items():
        needed = {"run": ["x.log"], "send": ["x.log"], "formats": ["x.log"]}.get(verb, [])
        assert main(["--url", "http://127.0.0.1:9", verb, *needed]) == 2
        said = capsys.readouterr().err
        assert said == f"logweir: `logweir {verb}` works on the machine itself: {why}; leave out --url\n"
