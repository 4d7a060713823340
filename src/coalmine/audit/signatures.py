"""What each known fault moves: data for the self-test, and for a report that says what is likely wrong."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Signature:
    """A fault: what it is, what it means, how to mend it, and which rungs and gauges it moves.

    `moves` names evidence that the fault brings about, `may_move` what comes with it in some runs, `spares` evidence that
    would speak for another fault. Empty `moves`: this audit cannot see it, for the `reason` given.
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


LESS_NOISE = ("known-others", "low residual")
WEAKER_RUNGS = ("known-round", "all-iterates")

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
        "One client may move the average as far as it likes, up to the clip norm of all together. The clip shortens all "
        "parts alike, so what is left without the others is more than noise, and much the same in every round.",
        "Clip each update before it is added, not the sum or the average.",
        ("known-round", "known-others", "high residual", "repeat"),
        ("low residual", "low difference"),
        may_move=("all-iterates",),
    ),
    Signature(
        "noise-over-n",
        "noise divided by n twice",
        "The noise std was divided by the number of clients before the average divided it again.",
        "Add noise of std z·C to the sum, then divide once.",
        LESS_NOISE,
        ("repeat",),
    ),
    Signature(
        "noise-over-2",
        "half the noise",
        "The noise std is half of what is claimed: the clip norm or the multiplier is not the one that was accounted for.",
        "Compare the std of the noise that is drawn with z·C.",
        LESS_NOISE,
        ("repeat",),
    ),
    Signature(
        "noise-over-root-2",
        "noise too small by √2",
        "A variance was taken for a std, or each of two parties added half of the variance and one of them is missing.",
        "Compare the std of the noise that is drawn with z·C.",
        LESS_NOISE,
        ("repeat",),
    ),
    Signature(
        "noise-times-n",
        "far too much noise",
        "Privacy holds and the model is drowned: the noise was not divided by n with the sum.",
        "Add noise of std z·C to the sum, then divide once.",
        ("high residual",),
        ("known-others",),
    ),
    Signature(
        "noise-reused",
        "the same noise in every round",
        "The difference of two rounds has no noise at all: a generator is seeded anew in every round.",
        "Seed the generator once, or from the round number too.",
        ("repeat", "low difference"),
    ),
    Signature(
        "noise-on-half",
        "noise on half of the coordinates",
        "Some layers are released without noise.",
        "Add noise to every parameter that is released, buffers included.",
        (*LESS_NOISE, "low layer"),
        ("repeat",),
    ),
    Signature(
        "noise-on-90-percent",
        "a tenth of the coordinates without noise",
        "Some layers are released without noise.",
        "Add noise to every parameter that is released, buffers included.",
        ("low residual", "low layer"),
        ("repeat",),
    ),
    Signature(
        "noise-on-one-layer",
        "noise on one layer only",
        "One layer is released with noise, all others without.",
        "Add noise to every parameter that is released, buffers included.",
        ("low residual", "low layer", "lone layer"),
        ("repeat",),
        may_move=("known-others",),
    ),
    Signature(
        "small-tensor-without-noise",
        "a small tensor without noise",
        "A bias or a buffer is released without noise; it is too small to move anything but its own gauge.",
        "Add noise to every parameter that is released; name layers to the audit so that each has its gauge.",
        ("low layer",),
        ("low residual", "repeat"),
    ),
    Signature(
        "noise-after-adam",
        "noise added after an adaptive server optimiser",
        "The optimiser scales the average up first, so the noise is small beside it.",
        "Add the noise to the average, before the optimiser sees it.",
        ("known-others",),
        may_move=("high residual", "repeat"),
    ),
    Signature(
        "canaries-twice",
        "updates counted twice",
        "Every canary, and so every client, enters the sum twice while the noise is sized for once.",
        "Add each update once; look for a retried reply that is added again.",
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
        "one-client-twice",
        "one client in n counted twice",
        "One real client enters the sum twice.",
        "Look for a retried reply that is added again.",
        reason="only that client leaks more, and no canary took its place: a canary says nothing of others",
    ),
    Signature(
        "clip-forgotten-at-scale-1",
        "clipping forgotten, canaries no longer than the clip norm",
        "Updates enter the sum at any length, and no canary sends one that a clip would shorten.",
        "Clip every update, and let canaries send more than the clip norm (`canaries.scale`): then it is seen.",
        reason="a canary of the clip norm itself enters the sum alike with a clip and without",
    ),
    Signature(
        "weighted-mean-declared",
        "updates weighted by examples, canaries of the mean weight",
        "A client with many examples counts more than the noise was sized for, and no canary counts as much.",
        "Weigh all clients equally, and let canaries declare the largest weight that a client may have, as ours do.",
        reason="a canary of the mean weight leaks what the noise was sized for; only larger clients leak more",
    ),
)


def evidence_of(result: Mapping[str, Any]) -> set[str]:
    """Evidence in a result as `to_dict` has it, in the words of the signatures."""
    found = {name for name, rung in result["adversaries"].items() if rung["verdict"] == "VIOLATION"}
    for name, gauge in result["gauges"].items():
        kind = name.split()[0]
        if gauge["status"] != "ok" and kind not in ("layer", "repeat"):
            found.add(f"{'low' if gauge['status'] == 'low' else 'high'} {kind}")
    repeats = [
        gauge for name, gauge in result["gauges"].items() if name.startswith("repeat") and gauge["status"] != "ok"
    ]
    # Noise on few coordinates is little noise, and its cosines spread as in few dimensions: by chance, not by repetition.
    if any("low residual" not in found or gauge["smallest"] > 0.5 for gauge in repeats):
        found.add("repeat")
    layers = {
        name.removeprefix("layer "): gauge for name, gauge in result["gauges"].items() if name.startswith("layer ")
    }
    if _uneven(list(layers.values())):
        found.add("low layer")
    if _lone(layers):
        found.add("lone layer")
    return found


def _uneven(layers: list[Mapping[str, Any]]) -> bool:
    """Whether some layers have less noise than others, not all of them less than claimed."""
    low = [layer["largest"] for layer in layers if layer["status"] == "low"]
    fine = [layer["smallest"] for layer in layers if layer["status"] == "ok"]
    apart = bool(low) and min(low) < 0.8 * max(layer["smallest"] for layer in layers)
    return apart or (bool(low) and bool(fine) and max(fine) > max(low))


def _lone(layers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether one layer (its weight, its bias or both) has the claimed noise, and all the others next to none."""
    low = [layer["largest"] for layer in layers.values() if layer["status"] == "low"]
    fine = {name: layer["smallest"] for name, layer in layers.items() if layer["status"] != "low"}
    owners = {name.rpartition(".")[0] or name for name in fine}
    return bool(low) and len(owners) == 1 and max(low) < 0.2 * min(fine.values())


def likely_faults(result: Mapping[str, Any], most: int = 5) -> list[Signature]:
    """The faults that fit best what a result shows: most evidence explained, least against; several if alike."""
    seen = evidence_of(result)
    if not seen:
        return []
    rated = [(_fit(fault, seen), fault) for fault in SIGNATURES if seen & set(fault.moves)]
    rated.sort(key=lambda pair: -pair[0])
    return [fault for rating, fault in rated[:most] if rating == rated[0][0]]


def _fit(fault: Signature, seen: set[str]) -> int:
    """How well a fault explains what was seen: evidence against it counts twice."""
    explained = seen & {*fault.moves, *fault.may_move}
    return len(explained) - len(set(fault.moves) - seen) - 2 * len(seen & set(fault.spares))
