"""Several processes that audit one model: the same numbers as one process, and the same error on every rank."""

import numpy as np
import pytest

from coalmine import Audit, mechanism_epsilon
from coalmine.measure import blocks as block_measurer
from coalmine.measure import expensive_rounds, measurer, noise_law
from coalmine.measure.ranks import Ranks, differences
from coalmine.verdict.alarm import ViolationError
from tests.audit.thread_ranks import on_ranks

SEED, DELTA, NOISE, CLIENTS = b"the secret of the ranks", 1e-5, 1.0, 100
CLAIM = float(mechanism_epsilon(NOISE, delta=DELTA))
SHAPES = {"embedding": (300, 64), "weight": (64, 130), "bias": (130,), "head": (130, 41)}


def shard(array, rank, size):
    return np.array_split(array, size)[rank]


def training(rounds, *, noise=NOISE, parts=1):
    """Each round's noise and the other clients' sum in parts, as in one process."""
    rng = np.random.default_rng(5)
    for number in range(1, rounds + 1):
        drawn = {name: rng.normal(0, noise, shape).astype(np.float32) for name, shape in SHAPES.items()}
        others = [
            {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in SHAPES.items()}
            for _ in range(parts)
        ]
        yield number, drawn, others


def observe(audit, number, noise, others, *, present=None, whole=None):
    """One round of training; `others` belong to this rank, `whole` to all ranks of a model that is not sharded."""
    present = audit.canaries_in_round(number) if present is None else present
    canaries = audit.updates(present, 1.0)
    signal = others if whole is None else whole
    delta = {name: (noise[name] + canaries[name] + signal[name]) / np.float32(CLIENTS) for name in noise}
    told = {name: value / np.float32(CLIENTS) for name, value in others.items()}
    audit.observe_round(number, delta, present=present, others=told, noise_std=NOISE / CLIENTS, clip_norm=1 / CLIENTS)


def sharded(reduce, *, rounds=4, noise=NOISE, **options):
    """One rank of a sharded training run, observed to its last round."""
    pieces = {name: shard(np.zeros(shape, np.float32), reduce.rank, reduce.size) for name, shape in SHAPES.items()}
    given = {"canaries": 300, "seed": SEED, "delta": DELTA, "rounds": 20} | options
    audit = Audit.for_model(pieces, reduce=reduce, **given)
    for number, drawn, (others,) in training(rounds, noise=noise):
        if number > audit.last_round:
            mine = [
                {name: shard(value, reduce.rank, reduce.size) for name, value in one.items()} for one in (drawn, others)
            ]
            observe(audit, number, *mine)
    return audit


@pytest.mark.parametrize("size", [2, 4])
def test_shards_give_the_same_records_as_one_process(size):
    ranks = on_ranks(size, sharded)
    settings = ranks[0].settings
    assert settings.processes == size
    assert len(settings.blocks) == size
    alone = {
        f"{rank}.{name}": shard(np.zeros(shape, np.float32), rank, size)
        for rank in range(size)
        for name, shape in SHAPES.items()
    }
    audit = Audit.for_model(alone, canaries=300, seed=SEED, delta=DELTA, rounds=20, blocks=settings.blocks)
    for number, drawn, (others,) in training(4):
        mine = [
            {f"{rank}.{name}": shard(value, rank, size) for rank in range(size) for name, value in one.items()}
            for one in (drawn, others)
        ]
        observe(audit, number, *mine)
    for one, two in zip(ranks[0].log.rounds(), audit.log.rounds(), strict=True):
        for name, value in vars(one).items():
            if name == "law_coordinates":  # but for the layers, of which the shards have fewer
                same = [*range(7), 10, 11]
                assert value[same] == pytest.approx(two.law_coordinates[same], rel=1e-6), name
                assert value[12:].sum() == two.law_coordinates[12:].sum()
            elif name not in ("layer_rests", "layer_others", "scores") and value is not None:
                assert np.asarray(value, float) == pytest.approx(
                    np.asarray(vars(two)[name], float), rel=1e-6, abs=1e-6
                ), name
        parts = two.layer_others.reshape(size, len(SHAPES))  # one process has every rank's part as a layer of its own
        assert one.layer_others == pytest.approx(np.linalg.norm(parts, axis=0), rel=1e-6)


