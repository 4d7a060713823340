"""Each row contains its own number, so the loop knows the rows of a step independently of the sampler."""

import numpy as np
import pytest
from requires import require

torch = require("torch")
require("opacus")
from opacus import PrivacyEngine  # noqa: E402
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler  # noqa: E402
from opacus_training import WARNINGS  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from coalmine import Audit  # noqa: E402
from coalmine.integrations.opacus import audited, unaudited  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*WARNINGS)
ROWS = 120


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Training:
    """A small model whose first input is the row's number; `expected` lists the rows of every step from the data."""

    def __init__(self, canaries=40, poisson=True, mode="hooks", workers=0, rows=ROWS, batch=20, audit=True, **loader):
        torch.manual_seed(0)
        data = torch.randn(rows, 20)
        data[:, 0] = torch.arange(rows)
        dataset = TensorDataset(data, torch.randint(0, 10, (rows,)))
        if "batch_sampler" not in loader:
            loader = {"batch_size": batch} | loader
        model = nn.Linear(20, 10)
        self.engine = PrivacyEngine()
        made = self.engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(dataset, num_workers=workers, **loader), noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=poisson, grad_sample_mode=mode,
        )  # fmt: skip
        self.model, self.optimizer, *changed, self.loader = made
        self.loss = changed[0] if changed else nn.CrossEntropyLoss()
        self.expected, self.rows = [], []
        if audit:
            self.attach(canaries)

    def attach(self, canaries=40, **settings):
        settings = {"canaries": canaries, "seed": b"tests only", "delta": 1e-5} | settings
        audited(self.optimizer, self.model, data_loader=self.loader, **settings)

    @property
    def audit(self):
        return self.optimizer.audit

    def backward(self, data, labels):
        self.loss(self.model(data), labels).backward()
        self.rows += data[:, 0].int().tolist()

    def step(self):
        before = self.audit.last_round
        self.optimizer.step()
        if self.audit.last_round > before:
            self.expected.append(sorted(self.rows))
            self.rows = []
        self.optimizer.zero_grad()

    def epoch(self, loader=None, steps=None):
        for number, (data, labels) in enumerate(self.loader if loader is None else loader, start=1):
            self.backward(data, labels)
            self.step()
            if number == steps:
                return

    def check(self):
        """Compare the audit's canaries and cohort sizes with the loop's rows, and return each row's number of steps."""
        rides_with = self.audit.core.schedule.rows(ROWS)
        rounds = list(self.audit.log.rounds())
        assert len(rounds) == len(self.expected) > 0
        for item, rows in zip(rounds, self.expected, strict=True):
            assert sorted(rides_with[item.present]) == sorted(set(rows) & set(rides_with.tolist()))
            assert item.participants == len(rows)
        return np.bincount(np.concatenate([np.array(rows, dtype=int) for rows in self.expected]), minlength=ROWS)


WAYS = [(True, 0, "hooks"), (True, 2, "hooks"), (False, 2, "hooks"), (True, 0, "ghost"), (False, 0, "ghost")]


@pytest.mark.parametrize(("poisson", "workers", "mode"), WAYS)
def test_canaries_are_in_the_steps_of_their_rows(poisson, workers, mode):
    """Over several epochs, one of them left early, with and without prefetching workers."""
    training = Training(poisson=poisson, workers=workers, mode=mode, shuffle=True)
    training.epoch()
    training.epoch(steps=2)  # prefetched batches are dropped
    training.epoch()
    assert len(training.expected) == 14
    picked = training.check()
    if not poisson:
        assert picked.min() >= 2


@pytest.mark.parametrize(("poisson", "workers", "mode"), WAYS)
def test_a_split_batch_is_one_step(poisson, workers, mode):
    """BatchMemoryManager: a canary's row may be in any of the smaller batches; the cohort is the whole batch."""
    training = Training(poisson=poisson, workers=workers, mode=mode, shuffle=True)
    for _ in range(2):
        with BatchMemoryManager(
            data_loader=training.loader, max_physical_batch_size=7, optimizer=training.optimizer
        ) as smaller:
            training.epoch(smaller)
    training.epoch()
    assert len(training.expected) == 18
    training.check()


