"""The line model: loading a bundle and scoring masked lines."""

import json
import math
import resource
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import polars as pl
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from pipeline.errors import BadBundle
from pipeline.models import bundle as bundles
from pipeline.models import line as line_module
from pipeline.models.config import ModelConfig, model_config
from pipeline.models.fitting import TrainConfig
from pipeline.models.line import LineModel
from pipeline.models.severity import severity_words
from pipeline.models.trainer import FitRequest, fit
from pipeline.records.verdict import pattern_ids

TOKENS = ("<IP>", "<NUM>")
NORMAL = [
    "connection from <IP> closed",
    "connection from <IP> opened",
    "request <NUM> served in <NUM> ms",
    "cache refreshed with <NUM> entries",
    "worker <NUM> started",
    "worker <NUM> stopped",
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "v1"
    sample = pl.DataFrame(
        {
            "masked": NORMAL,
            "pattern_id": pl.Series(pattern_ids(NORMAL), dtype=pl.UInt64),
            "count": pl.Series([50] * len(NORMAL), dtype=pl.UInt64),
            "severe": [False] * len(NORMAL),
            "template_id": [1, 1, 2, 3, 4, 4],
            "baseline": True,
        }
    )
    config = TrainConfig(model=ModelConfig(hidden=32, feed_forward=64), min_steps=200, max_steps=200)
    for _ in fit(
        sample,
        FitRequest(tokens=TOKENS, mask_version="m", config=config, seed=3, out=out, version="v1"),
    ):
        pass
    return out


@pytest.fixture(scope="module")
def model(bundle: Path) -> LineModel:
    return LineModel.load(bundle)


@pytest.mark.long
def test_a_learnt_line_surprises_less_than_one_of_unknown_words(model: LineModel) -> None:
    learnt, unknown = model.score([NORMAL[0], "kernel panic while syncing"])
    assert learnt.surprisal < unknown.surprisal


@pytest.mark.long
def test_remembered_words_give_the_prior_and_the_error_word_of_the_text(model: LineModel) -> None:
    sentence = "Disk <NUM> failed, retryOperation transferred nothing\u2003to forerunner"
    lines = [
        "",
        sentence,
        " ".join([sentence] * 9),
        f"{'x' * 1100} failed",
        *(f"w{i}Ab " * i for i in (40, 70)),
    ]
    for _ in range(2):  # each word new, and each word known
        found = model.score(lines)
        assert [one.prior for one in found] == model._prior.score(lines)
        assert [one.severity for one in found] == [severity_words(line) for line in lines]


@pytest.mark.long
def test_one_wrong_word_in_a_familiar_line_is_named_first(model: LineModel) -> None:
    found = model.score(["connection from <IP> refused"])[0]
    assert found.words[0] == "refused"
    assert found.unseen == ("refused",)
    assert found.severity == "refused"


@pytest.mark.long
def test_a_mask_token_alone_is_never_a_surprising_or_unseen_word(model: LineModel) -> None:
    found = model.score(["<IP> <NUM>, weird:<NUM> (<IP>)"])[0]
    assert set(found.words) == {"weird:<NUM>"}
    assert found.unseen == ("weird:<num>",)


@pytest.mark.long
@pytest.mark.parametrize("line", ["", " ", "<IP>", "<NUM> <IP><NUM>"])
def test_a_line_without_words_is_not_surprising(model: LineModel, line: str) -> None:
    found = model.score([line])[0]
    assert (found.surprisal, found.words, found.tokens) == (0.0, (), 0)


@pytest.mark.long
def test_at_most_five_words_are_shown(model: LineModel) -> None:
    found = model.score(["alpha beta gamma delta epsilon zeta eta theta iota kappa"])[0]
    assert 1 <= len(found.words) <= 5


@pytest.mark.long
def test_a_line_scores_the_same_alone_and_in_any_company(model: LineModel) -> None:
    lines = [*NORMAL, "some other <NUM> text that is a little longer than the rest", "x"]
    together = dict(zip(lines, model.score(lines), strict=True))
    reverse = dict(zip(lines[::-1], model.score(lines[::-1]), strict=True))
    for line in lines:
        alone = model.score([line])[0]
        assert alone.surprisal == pytest.approx(together[line].surprisal, abs=2e-3)
        assert alone.surprisal == pytest.approx(reverse[line].surprisal, abs=2e-3)
        assert alone.unseen == together[line].unseen


@pytest.mark.long
def test_scoring_leaves_the_weights_as_they_were(model: LineModel) -> None:
    before = {k: v.clone() for k, v in model.network.state_dict().items()}
    model.score(NORMAL)
    assert all(torch.equal(v, before[k]) for k, v in model.network.state_dict().items())


@pytest.mark.long
def test_hostile_lines_are_cut_to_the_length_cap(model: LineModel) -> None:
    hostile = ["x" * 4096, "!" * 4096, "é" * 4096, "a b " * 1024, "\x00" * 4096, "<NUM> " * 680, "<" * 4096]
    found = model.score(hostile)
    assert len(found) == len(hostile)
    assert all(e.tokens <= model.config.max_tokens for e in found)
    assert all(len(w) <= 64 for e in found for w in (*e.words, *e.unseen))


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_lines(model: LineModel) -> None:
    lines = [f"{'word ' * 30}{i:x}" for i in range(240)]
    model.score(lines[:40])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model.score(lines)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


@pytest.mark.long
def test_a_batch_of_lines_is_read_in_one_forward(model: LineModel) -> None:
    reads = 0

    def count(_module: Any, _args: Any) -> None:
        nonlocal reads
        reads += 1

    hook = model.network.ln_f.register_forward_pre_hook(count)
    try:
        model.score(["one two three four five six seven eight nine ten eleven twelve", NORMAL[0], NORMAL[1]])
    finally:
        hook.remove()
    assert reads == 1


@pytest.mark.long
def test_a_piece_is_judged_by_what_stands_before_it_alone(model: LineModel) -> None:
    """Else the network would look at what it has to predict."""
    ids = torch.tensor([[1, 10, 11, 12, 13], [1, 10, 11, 40, 41]])
    with torch.inference_mode():
        hidden = model.network(ids)
    assert torch.allclose(hidden[0, :3], hidden[1, :3], atol=1e-6)
    assert not torch.allclose(hidden[0, 3:], hidden[1, 3:], atol=1e-3)


@pytest.mark.long
def test_training_makes_the_logits_log_shares_of_their_own_accord(model: LineModel) -> None:
    """Scoring leaves the sum over the vocabulary out, so it has to be near 1 where the model has learnt."""
    encoded = model._lexicon.encode(NORMAL)
    at, known = next(encoded.rectangles(4096))
    truth = torch.from_numpy(encoded.ids[at])
    ids = torch.cat([torch.ones(len(truth), 1, dtype=torch.long), truth[:, :-1]], dim=1)
    with torch.inference_mode():
        logits = model.network(ids) @ model.network.token_embedding.weight.T + model.network.bias
    assert float(logits.logsumexp(-1)[torch.from_numpy(known)].abs().mean()) < 0.7


@pytest.mark.long
def test_a_loaded_model_gives_the_same_scores_each_time(bundle: Path, model: LineModel) -> None:
    assert LineModel.load(bundle, threads=1).score(NORMAL) == model.score(NORMAL)


# With hostile ones among them.
MANY: Final = [
    *(
        f"{line} {word}"
        for line in NORMAL
        for word in ("again", "x" * 1300, "timed out", "<IP>", "no error") * 40
    ),
    *(
        "",
        " ",
        "!",
        "?!.,;--- ((()))",
        "core.<NUM>x<IP>y",
        "\x00\x80",
        "\ud800 failed\udfff",
        "failed " * 400,
    ),
]


@pytest.mark.long
def test_how_lines_are_gathered_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, model: LineModel, bundle: Path
) -> None:
    together = model.score(MANY)
    monkeypatch.setattr(line_module, "_AT_ONCE", 7)
    for found in (model.score(MANY), LineModel.load(bundle, threads=1).score(MANY)):
        assert [replace(e, surprisal=0.0) for e in together] == [replace(e, surprisal=0.0) for e in found]
        assert [e.surprisal for e in together] == pytest.approx([e.surprisal for e in found], abs=2e-4)