@pytest.mark.parametrize(("noise", "outcome"), [(NOISE, "PASS"), (NOISE / 2, "VIOLATION")])
def test_rank_0_gives_the_verdict_of_a_sharded_run(noise, outcome):
    first, second = on_ranks(2, lambda reduce: sharded(reduce, rounds=20, noise=noise))
    result = first.result(claim=CLAIM)
    assert str(result.verdict.outcome) == outcome
    assert {gauge.name for gauge in result.gauges} >= {"layer embedding", "layer bias", "spectrum", "distribution"}
    assert second.last_round == 20
    with pytest.raises(ValueError, match="rank 0 holds the log and the result of this audit; this is rank 1"):
        second.result(claim=CLAIM)
    absent = second.finish(claim=CLAIM)
    assert not absent
    assert str(absent) == "rank 0 holds the result of this audit; this is rank 1"
    with pytest.raises(AttributeError, match="'verdict' cannot be read: rank 0 holds the result"):
        _ = absent.verdict


def replicated(reduce, *, noise=NOISE, rounds=20, blocks=None):
    """One rank of a training run in which each rank holds the whole model and some of the clients."""
    whole = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    audit = Audit.for_model(
        whole, canaries=500, seed=SEED, delta=DELTA, rounds=20, reduce=reduce, replicated=True, blocks=blocks
    )
    for number, drawn, others in training(rounds, noise=noise, parts=reduce.size):
        everybody = {name: sum(part[name] for part in others) for name in drawn}
        observe(audit, number, drawn, others[reduce.rank], whole=everybody)
    return audit


def test_replicas_measure_the_same_residual_as_one_process():
    """Products with the canaries are linear, so those of the ranks' parts add up; no rank holds the whole residual."""
    ranks = on_ranks(3, lambda reduce: replicated(reduce, rounds=2))
    flat = Audit.for_model(
        {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()},
        canaries=500,
        seed=SEED,
        delta=DELTA,
        rounds=20,
    )
    for number, drawn, others in training(2, parts=3):
        observe(flat, number, drawn, {name: sum(part[name] for part in others) for name in drawn})
    for one, two in zip(ranks[0].log.rounds(), flat.log.rounds(), strict=True):
        assert one.cosines == pytest.approx(two.cosines, abs=1e-6)
        assert one.rest == pytest.approx(two.rest, rel=1e-6)
        assert one.residual_cosines * one.residual_norm == pytest.approx(
            two.residual_cosines * two.residual_norm, abs=1e-6 * two.residual_norm
        )
        assert one.residual_rest == pytest.approx(two.residual_rest, rel=5 / np.sqrt(2 * ranks[0].settings.unobserved))


@pytest.mark.parametrize("blocks", [None, [20_000, 12_980]])
@pytest.mark.parametrize(("noise", "outcome"), [(NOISE, "PASS"), (NOISE / 2, "VIOLATION")])
def test_replicas_have_a_verdict(noise, outcome, blocks):
    first, _ = on_ranks(2, lambda reduce: replicated(reduce, noise=noise, blocks=blocks))
    result = first.result(claim=CLAIM)
    assert str(result.verdict.outcome) == outcome
    assert {gauge.name for gauge in result.gauges} >= {"layer embedding", "layer bias", "spectrum", "distribution"}
    law = next(item for item in result.audited if item.name == "noise law")
    assert law.status == "checked"
    assert "(on 32,7" in law.detail  # a sample: no process holds the whole residual