def test_the_physical_batches_of_a_loop_left_early_are_dropped():
    """Without workers, Opacus drops them too. With workers it does not, and would split the next batches wrongly."""
    training = Training()
    manager = BatchMemoryManager(data_loader=training.loader, max_physical_batch_size=200, optimizer=training.optimizer)
    for _ in range(2):
        with manager as smaller:
            training.epoch(smaller, steps=2)
    training.epoch()
    training.check()
    training = Training(workers=1)
    manager = BatchMemoryManager(data_loader=training.loader, max_physical_batch_size=200, optimizer=training.optimizer)
    with manager as smaller:
        training.epoch(smaller, steps=2)
    training.check()
    for again in (manager.__enter__(), training.loader):
        with pytest.raises(
            ValueError, match="left BatchMemoryManager early, when workers had already fetched more batches"
        ):
            training.epoch(again)


def test_a_logical_batch_left_in_the_middle_is_an_error():
    """Opacus would add its first half to the next step."""
    training = Training()
    with BatchMemoryManager(
        data_loader=training.loader, max_physical_batch_size=5, optimizer=training.optimizer
    ) as smaller:
        training.epoch(smaller, steps=1)
        assert not training.expected
        with pytest.raises(ValueError, match=r"a step holds the gradients of \d+ examples, but the data loader gave"):
            training.epoch(smaller)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_without_a_step_under_the_memory_manager_is_an_error(workers):
    """All batches have the same size here, so only their number reveals it."""
    training = Training(poisson=False, shuffle=True, workers=workers)
    with BatchMemoryManager(
        data_loader=training.loader, max_physical_batch_size=20, optimizer=training.optimizer
    ) as smaller:
        batches = iter(smaller)
        training.backward(*next(batches))
        training.step()
        next(batches)
        with pytest.raises(ValueError, match="without a step for the one before it"):
            training.epoch(batches)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_an_empty_batch_is_a_step(mode):
    training = Training(batch=1, mode=mode)
    training.epoch(steps=30)
    assert [] in training.expected
    training.check()


def test_empty_batches_may_be_skipped():
    training = Training(batch=1)
    for data, labels in training.loader:
        if len(data):
            training.backward(data, labels)
            training.step()
    training.check()
    assert [] not in training.expected


def test_a_random_row_replacing_an_empty_batch_has_no_canary():
    training = Training(batch=1, audit=False)
    training.loader.collate_fn.rand_on_empty = True
    training.attach()
    training.epoch(steps=30)
    sizes = [item.participants for item in training.audit.log.rounds()]
    assert 0 in sizes
    assert {len(rows) for rows, size in zip(training.expected, sizes, strict=True) if size == 0} == {1}


def test_accumulated_batches_are_one_step():
    """Gradient accumulation, also across the end of an epoch, and steps that the loop makes Opacus skip."""
    training = Training(poisson=False, shuffle=True, batch=24)
    for number in range(20):
        for batch in training.loader:
            training.backward(*batch)
            if (number + len(training.rows)) % 2 == 0 and len(training.rows) >= 48:
                training.step()
    training.check()
    training = Training()
    for number, batch in enumerate(training.loader):
        training.optimizer.signal_skip_step(number % 3 < 2)
        training.backward(*batch)
        training.step()
    assert len(training.expected) == 2
    training.check()


def test_evaluation_on_the_same_loader_is_not_a_step():
    """Before or during an epoch, a whole pass or a single batch; also under BatchMemoryManager."""
    training = Training(poisson=False, shuffle=True)
    for _ in range(2):
        assert len(list(training.loader)) == 6
        training.epoch()
    for batch in training.loader:
        next(iter(training.loader))
        training.backward(*batch)
        list(training.loader)
        training.step()
    manager = BatchMemoryManager(data_loader=training.loader, max_physical_batch_size=10, optimizer=training.optimizer)
    with manager as smaller:
        for batch in smaller:
            training.backward(*batch)
            next(iter(training.loader))
            training.step()
    assert len(training.expected) == 24
    training.check()


def test_two_passes_at_once_are_an_error():
    """All batches have the same size, so it is unknown which pass the loop trains on."""
    training = Training(poisson=False, shuffle=True)
    beside = iter(training.loader)
    next(beside)
    with pytest.raises(ValueError, match="batches of 20, 20; take a step for every batch"):
        training.epoch()
    training = Training(poisson=False, shuffle=True)
    beside = iter(training.loader)
    next(beside)
    with (
        BatchMemoryManager(
            data_loader=training.loader, max_physical_batch_size=20, optimizer=training.optimizer
        ) as smaller,
        pytest.raises(ValueError, match="batches of 20, 20; take a step for every batch"),
    ):
        training.epoch(smaller)


