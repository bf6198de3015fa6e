"""The transformers edition of the line model, trained from a configuration and from a directory."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadBundle, BadInput, TrainingFailed
from pipeline.models import bundle as bundles
from pipeline.models.config import ModelConfig, NetworkKind
from pipeline.models.encoder.directory import encoder_shape
from pipeline.models.encoder.network import framed_rows, strides
from pipeline.models.fitting import TrainConfig
from pipeline.models.line import LineModel
from pipeline.models.tokenizer import Specials
from pipeline.models.trainer import FitRequest, edition_config, fit
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
TINY = replace(
    edition_config("transformer"),
    model=ModelConfig(kind=NetworkKind.TRANSFORMER, hidden=32, feed_forward=64, groups=3),
    min_steps=120,
    max_steps=120,
)


def train(out: Path, config: TrainConfig, **more: Any) -> Path:
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
    request = FitRequest(
        tokens=TOKENS,
        mask_version="m",
        config=config,
        seed=3,
        out=out,
        version="v1",
        **more,
    )
    for _ in fit(sample, request):
        pass
    return out


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("models") / "v1", TINY)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has: a small BERT and its tokenizer, as `save_pretrained` writes them."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    out = tmp_path_factory.mktemp("encoder")
    words = BertWordPieceTokenizer()
    words.train_from_iterator([*NORMAL, "kernel panic while syncing"], vocab_size=200, show_progress=False)
    names = {f"{n}_token": f"[{n.upper()}]" for n in ("pad", "cls", "sep", "mask", "unk")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, **names)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


@given(st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=5), st.integers(1, 4))
def test_each_scored_piece_is_hidden_in_one_of_k_rows_and_neighbours_in_different_ones(
    lines: list[list[bool]], count: int
) -> None:
    scored = np.array([piece for line in lines for piece in line], dtype=np.bool_)
    start = np.cumsum([0, *map(len, lines)])
    found = strides(scored, start, count)
    for begin, end in pairwise(start.tolist()):
        rows = found[begin:end][scored[begin:end]].tolist()
        assert rows == [n % count for n in range(len(rows))]


def test_a_row_stands_between_its_two_ends() -> None:
    real = np.array([[True, True, True], [True, False, False]])
    rows = framed_rows(np.array([[7, 8, 9], [7, 8, 9]]), real, Specials(pad=0, cls=1, sep=2, mask=3))
    assert rows.tolist() == [[1, 7, 8, 9, 2], [1, 7, 2, 0, 0]]


@pytest.mark.long
def test_a_wrong_word_surprises_and_is_named(bundle: Path) -> None:
    model = LineModel.load(bundle)
    learnt, wrong, unknown = model.score(
        [NORMAL[0], "connection from <IP> refused", "kernel panic while syncing"]
    )
    assert learnt.surprisal < wrong.surprisal and learnt.surprisal < unknown.surprisal
    assert wrong.words[0] == "refused" and wrong.unseen == ("refused",)
    bare = model.score(["", "<IP>", "<NUM> <IP><NUM>"])
    assert [(e.surprisal, e.words, e.tokens) for e in bare] == [(0.0, (), 0)] * 3


@pytest.mark.long
def test_a_line_scores_the_same_in_any_company_and_costs_k_rows(bundle: Path) -> None:
    model = LineModel.load(bundle)
    long = "one two three four five six seven eight nine ten eleven twelve " * 20
    lines = [*NORMAL, "x", long]
    together = [e.surprisal for e in model.score(lines)]
    rows = 0

    def count(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        nonlocal rows
        rows += len(given["input_ids"])

    hook = model.network.inner.base_model.register_forward_pre_hook(count, with_kwargs=True)
    alone = [model.score([line])[0].surprisal for line in lines]
    hook.remove()
    assert alone == pytest.approx(together, abs=2e-3)
    assert rows <= 3 * len(lines)


@pytest.mark.long
def test_auto_model_reads_a_bundle(bundle: Path) -> None:
    from transformers import AutoModel, AutoModelForMaskedLM

    ours = LineModel.load(bundle).network.inner
    ids = torch.tensor([[1, 10, 3, 12, 2]])
    with torch.inference_mode():
        vectors = ours.base_model(input_ids=ids).last_hidden_state
        theirs = AutoModel.from_pretrained(bundle, local_files_only=True).eval()
        assert torch.allclose(theirs(input_ids=ids).last_hidden_state, vectors, atol=1e-5)
        headed = AutoModelForMaskedLM.from_pretrained(bundle, local_files_only=True).eval()
        assert torch.allclose(headed(input_ids=ids).logits, ours(input_ids=ids).logits, atol=1e-5)


@pytest.mark.long
def test_a_pretrained_encoder_is_fine_tuned_and_stays_as_it_was(directory: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    config = replace(edition_config("transformer", directory), min_steps=40, max_steps=40, learning_rate=3e-3)
    assert (config.model.kind, config.model.hidden, config.model.max_tokens) == (
        NetworkKind.PRETRAINED,
        32,
        60,
    )
    out = train(tmp_path / "v1", config)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    model = LineModel.load(out)
    assert len(model.tokenizer.pieces(["<IP>"])[0]) == 1 and len(model.tokenizer.fixed) == 2
    learnt, unknown = model.score([NORMAL[0], "kernel panic while syncing"])
    assert learnt.surprisal < unknown.surprisal and unknown.words


def change(name: str, edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
        edit(value)
        (folder / name).write_text(json.dumps(value), encoding="utf-8")

    return apply


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (shutil.rmtree, "is no directory"),
    (lambda d: (d / "config.json").unlink(), "no config.json"),
    (pickled, "pytorch_model.bin alone, which can hold code"),
    (lambda d: (d / "model.safetensors").unlink(), "no model.safetensors"),
    (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer.json"),
    (lambda d: (d / "tokenizer_config.json").unlink(), "no tokenizer_config.json"),
    (lambda d: (d / "config.json").write_text("{"), "cannot be read"),
    (change("config.json", lambda c: c.update(architectures=["GPT2LMHeadModel"])), "not an encoder"),
    (change("config.json", lambda c: c.update(is_decoder=True)), "not an encoder"),
    (change("config.json", lambda c: c.update(auto_map={"AutoModel": "x.Y"})), "code"),
    (change("config.json", lambda c: c.update(hidden_size=10**9)), "not served"),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGE, ids=[why for _, why in DAMAGE])
@pytest.mark.long
def test_a_directory_that_is_not_usable_is_refused_before_anything_is_read(
    directory: Path, tmp_path: Path, damage: Callable[[Path], Any], why: str
) -> None:
    broken = tmp_path / "encoder"
    shutil.copytree(directory, broken)
    assert encoder_shape(broken).hidden == 32
    damage(broken)
    with pytest.raises(BadInput, match=why) as refused:
        edition_config("transformer", broken)
    assert str(broken) in str(refused.value)


@pytest.mark.long
@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "model.safetensors").write_bytes(b"\x80\x04garbage"),
        change("config.json", lambda c: c.update(model_type="oracle")),
        change("config.json", lambda c: c.update(intermediate_size=128)),
    ],
)
def test_an_encoder_that_cannot_be_loaded_ends_the_training_with_a_sentence(
    directory: Path, tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    broken = tmp_path / "encoder"
    shutil.copytree(directory, broken)
    damage(broken)
    with pytest.raises(TrainingFailed, match="cannot be read"):
        train(tmp_path / "v1", edition_config("transformer", broken))
    assert not (tmp_path / "v1").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", [bundles.ENCODER_CONFIG, bundles.WEIGHTS])
def test_garbage_in_a_bundle_of_an_encoder_is_a_bad_bundle(bundle: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "v1"
    shutil.copytree(bundle, out)
    (out / name).write_bytes(b"garbage")
    manifest = json.loads((out / bundles.MANIFEST).read_text(encoding="utf-8"))
    measured = bundles._measure(out / name)
    manifest["files"][name] = {"size": measured.size, "sha256": measured.sha256}
    (out / bundles.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BadBundle):
        LineModel.load(out)