@pytest.mark.parametrize(
    "fault", ["laplace", *(pytest.param(fault, marks=pytest.mark.full) for fault in ("bare layer", "repeated"))]
)
def test_replicas_detect_noise_with_the_wrong_law(fault):
    """The sample of the residual shows what the scores cannot."""

    def work(reduce):
        whole = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        audit = Audit.for_model(whole, canaries=500, seed=SEED, delta=DELTA, rounds=20, reduce=reduce, replicated=True)
        rng = np.random.default_rng(9)
        first = None
        for number, drawn, others in training(20, parts=reduce.size):
            if fault == "laplace":
                drawn = {name: rng.laplace(0, 0.5**0.5, shape).astype(np.float32) for name, shape in SHAPES.items()}
            if fault == "bare layer":
                drawn["bias"] = drawn["bias"] * 0
            first = first or drawn
            everybody = {name: sum(part[name] for part in others) for name in drawn}
            observe(audit, number, first if fault == "repeated" else drawn, others[reduce.rank], whole=everybody)
        return audit

    result = on_ranks(2, work)[0].result(claim=CLAIM)
    assert str(result.verdict.outcome) != "PASS"


@pytest.mark.parametrize("work", [sharded, replicated])
def test_layer_lengths_of_a_large_model_need_no_sum_of_canaries(work, monkeypatch):
    """In most rounds of a large model the canaries' average contribution is subtracted: only the noise's length is left."""
    for module in (noise_law, block_measurer, expensive_rounds, measurer):
        monkeypatch.setattr(module, "MANY_COORDINATES", 0)
    audit = on_ranks(2, lambda reduce: work(reduce, rounds=20))[0]
    rounds = list(audit.log.rounds())
    assert sum(item.law_counts is not None for item in rounds) == expensive_rounds.FEWEST
    sizes = np.array([size for _, size in audit.settings.gauged_layers])
    for item in rounds:
        ratios = item.layer_rests * CLIENTS / (np.sqrt(sizes) * NOISE)
        assert ratios == pytest.approx(np.ones(len(sizes)), abs=float(5 / np.sqrt(2 * sizes.min())))
    assert str(audit.result(claim=CLAIM).verdict.outcome) == "PASS"


def test_replicas_must_hold_the_same_release():
    def work(reduce):
        whole = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
        audit = Audit.for_model(whole, canaries=100, seed=SEED, delta=DELTA, reduce=reduce, replicated=True)
        audit.observe_round(1, {name: value * (1 + reduce.rank) for name, value in whole.items()}, present=[])

    for error in on_ranks(2, work):
        assert isinstance(error, ValueError)
        assert "model_delta must be the same on every rank of a replicated model" in str(error)


def failing(change):
    """The errors of two ranks of which one behaves differently in round 2."""

    def work(reduce):
        audit = sharded(reduce, rounds=1)
        number, drawn, (others,) = list(training(2))[1]
        mine = [{name: shard(value, reduce.rank, 2) for name, value in one.items()} for one in (drawn, others)]
        options = {"number": number, "noise": mine[0], "others": mine[1], "present": None}
        if reduce.rank == 1:
            options |= change(audit, options)
        observe(audit, **options)

    return [str(error) for error in on_ranks(2, work) if isinstance(error, ValueError)]


def test_a_bad_shard_gives_the_same_error_on_every_rank():
    def spoil(_, options):
        noise = {name: value.copy() for name, value in options["noise"].items()}
        noise["bias"][0] = np.nan
        return {"noise": noise}

    first, second = failing(spoil)
    assert second.startswith("model_delta must be finite, got NaN or infinity in it")
    assert first == f"rank 1 failed: {second}"


def test_ranks_must_be_in_the_same_round():
    lines = failing(lambda audit, _: {"number": 3, "present": audit.canaries_in_round(2)})
    assert lines == ["every rank must observe the same rounds, but rank 0 is in round 2 and rank 1 in round 3"] * 2


def test_a_rank_that_repeats_a_round_stops_every_rank():
    first, second = failing(lambda audit, _: {"number": 1, "present": audit.canaries_in_round(2)})
    assert second == "rounds must come in order, got round 1 after round 1"
    assert first == f"rank 1 failed: {second}"


def test_ranks_must_agree_on_who_is_present():
    lines = failing(lambda *_: {"present": [0]})
    told = "rank 1 differs from rank 0 in round 2: present (["
    assert len(lines) == 2
    assert all(told in line and line.endswith("on rank 0, [0] on rank 1)") for line in lines)