def test_the_loop_may_take_single_batches():
    training = Training(poisson=False, shuffle=True)
    for _ in range(3):
        training.backward(*next(iter(training.loader)))
        training.step()
    training.check()
    first, _ = next(iter(training.loader)), next(iter(training.loader))
    training.backward(*first)
    with pytest.raises(ValueError, match="batches of 20, 20; take a step for every batch"):
        training.step()


def test_a_batch_that_the_loop_skips_is_recognised_by_its_size():
    training = Training()
    batches = iter(training.loader)
    sizes = [len(next(batches)[0])]
    data, labels = next(batches)
    assert len(data) not in sizes
    training.backward(data, labels)
    training.step()
    training.epoch(batches)
    training.check()


def test_indistinguishable_batches_are_an_error():
    """Skipped or fetched in advance: if all have the same size, it is unknown which batch is in the step."""
    training = Training(poisson=False, shuffle=True)
    batches = iter(training.loader)
    assert len(batches) == 6
    first, _ = next(batches), next(batches)
    training.backward(*first)
    with pytest.raises(
        ValueError, match="gradients of 20 examples, but the data loader gave it batches of 20, 20; take a"
    ):
        training.step()


def test_batches_fetched_in_advance_are_an_error():
    training = Training()
    batches = iter(training.loader)
    first, second = next(batches), next(batches)
    assert len(first[0]) != len(second[0])
    training.backward(*first)
    with pytest.raises(ValueError, match="take a step for every batch before you fetch the next one"):
        training.step()


def test_persistent_workers_restart_each_epoch():
    training = Training(workers=1, persistent_workers=True)
    training.epoch(steps=2)
    training.epoch()
    training.epoch()
    training.check()


def test_a_row_sampled_twice_counts_twice():
    """A weighted sampler samples with replacement. The canary is in the step as often as its row, with a warning."""
    weights = [50.0] * 4 + [1.0] * (ROWS - 4)
    for through_clip in (True, False):
        training = Training(poisson=False, sampler=WeightedRandomSampler(weights, ROWS), audit=False)
        training.attach(canaries=100, through_clip=through_clip, deferred=False)
        real, sums = training.audit.core.observe_round, []

        def observe(number, delta, *, others, present, real=real, sums=sums, **facts):
            sums.append((delta - others).double().numpy() * 20)
            real(number, delta, others=others, present=present, **facts)

        training.audit.core.observe_round = observe
        for _ in range(4):
            training.epoch()
        picked = training.check()
        assert picked[:4].min() > picked[4:].max()
        canary = int(np.flatnonzero(training.audit.core.schedule.rows(ROWS) < 4)[0])
        row = training.audit.core.schedule.rows(ROWS)[canary]
        times = [rows.count(row) for rows in training.expected]
        assert max(times) > 1
        direction = np.asarray(training.audit.core.update(canary, 1.0), dtype=float)
        errors = np.array([total @ direction for total in sums]) - times
        assert np.abs(errors).max() < 5  # the noise of 24 steps, with a standard deviation of 1
        assert abs(errors.mean()) < 4 / np.sqrt(len(errors))
    with pytest.warns(UserWarning, match=r"picked a row more than once in 24 steps, up to \d+ times"):
        result = training.audit.finish()
    assert {item.name: item.status for item in result.audited}["sampler"] == "failed"
    assert result.verdict.outcome != "PASS"


