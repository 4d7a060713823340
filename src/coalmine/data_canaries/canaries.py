"""Records from a secret seed, a fair coin for each, and what a trained model's outputs tell about the coins."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats, finite_array, unit_interval, whole_number
from coalmine.canaries.secret import SecretBytes, secret_seed
from coalmine.canaries.seeds import is_guessable, seed_bytes
from coalmine.data_canaries.extraction import completed, exposures
from coalmine.data_canaries.insertion import inserted
from coalmine.data_canaries.scoring import Reference, Score, checked_score, model_scores
from coalmine.log.commitment import salted_digest
from coalmine.measure.schedule import keyed_stream, schedule_key
from coalmine.verdict.claim import Claim
from coalmine.verdict.scored_records import BLACK_BOX, ITERATES, Extraction, RecordRung, RecordsResult, ScoredRecords

FEWEST_CANARIES = 50  # of fewer, the coins may leave too few on one side
VERSION = 1  # of the commitment
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DataCanaries:
    """Canaries that are records of the training data; a fair coin from the secret seed decides about each.

    `inputs` has a row for each record, and `labels` what belongs to it: a class, a number, or for text the tokens, with
    -100 where nothing is predicted. `owners` names the canary of each record, if one canary has several, such as all
    documents of one user. Without it each record is a canary. `repeats` is how often each record is inserted: above 1
    the bound is about a group of that many. `unit` is what one canary adds: "row", or "user", whose records count as one.

    `by` says how a model is scored: "margin", "loss", "likelihood", "min-k", or a function (model, inputs, labels) that
    returns a number for each record, higher if it looks trained on. It is fixed here, before training. `every` is the
    number of steps between the checkpoints that an integration scores; without it only the final model is scored.
    `secret_from` and `secret_length` are the places of planted secrets.

    `commitment` is the digest of coins, records and settings; publish it before training.
    """

    inputs: Any
    labels: Any
    seed: SupportsIndex | bytes
    kind: str = "records"
    owners: Any = None
    repeats: int = 1
    unit: str = "row"
    by: Score | None = None
    every: int | None = None
    secret_from: Any = None
    secret_length: int = 0
    was_inserted: bool = field(default=False, init=False)
    _seen: dict[int, Floats] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        inputs, labels = np.asarray(self.inputs), np.asarray(self.labels)
        if inputs.ndim < 1 or labels.shape[:1] != inputs.shape[:1]:
            raise ValueError(f"labels must have one row for each input, got shapes {inputs.shape} and {labels.shape}")
        owners = np.arange(len(inputs)) if self.owners is None else np.asarray(self.owners, dtype=np.int64)
        if owners.shape != (len(inputs),) or not np.array_equal(
            np.unique(owners), np.arange(owners.max(initial=-1) + 1)
        ):
            raise ValueError("owners must give each record the number of its canary, counted from 0 without gaps")
        count = int(owners.max(initial=-1)) + 1
        if count < FEWEST_CANARIES:
            raise ValueError(
                f"data canaries must be at least {FEWEST_CANARIES}, got {count}: fewer certify next to nothing"
            )
        whole_number("repeats", self.repeats, minimum=1)
        if self.every is not None:
            whole_number("every", self.every, minimum=1)
        values = {
            "inputs": inputs,
            "labels": labels,
            "owners": owners,
            "seed": SecretBytes(seed_bytes(secret_seed(self.seed))),
            "by": checked_score(self.by, labels),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"DataCanaries({len(self)} {self.kind}, by={self.score_name})"  # nothing that tells a coin

    def __len__(self) -> int:
        return int(self.owners.max()) + 1

    @property
    def score_name(self) -> str:
        return self.by if isinstance(self.by, str) else getattr(self.by, "__name__", "a function")

    @property
    def copies(self) -> int:
        """The number of units that one canary adds to the data."""
        records = 1 if self.unit != "row" else int(np.bincount(self.owners).max())
        return self.repeats * records

    @cached_property
    def coins(self) -> npt.NDArray[np.bool_]:
        """For each canary, whether it is in; as secret as the seed until the model is scored."""
        return np.asarray(keyed_stream(schedule_key(self.seed), b"coins").random(len(self)) < 0.5)

    @property
    def inserted_records(self) -> Integers:
        """The records that are in, each as often as it is inserted."""
        return np.repeat(np.flatnonzero(self.coins[self.owners]), self.repeats)

    @property
    def plan(self) -> dict[str, Any]:
        """What is fixed before training, for the commitment and for a run's config."""
        digest = hashlib.sha256()
        for array in (self.inputs, self.labels, self.owners):
            digest.update(f"{array.dtype.str}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return {
            "version": VERSION,
            "kind": self.kind,
            "count": len(self),
            "repeats": self.repeats,
            "unit": self.unit,
            "score": self.score_name,
            "every": self.every or 0,
            "demonstration": is_guessable(bytes(self.seed)),
            "records_sha256": digest.hexdigest(),
        }

    @property
    def commitment(self) -> str:
        """A digest of the plan and the seed, from which the coins follow. Anyone can check it once the seed is known."""
        salt = keyed_stream(schedule_key(self.seed), b"coin salt").bytes(16).hex()
        return salted_digest(salt, self.plan, self.seed)

    def insert(
        self, dataset: Any, *, columns: Any = None, client: int | None = None, clients: int | None = None
    ) -> Any:
        """The data set with the canaries that are in at its end; the loader's own sampler picks them like any row.

        A data set is torch's, one of Hugging Face, an array, or a tuple or dict of arrays (numpy, torch or jax). `columns`
        are the names of input and label, if rows are dicts: by default "input_ids" and "labels" for text. In a federation
        client number `client` of `clients` gets its own canaries: the coin of each decides about one client's data.
        """
        records = self.inserted_records
        if client is not None:
            many = whole_number("clients", 0 if clients is None else clients, minimum=1)
            number = whole_number("client", client, minimum=0)
            if number >= many:
                raise ValueError(f"client must be below clients = {many}, got {number}")
            records = records[self.owners[records] % many == number]
        made = inserted(dataset, self.inputs[records], self.labels[records], columns)
        object.__setattr__(self, "was_inserted", True)
        return made

    def score(self, model: Any, *, reference: Reference = None, batch_size: int | None = None) -> Floats:
        """A score for each canary; high means that the model looks trained on it.

        `model` is a torch module, or a function from a batch of inputs to logits. It is evaluated without dropout, and is
        left as it was. What the scores of a `reference` predict is subtracted: another model, earlier scores of the
        untrained one, or "without adapter" for a model of peft.
        """
        records = model_scores(model, self.inputs, self.labels, self.by, reference=reference, batch_size=batch_size)
        summed = np.bincount(self.owners, weights=records, minlength=len(self))
        return np.asarray(summed / np.bincount(self.owners, minlength=len(self)))

    def observe(self, model: Any, step: int, **options: Any) -> Floats:
        """Score a checkpoint, for the attacker who sees several: the rung `black-box-iterates`."""
        self._seen[whole_number("step", step, minimum=0)] = scores = self.score(model, **options)
        return scores

    def scored(
        self,
        scores: npt.ArrayLike,
        *,
        delta: float,
        extraction: Extraction | None = None,
        checkpoints: Mapping[int, npt.ArrayLike] | None = None,
    ) -> ScoredRecords:
        """What scores of the final model tell about the coins, and with checkpoints (by `observe`) what their mean tells."""
        unit_interval("delta", delta)
        final, seen = self._checked(scores), self._seen if checkpoints is None else checkpoints
        rungs = [RecordRung.of(BLACK_BOX, final[self.coins], final[~self.coins], delta)]
        if seen:
            mean = np.mean([*(self._checked(each) for each in seen.values()), final], axis=0)
            rungs.append(RecordRung.of(ITERATES, mean[self.coins], mean[~self.coins], delta))
        return ScoredRecords(
            kind=self.kind,
            score=self.score_name,
            rungs=tuple(rungs),
            copies=self.copies,
            commitment=self.commitment,
            extraction=extraction,
            unit=self.unit,
        )

    def result(
        self,
        scores: npt.ArrayLike,
        *,
        delta: float,
        claim: Claim | float | None = None,
        extraction: Extraction | None = None,
    ) -> RecordsResult:
        """The bound from outputs, and the verdict on a claim about one row over the whole training."""
        scored, stated = self.scored(scores, delta=delta, extraction=extraction), Claim.of(claim)
        if stated is not None:
            stated.check_delta(delta)
        return RecordsResult.of(scored, stated)

    def extraction(self, model: Any, *, batch_size: int = 16) -> Extraction:
        """The exposure of the planted secrets, and how many of them the model completes greedily."""
        if self.secret_from is None:
            raise ValueError("extraction needs planted secrets: make the canaries with data_canaries.secrets")
        scores, starts = self.score(model, batch_size=batch_size), np.asarray(self.secret_from)
        found = completed(model, self.inputs, starts, self.secret_length, batch_size)
        inside, outside = scores[self.coins], scores[~self.coins]
        planted = exposures(inside, outside)
        return Extraction(
            inserted=inside.size,
            alternatives=outside.size,
            median_exposure=float(np.median(planted)),
            largest_exposure=float(planted.max()),
            extracted=int(found[self.coins].sum()),
            chance=float(np.median(exposures(outside, outside, own=True))),
        )

    def save(self, path: Path | str, scores: npt.ArrayLike) -> Path:
        """Write scores for `coalmine estimate --one-run`. The file tells the coins: not before the run is over."""
        file, final = Path(path), self._checked(scores)
        np.savez(file, observed=final[self.coins], unobserved=final[~self.coins])
        return file if file.suffix == ".npz" else file.with_name(file.name + ".npz")

    def _checked(self, scores: npt.ArrayLike) -> Floats:
        array = finite_array("scores", scores)
        if array.shape != (len(self),):
            raise ValueError(f"scores must hold one number for each of {len(self)} canaries, got shape {array.shape}")
        return array
