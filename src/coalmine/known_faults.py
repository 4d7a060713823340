"""The signature of each known fault: data for the self-test, and for a report of the likely fault."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from coalmine.evidence.gauges.gauge import LAYER, Gauge
from coalmine.result.audit_result import Adversary, AuditResult
from coalmine.verdict.outcome import Outcome


@dataclass(frozen=True)
class Signature:
    """A fault: its title, its meaning, its fix, and the rungs and gauges that it moves.

    `moves` names evidence that every run with the fault shows, `may_move` evidence that some runs show, and `spares`
    evidence that points to another fault. With empty `moves` this audit cannot detect the fault, for the `reason` given.
    """

    name: str
    title: str
    meaning: str
    mend: str
    moves: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    reason: str = ""
    may_move: tuple[str, ...] = ()

    @property
    def detectable(self) -> bool:
        return bool(self.moves)


LENGTHS = ("noise", "difference", "residual", "pooled residual")
LAW = (
    "distribution",
    "noise follows others",
    "noise follows canaries",
    "spectrum",
    "neighbours",
    "shared draws",
    "repeated values",
    "rank",
    "others",
)
SOURCES = {
    name: name for name in ("final", "final-update", "all-iterates", "known-round", "known-others", "repeat", *LAW)
} | {
    "low noise": "noise",
    "low difference": "difference",
    "low residual": "residual",
    "high residual": "residual",
    "some rounds": "residual",
    "low layer": "layer",
    "lone layer": "layer",
    "high layer": "layer",
    "light tails": "shape",
    "heavy tails": "shape",
    "bare coordinates": "bare coordinates",
    "grid": "grid",
    "few values": "grid",
    "uneven scores": "known-others",
}  # the rung or gauge that each piece of evidence comes from
BARE = 3.0  # reading of that gauge; heavy tails alone give fewer values near 0
GRID = 0.5  # reading of that gauge, 0 to 1: values on a grid read nearly 1
FEW_VALUES = 0.8  # reading of the grid gauge; with a wrong histogram as well, the noise takes a handful of values
SPREAD = 1.2  # the observed scores' standard deviation over that of the noise
SPREAD_OF_MEAN = 0.5  # excess spread over the mean score; large scores spread by the error of the scale

LESS_NOISE = ("known-others", "low residual")
WEAKER_RUNGS = ("known-round", "all-iterates")
FOLLOWS = ("noise follows others", "noise follows canaries")
BARE_LAW = (
    "heavy tails",
    "distribution",
    "bare coordinates",
    "rank",
    "neighbours",
    "spectrum",
    *FOLLOWS,
    "low difference",
)
FOLLOWS_SIGNAL = (
    "distribution",
    "bare coordinates",
    "noise follows canaries",
    "low layer",
    "low residual",
    "high residual",
    "some rounds",
    "low difference",
    "repeat",
    "rank",
    "neighbours",
    "spectrum",
)
WRONG_OTHERS = ("high residual", "high layer", "low layer", "repeat", *BARE_LAW[:-1])


def _bounded_noise(name: str, title: str) -> Signature:
    return Signature(
        name,
        title,
        "The noise has bounded support. A release outside its range proves that a client took part.",
        "Draw the noise from a Gaussian: the accounting holds for no other law.",
        ("light tails",),
        ("few values", "bare coordinates", *FOLLOWS),
        may_move=("distribution",),
    )


def _signal_dependent_noise(name: str, title: str) -> Signature:
    return Signature(
        name,
        title,
        "The noise follows the signal: coordinates with a small signal are released with little noise or none.",
        "Add noise of the same std to every coordinate, whatever the clients sent.",
        ("heavy tails", "noise follows others", "high layer"),
        ("few values", "known-others"),
        may_move=FOLLOWS_SIGNAL,
    )


SIGNATURES: tuple[Signature, ...] = (
    Signature("honest", "nothing is broken", "Every step does what it claims.", "Nothing to mend."),
    Signature(
        "clip-forgotten",
        "clipping forgotten",
        "Updates enter the sum at any length, so the noise covers only a part of them.",
        "Scale every update to at most the clip norm before it is added.",
        ("known-others",),
        ("low residual", "high residual", "repeat"),
        may_move=WEAKER_RUNGS,
    ),
    Signature(
        "clip-after-averaging",
        "the average is clipped, not the updates",
        "One client can move the average by the whole clip norm. The clip shortens all parts alike, so subtracting "
        "`others` leaves more than noise, and much the same in every round.",
        "Clip each update before it is added, not the sum or the average.",
        ("known-round", "high residual", "repeat", "others"),
        ("low residual", "low difference"),
        may_move=("all-iterates", "known-others", "uneven scores", *WRONG_OTHERS),
    ),
    Signature(
        "noise-over-n",
        "noise divided by n twice",
        "The noise std was divided by the number of clients before the average divided it again.",
        "Add noise of std z·C to the sum, then divide once.",
        LESS_NOISE,
        ("repeat", "some rounds"),
        may_move=("low difference",),
    ),
    Signature(
        "noise-over-2",
        "half the noise",
        "The noise std is half of what is claimed: the clip norm or the multiplier is not the one that was accounted for.",
        "Compare the std of the noise that is drawn with z·C.",
        LESS_NOISE,
        ("repeat", "some rounds"),
        may_move=("low difference",),
    ),
    Signature(
        "noise-over-root-2",
        "noise too small by √2",
        "A variance was taken for a std, or two parties were to add half of the variance each and one of them did not.",
        "Compare the std of the noise that is drawn with z·C.",
        LESS_NOISE,
        ("repeat", "some rounds"),
        may_move=("low difference",),
    ),
    Signature(
        "noise-times-n",
        "far too much noise",
        "Privacy holds, but the noise drowns the model: it was not divided by n with the sum.",
        "Add noise of std z·C to the sum, then divide once.",
        ("high residual",),
        ("known-others",),
        may_move=("high layer",),
    ),
    Signature(
        "noise-reused",
        "the same noise in every round",
        "The difference of two rounds has no noise at all: a generator is seeded anew in every round.",
        "Seed the generator once, or from the round number too.",
        ("repeat", "low difference"),
        may_move=("repeated values", "rank", "distribution", "shared draws", "neighbours", "spectrum"),
    ),
    Signature(
        "noise-on-half",
        "noise on half of the coordinates",
        "Some layers are released without noise.",
        "Add noise to every parameter that is released, buffers included.",
        (*LESS_NOISE, "low layer"),
        ("repeat",),
        may_move=BARE_LAW,
    ),
    Signature(
        "noise-on-90-percent",
        "a tenth of the coordinates without noise",
        "Some layers are released without noise.",
        "Add noise to every parameter that is released, buffers included.",
        ("low residual", "low layer"),
        ("repeat",),
        may_move=("some rounds", *BARE_LAW),
    ),
    Signature(
        "noise-on-one-layer",
        "noise on one layer only",
        "One layer is released with noise, all others without.",
        "Add noise to every parameter that is released, buffers included.",
        ("low residual", "low layer", "lone layer"),
        ("repeat",),
        may_move=("known-others", *BARE_LAW),
    ),
    Signature(
        "small-tensor-without-noise",
        "a small tensor without noise",
        "A bias or a buffer is released without noise. It is too small to change the length of the whole residual.",
        "Add noise to every parameter that is released. Name the layers to the audit so that each has its own gauge.",
        ("low layer",),
        ("low residual", "repeat"),
        may_move=("heavy tails", "distribution", "bare coordinates"),
    ),
    Signature(
        "noise-in-last-rounds",
        "half the noise in the last rounds",
        "Some rounds have less noise than claimed: a schedule or a second phase of training changed it.",
        "Account for the noise of every round, and state it to the audit round by round.",
        ("low residual", "some rounds"),
        ("repeat", "low layer"),
        may_move=("known-others", "low difference", "uneven scores"),
    ),
    Signature(
        "noise-after-adam",
        "noise added after an adaptive server optimiser",
        "The optimiser scales the average up first, so the noise is small beside it.",
        "Add the noise to the average, before the optimiser sees it.",
        ("known-others",),
        may_move=("high residual", "high layer", "repeat", "rank", *FOLLOWS),
    ),
    Signature(
        "coin-flips",
        "noise is coin flips",
        "Each coordinate gets plus or minus one std. An attacker who knows all other updates reads the signs and subtracts "
        "the noise.",
        "Draw the noise from a Gaussian: the accounting holds for no other law.",
        ("few values", "light tails", "distribution"),
        ("bare coordinates",),
        may_move=("grid", "repeated values"),
    ),
    _bounded_noise("uniform-noise", "uniform noise"),
    _bounded_noise("truncated-noise", "Gaussian noise without its tails"),
    Signature(
        "coarse-grid",
        "noise on a grid of 2 std",
        "The noise takes few values, and the clients' sum is not rounded to them: the part off the grid is the sum.",
        "Round the sum with its noise, not the noise alone, or use a discrete mechanism and its own accounting.",
        ("few values", "distribution", "bare coordinates"),
        may_move=("heavy tails", "grid", "repeated values"),
    ),
    Signature(
        "fine-grid",
        "noise on a grid of a quarter std",
        "The noise lies on a grid, and the clients' sum does not: the part off the grid is the sum.",
        "Round the sum with its noise, not the noise alone, or use a discrete mechanism and its own accounting.",
        ("grid",),
        may_move=("bare coordinates", "distribution", "few values", "repeated values"),
    ),
    Signature(
        "laplace-noise",
        "Laplace noise of the same std",
        "The noise has heavier tails than a Gaussian and more values near 0, where it hides less.",
        "Draw the noise from a Gaussian: the accounting holds for no other law.",
        ("heavy tails", "distribution"),
        ("few values", "noise follows others"),
        may_move=(
            "noise follows canaries",
            "bare coordinates",
            "low residual",
            "high residual",
            "low layer",
            "high layer",
            "some rounds",
        ),
    ),
    _signal_dependent_noise("noise-on-larger-half", "noise only on the larger half of the coordinates"),
    _signal_dependent_noise("noise-times-signal", "noise in proportion to the signal"),
    Signature(
        "noise-key-reused",
        "one random key for all tensors",
        "Every tensor gets the same noise from its start on, so the difference of two tensors has none.",
        "Split the key, or draw all tensors from one stream.",
        ("shared draws", "repeated values"),
        ("neighbours", "repeat"),
        may_move=("spectrum", "rank"),
    ),
    Signature(
        "noise-in-pairs",
        "one draw for two neighbouring coordinates",
        "Two coordinates share their noise, so their difference has none.",
        "Draw as many random numbers as there are coordinates.",
        ("neighbours", "repeated values"),
        ("repeat",),
        may_move=("spectrum", "rank", "distribution"),
    ),
    Signature(
        "noise-from-pool",
        "noise cut from one pool for all rounds",
        "The same random numbers are used more than once, in other places: an attacker who finds them subtracts them.",
        "Draw fresh noise in every round and for every coordinate.",
        ("repeated values",),
        ("spectrum", "repeat"),
        may_move=("distribution", "neighbours", "shared draws", "rank"),
    ),
    Signature(
        "noise-pieces-from-pool",
        "pieces of one pool repeated within a round",
        "The same random numbers are used more than once, in other places: an attacker who finds them subtracts them.",
        "Draw fresh noise in every round and for every coordinate.",
        ("repeated values", "spectrum"),
        ("shared draws", "repeat"),
        may_move=("distribution", "rank", "neighbours", "low residual", "high residual", "low layer", "high layer"),
    ),
    Signature(
        "noise-in-subspace",
        "noise in a fixed half of the dimensions",
        "The noise lies in the same subspace in every round. All directions outside it are released without noise.",
        "Draw independent noise for every coordinate; do not project it or make it from a smaller vector.",
        ("rank",),
        ("low layer", "low difference"),
        may_move=("repeat", "low residual", "some rounds", "neighbours", "spectrum"),
    ),
    Signature(
        "canaries-twice",
        "updates counted twice",
        "Every canary, and so every client, enters the sum twice, while the noise is sized for once.",
        "Add each update once. Look for a retried reply that is added again.",
        ("known-others",),
        ("low residual", "high residual", "repeat"),
        may_move=WEAKER_RUNGS,
    ),
    Signature(
        "weighted-by-examples",
        "updates weighted by examples",
        "A client with many examples counts more than the noise was sized for.",
        "Weigh all clients equally, or size the noise for the largest weight.",
        ("known-others",),
        ("low residual", "high residual", "repeat"),
        may_move=WEAKER_RUNGS,
    ),
    Signature(
        "canaries-lost",
        "half of the canaries lost, and too little noise",
        "The mean score looks right, as lost canaries lower it and missing noise raises it.",
        "Find out why canaries do not arrive, and compare the std of the noise that is drawn with z·C.",
        ("low residual", "uneven scores"),
        ("repeat", "low layer", "some rounds"),
        may_move=("known-others", "low difference"),
    ),
    Signature(
        "others-wrong",
        "`others` is not what was summed",
        "Privacy may hold; the audit cannot tell. `others` is not the other clients' part of the model delta, so the "
        "residual is not the noise.",
        "Pass the clipped sum of the real clients, divided and scaled as the model delta is.",
        ("others",),
        ("low difference", "known-round"),
        may_move=WRONG_OTHERS,
    ),
    Signature(
        "others-incomplete",
        "`others` incomplete, and too little noise",
        "`others` leaves out some clients. Their updates are taken for noise and make up for the missing noise.",
        "Pass the sum of all real clients as `others`, and compare the std of the noise that is drawn with z·C.",
        ("others", "low difference"),
        ("known-round",),
        may_move=WRONG_OTHERS,
    ),
    Signature(
        "one-client-twice",
        "one client in n counted twice",
        "One real client enters the sum twice.",
        "Look for a retried reply that is added again.",
        reason="only that client leaks more, and no canary is in its place: canaries tell nothing about other clients",
    ),
    Signature(
        "clip-forgotten-at-scale-1",
        "clipping forgotten, canaries no longer than the clip norm",
        "Updates enter the sum at any length, and no canary sends one that a clip would shorten.",
        "Clip every update, and let canaries send more than the clip norm (`canaries.scale`): then it is detected.",
        reason="a canary of the clip norm itself enters the sum in the same way with and without clipping",
    ),
    Signature(
        "weighted-mean-declared",
        "updates weighted by examples, canaries of the mean weight",
        "A client with many examples counts more than the noise was sized for, and no canary counts as much.",
        "Weigh all clients equally, and let canaries declare the largest weight that a client may have, as ours do.",
        reason="a canary of the mean weight leaks what the noise was sized for; only larger clients leak more",
    ),
)


def evidence_of(result: AuditResult) -> set[str]:
    """The evidence in a result, in the terms of the signatures.

    A rung that refutes the claim keeps its name. A gauge of norms is "low" or "high" by its reading: its status does not
    tell if `others` is wrong. A gauge of the noise's law keeps its name.
    """
    gauges = {gauge.name: gauge for gauge in result.gauges}
    outside = {name: gauge for name, gauge in gauges.items() if gauge.status != "ok"}
    evidence = {
        name for name, rung in result.adversaries.items() if rung.verdict and rung.verdict.outcome == Outcome.VIOLATION
    }
    evidence |= {f"{_side(gauge)} {name.removeprefix('pooled ')}" for name, gauge in outside.items() if name in LENGTHS}
    evidence |= {name for name in LAW if name in outside}
    repeats = [gauge for name, gauge in outside.items() if name in ("repeat", "repeat of any")]
    # Noise on few coordinates is little noise, and its cosines spread as in few dimensions: by chance, not by repetition.
    if any("low residual" not in evidence or gauge.smallest > 0.5 for gauge in repeats):
        evidence.add("repeat")
    for name, gaussian in (("tails", 1.0), ("shape", 3.0)):
        if name in outside:
            evidence -= {
                "light tails",
                "heavy tails",
            }  # if the two disagree, the moment is more reliable than the extremes
            evidence.add("light tails" if outside[name].smallest < gaussian else "heavy tails")
    if "bare coordinates" in outside and outside["bare coordinates"].largest > BARE:
        evidence.add("bare coordinates")
    if "grid" in outside and outside["grid"].largest > GRID:
        evidence.add("grid")
    if "distribution" in outside and "grid" in gauges and gauges["grid"].largest > FEW_VALUES:
        evidence.add("few values")
    if "low residual" in evidence and _in_some_rounds(outside.get("residual"), result.rounds):
        evidence.add("some rounds")
    if _has_uneven_scores(result.adversaries.get("known-others")):
        evidence.add("uneven scores")
    layers = {name.removeprefix("layer "): gauge for name, gauge in gauges.items() if name.startswith("layer ")}
    if _has_low_layers(list(layers.values())):
        evidence.add("low layer")
    if _has_lone_layer(layers):
        evidence.add("lone layer")
    if any(layer.status != "ok" and _side(layer) == "high" for layer in layers.values()):
        evidence.add("high layer")
    return evidence


def _side(gauge: Gauge) -> str:
    """The side of its limits on which a gauge of norms lies; "low" if on both, since that is the proof."""
    if gauge.status == "low" or gauge.smallest < gauge.limits[0]:
        return "low"
    return "high"


def _in_some_rounds(residual: Gauge | None, rounds: int) -> bool:
    """Whether noise is missing in some rounds, and the others have all of it."""
    if residual is None or residual.status != "low":
        return False
    return 0 < len(residual.flagged) < rounds and residual.largest > residual.limits[0]


def _has_uneven_scores(rung: Adversary | None) -> bool:
    """Whether the scores of observed canaries spread more than the noise explains: they do not all count equally."""
    if rung is None:
        return False
    error, row = 5 / math.sqrt(2 * rung.headline.canaries), rung.headline.estimate
    excess = row.std**2 - row.null_std**2
    above = row.std > max(SPREAD, 1 + error) * row.null_std
    return bool(above and excess > (SPREAD_OF_MEAN * row.mean) ** 2)


def _has_low_layers(layers: list[Gauge]) -> bool:
    """Whether some layers have less noise than others, not all of them less than claimed."""
    low = [layer.largest for layer in layers if layer.status == "low"]
    fine = [layer.smallest for layer in layers if layer.status == "ok"]
    apart = bool(low) and min(low) < 0.8 * max(layer.smallest for layer in layers)
    return apart or (bool(low) and bool(fine) and max(fine) > max(low))


def _has_lone_layer(layers: Mapping[str, Gauge]) -> bool:
    """Whether one layer (its weight, its bias or both) has the claimed noise, and all others have practically none."""
    low = [layer.largest for layer in layers.values() if layer.status == "low"]
    fine = {name: layer.smallest for name, layer in layers.items() if layer.status != "low"}
    owners = {name.rpartition(".")[0] or name for name in fine}
    return bool(low) and len(owners) == 1 and max(low) < 0.2 * min(fine.values())


def likely_faults(result: AuditResult, most: int = 5) -> list[Signature]:
    """The faults that fit a result best, with ties: most evidence explained, least contradicted."""
    evidence, possible = evidence_of(result), _possible_evidence(result)
    if not evidence:
        return []
    rated = [
        (_fit(fault, evidence, possible), fault) for fault in SIGNATURES if evidence & {*fault.moves, *fault.may_move}
    ]
    rated.sort(key=lambda pair: -pair[0])
    return [fault for rating, fault in rated[:most] if rating == rated[0][0]]


def _possible_evidence(result: AuditResult) -> set[str]:
    """Evidence that the result could have shown, because it has the rung or the gauge."""
    sources = {
        *result.adversaries,
        *(gauge.name.split()[0] if gauge.name.startswith(LAYER) else gauge.name for gauge in result.gauges),
    }
    return {word for word, source in SOURCES.items() if source in sources}


def _fit(fault: Signature, evidence: set[str], possible: set[str]) -> int:
    """How well a fault explains the evidence.

    Evidence that the fault does not explain counts against it. So does evidence that it would have shown but did not.
    Evidence that points to another fault counts twice more.
    """
    explained = len(evidence & {*fault.moves, *fault.may_move})
    missing = len((set(fault.moves) & possible) - evidence)
    return 2 * explained - len(evidence) - missing - 2 * len(evidence & set(fault.spares))