def test_distributed_samplers_work_in_one_process(tmp_path):
    """Torch's sampler for one of two ranks has half of the rows in each epoch; Opacus' is that of a one-process group."""
    training = Training(poisson=False, batch=10, audit=False)
    data = training.loader.dataset
    sampler = DistributedSampler(data, num_replicas=2, rank=1)
    training = Training(poisson=False, batch=10, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        training.epoch()
    assert training.check().sum() == 3 * ROWS // 2
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        sampler = DistributedUniformWithReplacementSampler(total_size=ROWS, sample_rate=0.1)
        training = Training(poisson=False, batch_sampler=sampler)
        training.epoch()
        training.check()
    finally:
        torch.distributed.destroy_process_group()


def test_presentations_follow_the_binomial_law():
    """Poisson sampling: canaries' counts have the rate and spread of independent coins (two-sided chi-square)."""
    training = Training(canaries=100)
    while len(training.expected) < 60:
        training.epoch()
    present = [item.present for item in training.audit.log.rounds()]
    counts = np.bincount(np.concatenate(present), minlength=100)
    rate = 1 / 6
    assert counts.sum() == pytest.approx(6000 * rate, abs=4 * np.sqrt(6000 * rate * (1 - rate)))
    for sums, cells in ((counts, 60), (np.array([p.size for p in present]), 100)):
        mean = sums.mean()
        spread = ((sums - mean) ** 2).sum() / (mean * (1 - mean / cells))
        free = sums.size - 1
        assert abs(spread - free) < 4 * np.sqrt(2 * free)


def test_the_seed_determines_the_canaries_rows():
    audits = [Audit(1_000, canaries=50, seed=seed, delta=1e-5) for seed in (1, 1, 2)]
    rows = [audit.schedule.rows(300) for audit in audits]
    assert rows[0].tolist() == rows[1].tolist() != rows[2].tolist()
    assert len(set(rows[0].tolist())) == 50
    assert sorted(audits[0].schedule.rows(50)) == list(range(50))
    spread = np.concatenate([Audit(1_000, canaries=50, seed=seed, delta=1e-5).schedule.rows(300) for seed in range(40)])
    assert spread.mean() == pytest.approx(149.5, abs=4 * 86.6 / np.sqrt(spread.size))
    with pytest.raises(ValueError, match="canaries must be at most the 49 rows, one row for each, got 50"):
        audits[0].schedule.rows(49)


def test_unaudited_releases_the_loader():
    training = Training()
    kinds = [type(training.loader).__name__, type(training.loader.batch_sampler).__name__]
    with pytest.raises(ValueError, match="observed by another audit"):
        audited(Training(audit=False).optimizer, audit=training.audit.core, data_loader=training.loader)
    training.epoch()
    unaudited(training.optimizer)
    assert [type(training.loader).__name__, type(training.loader.batch_sampler).__name__] == kinds
    assert not {"pre_step", "signal_skip_step"} & vars(training.optimizer).keys()
    training.attach()
    training.expected = []
    training.epoch()
    training.check()


def test_more_canaries_than_rows_are_rejected(tmp_path):
    training = Training(audit=False, rows=30)
    with pytest.raises(
        ValueError, match="canaries must be at most the 30 rows of the data set, one row for each, got 31"
    ):
        training.attach(canaries=31, directory=tmp_path / "run")
    with pytest.raises(ValueError, match="canaries must be at most the 30 rows of the data set"):
        audited(training.optimizer, audit=Audit(210, canaries=40, seed=1, delta=1e-5), data_loader=training.loader)
    assert not (tmp_path / "run").exists()
    training.attach(canaries=None)
    assert training.audit.settings.canaries == 30


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(20), 0

    def __len__(self):
        return 1


def test_loaders_without_rows_or_an_order_are_rejected(monkeypatch):
    training = Training(audit=False)
    data = training.loader.dataset
    for loader, says in [
        (DataLoader(Stream()), "must have a data set with rows, but an iterable one has none"),
        (DataLoader(data, batch_size=None), "its batch_size is None; give DataLoader"),
        (DataLoader(data, batch_sampler=[[0, 1], [2]]), "must have a torch Sampler as batch_sampler, got "),
        (DataLoader(data, num_workers=1, in_order=False), "in the order of its sampler; give DataLoader"),
    ]:
        training.loader = loader
        with pytest.raises(ValueError, match=says):
            training.attach()
    training.loader = data
    with pytest.raises(TypeError, match="data_loader must be the torch DataLoader that make_private returned, got "):
        training.attach()
    training.loader = DataLoader(data, batch_size=10)
    for given in ({"sampling_probability": 0.1}, {"rng": np.random.default_rng(0)}):
        with pytest.raises(ValueError, match=f"which canaries are in a step, so omit {next(iter(given))}"):
            training.attach(**given)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(
        ValueError, match="picks rows for one of 2 processes, and the rows of the others are not observed"
    ):
        training.attach()


def test_batches_from_another_loader_are_an_error():
    training = Training()
    with pytest.raises(ValueError, match="data_loader gave no batch for this step"):
        training.epoch(DataLoader(training.loader.dataset, batch_size=10))
    training = Training()
    with pytest.raises(ValueError, match="a loader other than data_loader gives the batches"):
        training.epoch(DataLoader(training.loader.dataset, batch_sampler=training.loader.batch_sampler))
    training = Training(audit=False)
    training.loader = DataLoader(training.loader.dataset, batch_sampler=BatchSampler([7, 500], 2, drop_last=False))
    training.attach()
    with pytest.raises(ValueError, match=r"must pick rows in 0\.\.119, got \[7, 500\]"):
        training.epoch()
