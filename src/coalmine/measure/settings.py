"""The settings of an audit: everything that is fixed before the first round, but the seed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import WrongTypeError, delta_array, one_number, short_repr, whole_number
from coalmine.estimators.correlated import BandedNoise, CorrelatedNoise, TreeNoise, correlated_noise
from coalmine.estimators.sampling import Sampling, checked_sampling, sampling_from_dict, sampling_to_dict

LARGEST = 10**12  # of dim and canaries: a vector of that many numbers fits in no memory
MOST_ROUNDS = 10**6
FEWEST = 10  # fewest canaries
FEWEST_WITH_MOMENTUM = 200  # fewest unobserved canaries with momentum or correlated noise
UNOBSERVED_EACH = 10  # unobserved canaries per observed one, if the dimension allows
SAMPLED, SAMPLED_EACH = (
    1 << 15,
    256,
)  # coordinates of a replicated model whose noise is measured: in total, and per layer
PARTS_OF_ALL, SKETCHES = 1 << 12, 1 << 14  # over all blocks: parts whose norm is measured, numbers in sketches
LAW_STRETCH = 1 << 18  # most coordinates per block whose noise law is measured, if there are several blocks
BLOCK_EACH = 8  # fewest coordinates of a block per observed canary, if there are several blocks
OPTIONAL = ("noise", "sampling", "blocks", "processes", "shards")  # settings that are omitted if empty


@dataclass(frozen=True, kw_only=True)
class Settings:
    """An audit's settings: everything but the seed. `layers` are names and sizes, in the order of the vector.

    `noise` is the correlation of the noise between rounds; None if it is independent in every round. `sampling` is the
    scheme that hides the clients' rounds; None if none was declared. `blocks` are the sizes of the canaries' blocks, in the
    order of the `processes`; empty if the vector is one block. `shards` holds, for each process, how much of each layer it
    has; empty if every process has them all.
    """

    dim: int
    canaries: int
    unobserved: int
    delta: float
    kind: str = "rotated"
    rounds: int | None = None
    presentations: tuple[int, ...] = (1,)
    momentum: float = 0.0
    layers: tuple[tuple[str, int], ...] = ()
    noise: CorrelatedNoise | None = None
    sampling: Sampling | None = None
    blocks: tuple[int, ...] = ()
    processes: int = 1
    shards: tuple[tuple[int, ...], ...] = ()

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Sizes of all blocks, in the order of the vector."""
        return self.blocks or (self.dim,)

    @property
    def replicated(self) -> bool:
        """Whether each of several processes holds the whole model, and a part of the sum of all other updates."""
        return self.processes > 1 and not self.shards

    @property
    def gauged_layers(self) -> tuple[tuple[str, int], ...]:
        """The layers' names, and the number of coordinates of each whose noise is measured: usually all.

        No process has the whole residual of a replicated model. There the processes add up their parts of a slice of each
        layer, so that they exchange only a few numbers per layer.
        """
        if not self.replicated or self.dim <= SAMPLED:
            return self.layers
        return tuple((name, min(size, max(SAMPLED * size // self.dim, SAMPLED_EACH))) for name, size in self.layers)

    @property
    def in_blocks(self) -> bool:
        """Whether the residual is measured block by block, by processes that hold whole blocks."""
        return len(self.blocks) > 1 and not self.replicated

    @property
    def chunks(self) -> int:
        """The number of equal parts of each block whose norms are measured."""
        return min(max(PARTS_OF_ALL // len(self.block_sizes), 1), 16)

    @property
    def sketch(self) -> int:
        """The number of values kept of each block's noise, to compare blocks with each other."""
        return min(max(SKETCHES // len(self.block_sizes), 8), 256, min(self.block_sizes) // 4)

    @property
    def law_stretches(self) -> tuple[slice, ...]:
        """The slice in the middle of each block whose noise law is measured; the whole vector if it is one block."""
        if not self.blocks:
            return (slice(0, self.dim),)
        sizes = [(size, min(size, LAW_STRETCH)) for size in self.blocks]
        return tuple(slice((size - taken) // 2, (size - taken) // 2 + taken) for size, taken in sizes)

    @property
    def law_dim(self) -> int:
        """The number of coordinates whose noise law is measured."""
        if self.replicated:
            return sum(size for _, size in self.gauged_layers)
        return sum(part.stop - part.start for part in self.law_stretches)

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """The slices of the vector that belong to one layer: the layer's index and the slice's size."""
        held = self.shards or (tuple(size for _, size in self.layers),)
        return tuple((layer, size) for sizes in held for layer, size in enumerate(sizes) if size)

    @property
    def total(self) -> int:
        """The number of observed and unobserved canaries."""
        return self.canaries + self.unobserved

    @property
    def free(self) -> float:
        """Directions from which the null's scale is estimated: those orthogonal to orthonormal observed canaries.

        With several blocks this is the smallest possible number, that of a vector in the smallest block; a round's own
        number follows from its norms.
        """
        if self.kind != "rotated":
            return self.dim
        if len(self.blocks) < 2:
            return self.dim - self.canaries
        return self.dim * (1 - self.canaries / min(self.blocks))

    @property
    def unobserved_dof(self) -> float:
        """Degrees of freedom along the unobserved canaries: fewer than their number if they are not orthogonal."""
        if self.kind == "rotated":
            return float(self.unobserved)
        return self.unobserved * self.dim / (self.unobserved + self.dim)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self) | {
            "noise": self.noise and self.noise.to_dict(),
            "sampling": self.sampling and sampling_to_dict(self.sampling),
        }
        values["processes"] = self.processes if self.processes > 1 else None
        return {name: value for name, value in values.items() if name not in OPTIONAL or value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Settings":
        """The inverse of `to_dict`; ValueError for settings that no audit can have."""
        values = msgspec.convert(values, dict[str, Any])
        types = get_type_hints(cls)
        unknown = sorted(values.keys() - types.keys())
        if unknown:
            raise ValueError(f"unknown settings: {short_repr(unknown)}")
        missing = sorted({"dim", "canaries", "unobserved", "delta"} - values.keys())
        if missing:
            raise ValueError(f"settings without {', '.join(missing)}")
        try:
            noise = correlated_noise(values["noise"]) if values.get("noise") else None
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"noise must have the form that an audit writes, got {short_repr(values['noise'])} ({error})"
            ) from None
        sampling = sampling_from_dict(values["sampling"]) if values.get("sampling") else None
        objects = ("noise", "sampling")
        plain = {name: msgspec.convert(value, types[name]) for name, value in values.items() if name not in objects}
        settings = cls(**plain, noise=noise, sampling=sampling)
        others = {name: value for name, value in vars(settings).items() if name != "dim"}
        if checked_settings(settings.dim, **others) != settings:
            raise ValueError("settings that no audit writes")
        return settings


def checked_settings(
    dim: int,
    *,
    canaries: int,
    unobserved: int | None,
    delta: float,
    kind: str,
    rounds: int | None,
    presentations: int | Sequence[int],
    momentum: float,
    layers: Sequence[tuple[str, int]] | None,
    noise: CorrelatedNoise | None = None,
    sampling: Sampling | None = None,
    blocks: Sequence[int] = (),
    processes: int = 1,
    shards: Sequence[Sequence[int]] = (),
) -> Settings:
    """The settings, or a ValueError that names the invalid one."""
    dim = whole_number("dim", dim, minimum=2)
    canaries = whole_number("canaries", canaries, minimum=FEWEST)
    for name, number in (("dim", dim), ("canaries", canaries)):
        if number > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST:,}, got {short_repr(number)}")
    if kind not in ("rotated", "sphere"):
        raise ValueError(f"kind must be 'rotated' or 'sphere', got {kind!r}")
    if canaries + FEWEST > dim:
        raise ValueError(
            f"canaries must leave {FEWEST} directions for unobserved ones, got {canaries} canaries in dimension {dim}"
        )
    cut = _checked_blocks(blocks, dim, canaries, kind)
    wanted = _checked_unobserved(unobserved, canaries, dim, cut)
    beta = one_number("momentum", momentum)
    if not 0 <= beta < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {beta}")
    if noise is not None and not isinstance(noise, TreeNoise | BandedNoise):
        raise WrongTypeError(f"noise must be a TreeNoise, a BandedNoise or None, got {short_repr(noise)}")
    if (beta or noise) and wanted < FEWEST_WITH_MOMENTUM:
        undone = "momentum is undone" if beta else "correlated noise is whitened"
        raise ValueError(
            f"unobserved must be at least {FEWEST_WITH_MOMENTUM} if {undone}, since norms are measured along "
            f"them, got {wanted}"
        )
    named = _checked_layers(layers, dim)
    groups = tuple(presentations) if isinstance(presentations, Sequence) else (presentations,)
    if sampling is not None:
        rounds = _rounds_of(checked_sampling(sampling), rounds, groups)
    if rounds is not None and whole_number("rounds", rounds, minimum=1) > MOST_ROUNDS:
        raise ValueError(f"rounds must be at most {MOST_ROUNDS:,}, got {short_repr(rounds)}")
    most = presentation_counts(canaries, groups).max()
    if rounds is not None and most > rounds:
        raise ValueError(f"presentations must be at most rounds = {rounds}, got {most}")
    return Settings(
        dim=dim,
        canaries=canaries,
        unobserved=wanted,
        delta=float(delta_array(one_number("delta", delta))),
        kind=kind,
        rounds=None if rounds is None else whole_number("rounds", rounds, minimum=1),
        presentations=tuple(whole_number("presentations", times, minimum=1) for times in groups),
        momentum=beta,
        layers=named,
        noise=noise,
        sampling=sampling,
        blocks=cut,
        processes=whole_number("processes", processes, minimum=1),
        shards=_checked_shards(shards, named, processes),
    )


def _checked_unobserved(unobserved: int | None, canaries: int, dim: int, blocks: tuple[int, ...]) -> int:
    room = min(blocks, default=dim) - canaries
    wanted = min(room, UNOBSERVED_EACH * canaries) if unobserved is None else unobserved
    wanted = whole_number("unobserved", wanted, minimum=FEWEST)
    if wanted > room:
        space = "dim" if not blocks else "the smallest block"
        raise ValueError(f"unobserved must be at most {space} - canaries = {room}, got {wanted}")
    return wanted


def _checked_layers(layers: Sequence[tuple[str, int]] | None, dim: int) -> tuple[tuple[str, int], ...]:
    try:
        named = tuple((str(name), whole_number("layer size", size, minimum=1)) for name, size in layers or ())
    except TypeError:
        raise WrongTypeError(f"layers must be pairs of a name and a size, got {short_repr(layers)}") from None
    if len({name for name, _ in named}) < len(named):
        raise ValueError("layers must have different names, got one twice: each has its own gauge")
    if named and sum(size for _, size in named) != dim:
        raise ValueError(f"layers must add up to dim = {dim}, got {sum(size for _, size in named)}")
    return named


def _checked_blocks(blocks: Sequence[int], dim: int, canaries: int, kind: str) -> tuple[int, ...]:
    cut = tuple(whole_number("the size of a block", size, minimum=2) for size in blocks)
    if not cut:
        return ()
    if sum(cut) != dim:
        raise ValueError(f"blocks must add up to dim = {dim}, got {sum(cut)}")
    if kind != "rotated":
        raise ValueError(f"canaries in blocks must be of the kind 'rotated', got {kind!r}")
    if len(cut) == 1:
        return ()  # the vector itself
    if min(cut) < BLOCK_EACH * canaries:
        raise ValueError(
            f"every block must hold at least {BLOCK_EACH} coordinates for each observed canary, {BLOCK_EACH * canaries} "
            f"here, got one of {min(cut)}; use at most {min(cut) // BLOCK_EACH} canaries, or fewer and larger blocks"
        )
    return cut


def _checked_shards(
    shards: Sequence[Sequence[int]], layers: tuple[tuple[str, int], ...], processes: int
) -> tuple[tuple[int, ...], ...]:
    sized = tuple(tuple(whole_number("the size of a shard", size, minimum=0) for size in sizes) for sizes in shards)
    if not sized:
        return ()
    if len(sized) != processes or any(len(sizes) != len(layers) for sizes in sized):
        raise ValueError("shards must have a size for each layer in each process")
    for layer, (name, size) in enumerate(layers):
        if sum(sizes[layer] for sizes in sized) != size:
            raise ValueError(f"the shards of {name} must add up to its size, {size}")
    return sized


def _rounds_of(sampling: Sampling, rounds: int | None, groups: tuple[int, ...]) -> int:
    """The number of rounds of a scheme; ValueError if other settings contradict it."""
    if groups != (1,):
        raise ValueError(f"presentations must be omitted if sampling is given, since {sampling} decides them")
    if rounds is not None and rounds != sampling.total_rounds:
        raise ValueError(f"rounds must be the {sampling.total_rounds} of the sampling scheme, got {rounds}; omit it")
    return sampling.total_rounds


def presentation_counts(count: int, presentations: int | Sequence[int]) -> npt.NDArray[np.int64]:
    """How often each canary takes part: one number for all, or one for each group of nearly equal size, in order."""
    if isinstance(presentations, Sequence):
        groups = [whole_number("presentations", times, minimum=1) for times in presentations]
    else:
        groups = [whole_number("presentations", presentations, minimum=1)]
    if not groups or len(groups) > count:
        raise ValueError(f"presentations must name 1 to {count} groups, got {len(groups)}")
    return np.repeat(groups, [len(part) for part in np.array_split(np.arange(count), len(groups))])