def reseal(out: Path, name: str, change: Callable[[Path], None]) -> None:
    """Alters a file and makes the manifest agree, as an attacker with write access would."""
    change(out / name)
    manifest = json.loads((out / bundles.MANIFEST).read_text(encoding="utf-8"))
    measured = bundles._measure(out / name)
    manifest["files"][name] = {"size": measured.size, "sha256": measured.sha256}
    (out / bundles.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("name", [bundles.WEIGHTS, bundles.TOKENIZER, bundles.WORDS])
def test_garbage_under_matching_hashes_is_a_bad_bundle(bundle: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "v1"
    shutil.copytree(bundle, out)
    reseal(out, name, lambda p: p.write_bytes(b"\x80\x04garbage") and None)
    with pytest.raises(BadBundle):
        LineModel.load(out)


@pytest.mark.long
def test_weights_that_are_no_numbers_are_a_bad_bundle(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "v1"
    shutil.copytree(bundle, out)
    state = load_file(out / bundles.WEIGHTS)
    state["bias"][7] = math.nan
    reseal(out, bundles.WEIGHTS, lambda p: save_file(state, p))
    with pytest.raises(BadBundle, match="no numbers"):
        LineModel.load(out)


@pytest.mark.long
def test_a_tokenizer_with_ids_past_its_pieces_is_a_bad_bundle(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "v1"
    shutil.copytree(bundle, out)
    told = json.loads((out / bundles.TOKENIZER).read_text(encoding="utf-8"))
    pieces = told["model"]["vocab"]
    pieces[max(pieces, key=pieces.__getitem__)] = 9_999_999
    reseal(out, bundles.TOKENIZER, lambda p: p.write_text(json.dumps(told), encoding="utf-8") and None)
    with pytest.raises(BadBundle, match="ids"):
        LineModel.load(out)


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        {"dropout": 7},
        {"max_tokens": 2},
        {"hidden": 10**6},
        {"layers": 0},
        {"heads": 3},
        {"hidden": "many"},
        {"max_tokens": 64},
        {"kind": "oracle"},
        {"kind": "transformer"},
    ],
)
def test_a_configuration_that_does_not_fit_the_weights_is_a_bad_bundle(
    bundle: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    out = tmp_path / "v1"
    shutil.copytree(bundle, out)
    manifest = json.loads((out / bundles.MANIFEST).read_text(encoding="utf-8"))
    manifest["config"]["model"].update(change)
    (out / bundles.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BadBundle):
        LineModel.load(out)


@pytest.mark.parametrize("name", [field.name for field in fields(ModelConfig)])
def test_a_configuration_without_a_field_is_a_bad_bundle(name: str) -> None:
    model = asdict(ModelConfig())
    assert model_config({"model": model}) == ModelConfig()
    del model[name]
    with pytest.raises(BadBundle, match=name):
        model_config({"model": model})
