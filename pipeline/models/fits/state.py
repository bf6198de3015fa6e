"""Where a training stands, in a directory: what finished fits have shown, and the fit that runs.

A training that begins again in the same directory, with the same sample and request, goes on from there. A
file appears by a rename, so a reader meets a whole one.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pipeline.errors import BadPayload, TooNew
from pipeline.logs import logger
from pipeline.models.evidence import Normal
from pipeline.models.fits.world import ALONE, World
from pipeline.records.wire import Codec

EVERY_S: Final = 5.0  # of a fit that takes 20 s by default
FOLDS: Final = "folds"
STEP: Final = "step.safetensors"
_RANDOM: Final = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedFolds:
    """The normal lines that each fold has shown so far."""

    folds: list[list[Normal]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPlace:
    """Behind a step of a fit. `fit`: its number in the training."""

    fit: int
    step: int
    steps: int
    drawn: int
    loss: float


CODEC: Final = Codec(FinishedFolds, version=1, what="the folds of a training", newer=TooNew)


class FitState:
    """The state of one training. `writes` False: it is only read, as by the ranks above 0."""

    def __init__(self, directory: Path, *, writes: bool = True, every_s: float = EVERY_S) -> None:
        self.directory, self.writes, self.every_s = directory, writes, every_s
        self._next = time.monotonic() + every_s
        directory.mkdir(parents=True, exist_ok=True)

    def folds(self) -> list[list[Normal]]:
        """Of the folds that are finished; unreadable ones are fitted again."""
        try:
            return CODEC.unpack((self.directory / FOLDS).read_bytes()).folds
        except FileNotFoundError:
            return []
        except (BadPayload, TooNew) as exc:
            logger().warning("fit.state_unread", why=str(exc))
            return []

    def add_fold(self, normal: list[Normal]) -> None:
        if self.writes:
            new = self.directory / f"{FOLDS}.new"
            new.write_bytes(CODEC.pack(FinishedFolds(folds=[*self.folds(), normal])))
            new.rename(self.directory / FOLDS)

    def of(self, fit: int) -> "KeptFit":
        """The part of one fit."""
        return KeptFit(self, fit)

    def restore(self, fit: int, tensors: list[torch.Tensor]) -> FitPlace | None:
        """Fills the tensors of a fit; None where it begins anew."""
        try:
            with safe_open(self.directory / STEP, "pt") as file:
                place = msgspec.json.decode((file.metadata() or {})["place"], type=FitPlace)
                if place.fit != fit:
                    return None
                stored = [file.get_tensor(str(number)) for number in range(len(tensors))]
                random = file.get_tensor(_RANDOM)
            with torch.no_grad():
                for tensor, value in zip(tensors, stored, strict=True):
                    tensor.copy_(value)
        except FileNotFoundError:
            return None
        except (SafetensorError, msgspec.DecodeError, KeyError, RuntimeError) as exc:
            logger().warning("fit.state_unread", why=str(exc))
            return None
        torch.set_rng_state(random)
        logger().info("fit.resumed", fit=fit, step=place.step)
        return place

    def save(self, place: FitPlace, tensors: list[torch.Tensor]) -> None:
        """Replaces the state before, when it is time to."""
        if not self.writes or time.monotonic() < self._next:
            return
        values = {str(n): tensor.detach().cpu().contiguous() for n, tensor in enumerate(tensors)}
        values[_RANDOM] = torch.get_rng_state()
        metadata: dict[str, Any] = {"place": msgspec.json.encode(place).decode()}
        new = self.directory / f"{STEP}.new"
        save_file(values, new, metadata=metadata)
        new.rename(self.directory / STEP)
        self._next = time.monotonic() + self.every_s


@dataclass(frozen=True, slots=True)
class KeptFit:
    """The state of one fit of a training."""

    state: FitState
    fit: int

    def restore(self, tensors: list[torch.Tensor]) -> FitPlace | None:
        return self.state.restore(self.fit, tensors)

    def save(self, *, step: int, steps: int, drawn: int, loss: float, tensors: list[torch.Tensor]) -> None:
        self.state.save(FitPlace(fit=self.fit, step=step, steps=steps, drawn=drawn, loss=loss), tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSharing:
    """How a fit is shared out over processes, and kept."""

    world: World = ALONE
    kept: KeptFit | None = None
