"""Audits in several real processes have the same numbers and verdict as one process with the same layout."""

import pytest
from requires import require

torch = require("torch")
from sharded_ranks import SHAPES, observe, shard, training  # noqa: E402
from torch_ranks import Ranks  # noqa: E402

from coalmine import Audit, Claim, RunDirectory, mechanism_epsilon  # noqa: E402
from coalmine.result.derivation import derive_result  # noqa: E402

OPTIONS = {"canaries": 200, "seed": b"the secret of all ranks", "delta": 1e-5, "rounds": 20}
CLAIM = Claim(float(mechanism_epsilon(1.0, delta=1e-5)))


def of_processes(folder, size, mode, noise):
    """Settings, log and verdict of an audit in real processes."""
    with Ranks(folder, "sharded_ranks.py", mode, noise, folder / "run", size=size) as ranks:
        ranks.finish()
    home = RunDirectory(folder / "run")
    return home.read_record()[0], home.read_log()


def of_one_process(settings, size, mode, noise):
    """The same audit in this process."""
    if mode == "replicated":
        audit = Audit.for_model({name: torch.zeros(shape) for name, shape in SHAPES.items()}, **OPTIONS)
        for number, noise_tree, parts in training(size, noise):
            everybody = {name: sum(part[name] for part in parts) for name in SHAPES}
            observe(audit, number, noise_tree, everybody, everybody)
        return audit

    def pieces(tree):
        named = {f"{rank}.{name}": shard(value, rank, size) for rank in range(size) for name, value in tree.items()}
        return {name: piece for name, piece in named.items() if piece.numel()}

    whole = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    audit = Audit.for_model(
        {name: piece.clone() for name, piece in pieces(whole).items()}, blocks=settings.blocks, **OPTIONS
    )
    for number, noise_tree, parts in training(size, noise):
        everybody = pieces({name: sum(part[name] for part in parts) for name in SHAPES})
        observe(audit, number, pieces(noise_tree), everybody, everybody)
    return audit


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "mode", "noise", "outcome"),
    [
        (2, "shards", 1.0, "PASS"),
        pytest.param(4, "shards", 0.5, "VIOLATION", marks=pytest.mark.slow),
        pytest.param(2, "dtensor", 0.5, "VIOLATION", marks=pytest.mark.slow),
        (4, "dtensor", 1.0, "PASS"),
        (2, "replicated", 1.0, "PASS"),
        pytest.param(4, "replicated", 0.5, "VIOLATION", marks=pytest.mark.slow),
    ],
)
def test_several_processes_have_the_scores_and_verdict_of_one(tmp_path, size, mode, noise, outcome):
    settings, log = of_processes(tmp_path, size, mode, noise)
    assert settings.processes == size
    alone = of_one_process(settings, size, mode, noise)
    for one, two in zip(log.rounds(), alone.log.rounds(), strict=True):
        for cosines, norm in (("cosines", "norm"), ("residual_cosines", "residual_norm")):
            mine, theirs = (vars(item)[cosines].astype(float) * vars(item)[norm] for item in (one, two))
            assert mine == pytest.approx(theirs, abs=1e-6 * two.norm)
        assert one.rest == pytest.approx(two.rest, rel=1e-6)
        if mode != "replicated":
            assert one.residual_rest == pytest.approx(two.residual_rest, rel=1e-6)
            assert one.block_rests == pytest.approx(two.block_rests, rel=1e-6)
    verdicts = [derive_result(log, settings, claim=CLAIM).verdict, alone.result(claim=CLAIM).verdict]
    assert [str(verdict.outcome) for verdict in verdicts] == [outcome] * 2