def test_long_lists_that_differ_late_are_told_apart():
    """Both values must be seen to differ, although errors cut long values short."""
    ours, theirs = list(range(1_000)), [*range(900), 7, *range(901, 1_000)]
    told = differences({"present": ours, "scale": 1.0}, {"present": theirs, "scale": 1.0}, 3)
    assert told == (
        "present (from entry 901 on [900, 901, 902, 903, 904, 905, 906, 907, 908, 909, 910, 9... on rank 0, from entry 901 "
        "on [7, 901, 902, 903, 904, 905, 906, 907, 908, 909, 910, 911... on rank 3)"
    )
    assert differences({"a": [1, 2]}, {"a": [1]}, 1) == "a ([1, 2] on rank 0, [1] on rank 1)"
    assert differences({}, {"clip_norm": 2.0}, 1) == "clip_norm (None on rank 0, 2.0 on rank 1)"


@pytest.mark.parametrize(
    ("own", "differing"),
    [
        ({"seed": b"another secret of ours"}, "seed (secret)"),
        ({"delta": 1e-6}, "delta (1e-05 on rank 0, 1e-06 on rank 1)"),
        ({"seed": b"another secret of ours", "delta": 1e-6}, "seed (secret), delta (1e-05 on rank 0, 1e-06 on rank 1)"),
    ],
)
def test_ranks_must_make_the_same_audit(own, differing):
    for error in on_ranks(2, lambda reduce: sharded(reduce, **(own if reduce.rank else {}))):
        assert isinstance(error, ValueError)
        assert str(error) == (
            "every rank must make the audit with the same arguments, but rank 1 differs from rank 0 in " + differing
        )


def test_ranks_that_claim_different_numbers_are_told_both():
    for error in on_ranks(2, lambda reduce: sharded(reduce, claim=3.0 - reduce.rank)):
        assert isinstance(error, ValueError)
        assert "in claim (" in str(error)
        assert "'epsilon': 3.0" in str(error)
        assert "'epsilon': 2.0" in str(error)


def test_an_alarm_stops_every_rank_in_the_same_round():
    def work(reduce):
        return sharded(reduce, rounds=20, noise=NOISE / 2, claim=CLAIM, on_violation="raise")

    first, second = on_ranks(2, work)
    assert isinstance(first, ViolationError)
    assert isinstance(second, ViolationError)
    assert first.alarm == second.alarm
    assert first.alarm.round < 5


def test_a_run_resumes_only_with_the_same_number_of_ranks(tmp_path):
    def work(reduce, rounds):
        with sharded(reduce, rounds=rounds, directory=tmp_path / "run") as audit:
            return audit.last_round, reduce.rank or audit.result(claim=CLAIM).verdict.outcome

    assert [last for last, _ in on_ranks(2, lambda reduce: work(reduce, 7))] == [7, 7]
    (last, outcome), (last_of_other, _) = on_ranks(2, lambda reduce: work(reduce, 20))
    assert (last, last_of_other, str(outcome)) == (20, 20, "PASS")
    for error in on_ranks(4, lambda reduce: work(reduce, 20)):
        assert isinstance(error, ValueError)
        assert "holds an audit with 2 processes, which cannot be resumed with 4" in str(error)


def test_rewound_ranks_continue():
    def work(reduce):
        audit = sharded(reduce, rounds=5)
        audit.rewind_to(3)
        assert audit.last_round == 3
        return audit

    first, _ = on_ranks(2, work)
    assert first.log.numbers == [1, 2, 3]


def test_text_of_any_length_is_exchanged_through_sums():
    texts = ["", "a", "seven77", "Ä" * 1000]
    assert on_ranks(4, lambda reduce: Ranks(reduce).gather(lambda: texts[reduce.rank])) == [texts] * 4


def test_an_invalid_reduce_is_rejected():
    class Without:
        rank, size = 2, 2

        def __call__(self, numbers):
            return numbers

    with pytest.raises(ValueError, match="reduce must have a rank from 0 to size - 1, got rank 2 of 2"):
        Audit.for_model([np.zeros(5000)], canaries=10, seed=SEED, delta=DELTA, reduce=Without())
    with pytest.raises(ValueError, match="reduce must have a whole number as rank"):
        Audit.for_model([np.zeros(5000)], canaries=10, seed=SEED, delta=DELTA, reduce=lambda numbers: numbers)
