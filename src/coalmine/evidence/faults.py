"""Known faults of a private training: what each means, and how to fix it.

The gauges say which of them they see (`coalmine.evidence.gauges`), and `coalmine.known_faults` names the likely ones.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault: its title, its meaning and its fix. With a `reason`, no audit with canaries can detect it.

    `noise_left` is the share of the stated noise that it leaves in every round, if it leaves the same in all.
    """

    name: str
    title: str
    meaning: str
    fix: str
    reason: str = ""
    noise_left: float | None = None

    @property
    def detectable(self) -> bool:
        return self is not HONEST and not self.reason


_ADD_THEN_DIVIDE = "Add noise of std z·C to the sum, then divide once."
_DRAW_GAUSSIAN = "Draw the noise from a Gaussian: the accounting holds for no other law."
_ROUND_BOTH = "Round the sum with its noise, not the noise alone, or use a discrete mechanism and its own accounting."
_EVERY_COORDINATE_ALIKE = "Add noise of the same std to every coordinate, whatever the clients sent."
_EVERY_PARAMETER = "Add noise to every parameter that is released, buffers included."
_BARE_LAYERS = "Some layers are released without noise."
_BOUNDED_SUPPORT = "The noise has bounded support. A release outside its range proves that a client took part."
_FOLLOWS_SIGNAL = (
    "The noise follows the signal: coordinates with a small signal are released with little noise or none."
)
_USED_TWICE = (
    "The same random numbers are used more than once, in other places: an attacker who finds them subtracts them."
)
_COMPARE_STD = "Compare the drawn noise's std with noise multiplier × clip norm."
_DRAW_ANEW = "Draw fresh noise in every round and for every coordinate."
HONEST = Fault("honest", "nothing is broken", "Every step does what it claims.", "No fix needed.")
CLIP_FORGOTTEN = Fault(
    "clip-forgotten",
    "clipping forgotten",
    "Updates enter the sum at any length, so the noise covers only a part of them.",
    "Scale every update to at most the clip norm before it is added.",
)
CLIP_AFTER_AVERAGING = Fault(
    "clip-after-averaging",
    "the average is clipped, not the updates",
    "One client can move the average by the whole clip norm. The clip shortens all parts alike, so subtracting "
    "`others` leaves more than noise, and much the same in every round.",
    "Clip each update before it is added, not the sum or the average.",
)
NOISE_OVER_N = Fault(
    "noise-over-n",
    "noise divided by n twice",
    "The noise std was divided by the number of clients before the average divided it again.",
    _ADD_THEN_DIVIDE,
    noise_left=0.05,
)
NOISE_OVER_2 = Fault(
    "noise-over-2",
    "half the noise",
    "The noise std is half of what is claimed: the clip norm or the multiplier is not the one that was accounted for.",
    _COMPARE_STD,
    noise_left=0.5,
)
NOISE_OVER_ROOT_2 = Fault(
    "noise-over-root-2",
    "noise too small by √2",
    "A variance was taken for a std, or two parties were to add half of the variance each and one of them did not.",
    _COMPARE_STD,
    noise_left=math.sqrt(0.5),
)
NOISE_TIMES_N = Fault(
    "noise-times-n",
    "far too much noise",
    "Privacy holds, but the noise drowns the model: it was not divided by n with the sum.",
    _ADD_THEN_DIVIDE,
)
NOISE_REUSED = Fault(
    "noise-reused",
    "the same noise in every round",
    "The difference of two rounds has no noise at all: a generator is seeded anew in every round.",
    "Seed the generator once, or from the round number too.",
)
NOISE_ON_HALF = Fault("noise-on-half", "noise on half of the coordinates", _BARE_LAYERS, _EVERY_PARAMETER)
NOISE_ON_90_PERCENT = Fault(
    "noise-on-90-percent", "a tenth of the coordinates without noise", _BARE_LAYERS, _EVERY_PARAMETER
)
NOISE_ON_ONE_LAYER = Fault(
    "noise-on-one-layer",
    "noise on one layer only",
    "One layer is released with noise, all others without.",
    _EVERY_PARAMETER,
)
SMALL_TENSOR_WITHOUT_NOISE = Fault(
    "small-tensor-without-noise",
    "a small tensor without noise",
    "A bias or a buffer is released without noise. It is too small to change the length of the whole residual.",
    "Add noise to every parameter that is released. Name the layers to the audit so that each has its own gauge.",
)
NOISE_IN_LAST_ROUNDS = Fault(
    "noise-in-last-rounds",
    "half the noise in the last rounds",
    "Some rounds have less noise than claimed: a schedule or a second phase of training changed it.",
    "Account for the noise of every round, and state it to the audit round by round.",
)
NOISE_AFTER_ADAM = Fault(
    "noise-after-adam",
    "noise added after an adaptive server optimiser",
    "The optimiser scales the average up first, so the noise is small beside it.",
    "Add the noise to the average, before the optimiser sees it.",
)
COIN_FLIPS = Fault(
    "coin-flips",
    "noise is coin flips",
    "Each coordinate gets plus or minus one std. An attacker who knows all other updates reads the signs and "
    "subtracts the noise.",
    _DRAW_GAUSSIAN,
)
UNIFORM_NOISE = Fault("uniform-noise", "uniform noise", _BOUNDED_SUPPORT, _DRAW_GAUSSIAN)
TRUNCATED_NOISE = Fault("truncated-noise", "Gaussian noise without its tails", _BOUNDED_SUPPORT, _DRAW_GAUSSIAN)
COARSE_GRID = Fault(
    "coarse-grid",
    "noise on a grid of 2 std",
    "The noise takes few values, and the clients' sum is not rounded to them: the part off the grid is the sum.",
    _ROUND_BOTH,
)
FINE_GRID = Fault(
    "fine-grid",
    "noise on a grid of a quarter std",
    "The noise lies on a grid, and the clients' sum does not: the part off the grid is the sum.",
    _ROUND_BOTH,
)
LAPLACE_NOISE = Fault(
    "laplace-noise",
    "Laplace noise of the same std",
    "The noise has heavier tails than a Gaussian and more values near 0, where it hides less.",
    _DRAW_GAUSSIAN,
)
NOISE_ON_LARGER_HALF = Fault(
    "noise-on-larger-half", "noise only on the larger half of the coordinates", _FOLLOWS_SIGNAL, _EVERY_COORDINATE_ALIKE
)
NOISE_TIMES_SIGNAL = Fault(
    "noise-times-signal", "noise in proportion to the signal", _FOLLOWS_SIGNAL, _EVERY_COORDINATE_ALIKE
)
NOISE_KEY_REUSED = Fault(
    "noise-key-reused",
    "one random key for all tensors",
    "Every tensor gets the same noise from its start on, so the difference of two tensors has none.",
    "Split the key, or draw all tensors from one stream.",
)
NOISE_IN_PAIRS = Fault(
    "noise-in-pairs",
    "one draw for two neighbouring coordinates",
    "Two coordinates share their noise, so their difference has none.",
    "Draw as many random numbers as there are coordinates.",
)
NOISE_FROM_POOL = Fault("noise-from-pool", "noise cut from one pool for all rounds", _USED_TWICE, _DRAW_ANEW)
NOISE_PIECES_FROM_POOL = Fault(
    "noise-pieces-from-pool", "pieces of one pool repeated within a round", _USED_TWICE, _DRAW_ANEW
)
NOISE_IN_SUBSPACE = Fault(
    "noise-in-subspace",
    "noise in a fixed half of the dimensions",
    "The noise lies in the same subspace in every round. All directions outside it are released without noise.",
    "Draw independent noise for every coordinate; do not project it or make it from a smaller vector.",
)
CANARIES_TWICE = Fault(
    "canaries-twice",
    "updates counted twice",
    "Every canary, and so every client, enters the sum twice, while the noise is sized for once.",
    "Add each update once. Look for a retried reply that is added again.",
)
WEIGHTED_BY_EXAMPLES = Fault(
    "weighted-by-examples",
    "updates weighted by examples",
    "A client with many examples counts more than the noise was sized for.",
    "Weigh all clients equally, or size the noise for the largest weight.",
)
CANARIES_LOST = Fault(
    "canaries-lost",
    "half of the canaries lost, and too little noise",
    "The mean score looks right, as lost canaries lower it and missing noise raises it.",
    "Find out why canaries do not arrive, and compare the drawn noise's std with noise multiplier × clip norm.",
)
OTHERS_WRONG = Fault(
    "others-wrong",
    "`others` is not what was summed",
    "Privacy may hold; the audit cannot tell. `others` is not the other clients' part of the model delta, so the "
    "residual is not the noise.",
    "Pass the clipped sum of the real clients, divided and scaled as the model delta is.",
)
OTHERS_INCOMPLETE = Fault(
    "others-incomplete",
    "`others` incomplete, and too little noise",
    "`others` leaves out some clients. Their updates are taken for noise and make up for the missing noise.",
    "Pass the sum of all real clients as `others`, and compare the drawn noise's std with noise multiplier × clip norm.",
)
ONE_CLIENT_TWICE = Fault(
    "one-client-twice",
    "one client in n counted twice",
    "One real client enters the sum twice.",
    "Look for a retried reply that is added again.",
    "only that client leaks more, and no canary is in its place: canaries tell nothing about other clients",
)
CLIP_FORGOTTEN_AT_SCALE_1 = Fault(
    "clip-forgotten-at-scale-1",
    "clipping forgotten, canaries no longer than the clip norm",
    "Updates enter the sum at any length, and no canary sends one that a clip would shorten.",
    "Clip every update, and let canaries send more than the clip norm (`canaries.scale`): then it is detected.",
    "a canary of the clip norm itself enters the sum in the same way with and without clipping",
)
WEIGHTED_MEAN_DECLARED = Fault(
    "weighted-mean-declared",
    "updates weighted by examples, canaries of the mean weight",
    "A client with many examples counts more than the noise was sized for, and no canary counts as much.",
    "Weigh all clients equally, and let canaries declare the largest weight that a client may have, as ours do.",
    "a canary of the mean weight leaks what the noise was sized for; only larger clients leak more",
)

# Faults that show alike.
LITTLE_NOISE = (NOISE_OVER_N, NOISE_OVER_2, NOISE_OVER_ROOT_2)
SCALED_UPDATES = (CLIP_FORGOTTEN, CANARIES_TWICE, WEIGHTED_BY_EXAMPLES)
BARE_PARTS = (NOISE_ON_HALF, NOISE_ON_90_PERCENT, NOISE_ON_ONE_LAYER)
BOUNDED_NOISE = (UNIFORM_NOISE, TRUNCATED_NOISE)
SIGNAL_IN_NOISE = (NOISE_ON_LARGER_HALF, NOISE_TIMES_SIGNAL)
POOLED_NOISE = (NOISE_FROM_POOL, NOISE_PIECES_FROM_POOL)
WRONG_OTHERS = (CLIP_AFTER_AVERAGING, OTHERS_WRONG, OTHERS_INCOMPLETE)
MIXED_NOISE = (*WRONG_OTHERS, *BARE_PARTS, *SIGNAL_IN_NOISE)

FAULTS = tuple(value for value in list(vars().values()) if isinstance(value, Fault))
