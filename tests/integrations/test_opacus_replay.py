"""Opacus steps replayed without one row: what is caught, what is honest, and that training is not disturbed."""

import copy
import json
import pickle

import numpy as np
import pytest
from requires import require

torch = require("torch")
require("opacus")
from opacus import PrivacyEngine  # noqa: E402
from opacus.layers import DPLSTM, DPMultiheadAttention  # noqa: E402
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402
from opacus_training import WARNINGS, forget_clip, quoted  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from coalmine.integrations.opacus import audited, unaudited  # noqa: E402
from coalmine.replay.plan import ReplayPlan, rows_of  # noqa: E402
from coalmine.verdict.findings.missing import NothingClaimed  # noqa: E402
from coalmine.verdict.findings.rows import RowAboveClaim, RowMovesOthers, RowMovesTooMuch  # noqa: E402
from coalmine.verification import verify_run  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*WARNINGS, "ignore:.*enable_nested_tensor", "ignore:.*torch.jit")
SEED = b"tests only"
CLASSES, WIDTH, LENGTH = 5, 12, 6


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Run:
    """A run of a few steps, as a user writes it."""

    def __init__(
        self,
        net,
        *,
        data=None,
        loss=None,
        mode="hooks",
        steps=3,
        rows=160,
        batch=40,
        fault=None,
        before=None,
        physical=None,
        audit=True,
        seed=1,
        directory=None,
        more=None,
        autocast=None,
        planned=None,
        **options,
    ):
        torch.manual_seed(seed)
        data = torch.randn(rows, WIDTH) if data is None else data
        labels = torch.randint(0, CLASSES, (len(data),))
        net = net()
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        criterion = nn.CrossEntropyLoss()
        made = PrivacyEngine().make_private(
            module=net,
            optimizer=inner,
            criterion=criterion,
            data_loader=DataLoader(TensorDataset(data, labels), batch_size=batch),
            grad_sample_mode=mode,
            noise_generator=torch.Generator().manual_seed(2**40 + seed),
            **({"noise_multiplier": 1.0, "max_grad_norm": 1.0} | (more or {})),
        )
        self.model, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.criterion = made[2] if len(made) == 4 else criterion
        if fault:
            fault(self.optimizer)
        if audit:
            settings = {"canaries": 30, "seed": SEED, "delta": 1e-5, "through_clip": False, "directory": directory}
            settings |= {"claim": quoted(rate=batch / len(data), steps=steps), "steps": planned or steps} | options
            audited(self.optimizer, self.model, data_loader=self.loader, **settings)
        self.forward = loss or (lambda model, rows, labels: self.criterion(model(rows), labels))
        self.autocast, self.physical, self.before = autocast, physical, before
        self.train(steps)

    def train(self, steps):
        taken = 0
        while taken < steps:
            if self.physical is None:
                taken += self.epoch(self.loader, steps - taken)
                continue
            with BatchMemoryManager(
                data_loader=self.loader, max_physical_batch_size=self.physical, optimizer=self.optimizer
            ) as smaller:
                taken += self.epoch(smaller, steps - taken)

    def epoch(self, loader, most):
        taken = 0
        for rows, labels in loader:
            self.optimizer.zero_grad()
            if self.before:
                self.before(self.model, rows)
            if self.autocast is None:
                self.forward(self.model, rows, labels).backward()
            else:
                with torch.autocast("cpu", dtype=self.autocast):
                    loss = self.forward(self.model, rows, labels)
                loss.backward()
            taken += not self.optimizer._check_skip_next_step(pop_next=False)
            self.optimizer.step()
            if taken >= most:
                break
        return taken

    @property
    def result(self):
        return self.optimizer.audit.finish()

    @property
    def item(self):
        return next(item for item in self.result.audited if item.name == "rows")

    @property
    def replayed(self):
        return self.item.replayed


def mlp(*middle):
    return lambda: nn.Sequential(nn.Linear(WIDTH, 20), *(each() for each in middle), nn.ReLU(), nn.Linear(20, CLASSES))


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


class BatchStatistics(nn.Module):
    """Batch normalisation with the statistics of the batch and without weights: no validator knows it."""

    def forward(self, x):
        return nn.functional.batch_norm(x, None, None, training=True)


class Capacity(nn.Module):
    """Half of the batch goes through the expert: the rows with the largest gate."""

    def forward(self, x):
        gate = x.sum(1)
        return x * (1 + (gate >= gate.median()).float()[:, None])


class RowsAsSequence(nn.Module):
    """Attention over the batch instead of over a sequence: a wrong reshape."""

    def forward(self, x):
        return x + torch.softmax(x @ x.T / 4, dim=1) @ x


class RunningMean(nn.Module):
    """Subtracts a moving average of what it has seen, and keeps it in the model."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(20))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.99).add_(0.01 * x.mean(0))
        return x


class Count(nn.Module):
    """Counts its calls, which no row changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.last = x.detach()  # kept for a look, and no part of what is saved
        return x


class Kept(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize("mode", ["hooks", pytest.param("ghost", marks=pytest.mark.full)])
@pytest.mark.parametrize("middle", [Centre, BatchStatistics, RowsAsSequence])
def test_rows_that_see_each_other_are_refuted_and_their_honest_twin_passes(middle, mode):
    found = Run(mlp(middle), mode=mode).result
    assert isinstance(found.verdict.finding, RowAboveClaim)
    assert found.verdict.finding.factor > 1.5
    honest = Run(mlp(Kept), mode=mode)
    assert honest.item.status == "checked"
    assert honest.replayed.worst.factor == pytest.approx(1.0, abs=1e-3)


@pytest.mark.full
def test_routing_with_capacity_bars_a_pass():
    found = Run(mlp(Capacity), planned=10_000)
    assert sum(step.rows for step in found.replayed.steps) == 8
    assert found.item.status == "failed"
    assert found.replayed.coupled > 0.1
    assert isinstance(found.result.verdict.finding, RowAboveClaim | RowMovesTooMuch | RowMovesOthers)


def test_a_running_statistic_that_moves_with_a_row_bars_a_pass():
    found = Run(mlp(RunningMean))
    assert found.replayed.leaks == ("_module.1.mean",)
    assert found.item.status == "failed"
    honest = Run(mlp(Count))
    assert honest.item.status == "checked"
    assert float(honest.model._module[1].calls) == 3  # replays do not count


def test_a_clip_that_is_lost_or_of_something_else_is_refuted():
    found = Run(mlp(), fault=forget_clip, data=10 * torch.randn(160, WIDTH)).result
    assert isinstance(found.verdict.finding, RowAboveClaim)

    def clip_each_tensor(optimizer):
        def clip_and_accumulate():
            for p, sample in zip(optimizer.params, optimizer.grad_samples, strict=True):
                norms = sample.reshape(len(sample), -1).norm(dim=1)
                clipped = torch.einsum("i,i...", (1 / (norms + 1e-6)).clamp(max=1.0), sample)
                p.summed_grad = clipped if p.summed_grad is None else p.summed_grad + clipped

        optimizer.clip_and_accumulate = clip_and_accumulate

    data = 30 * torch.randn(160, WIDTH, generator=torch.Generator().manual_seed(3))
    found = Run(mlp(), fault=clip_each_tensor, data=data)
    assert 1.2 < found.replayed.worst.factor < 2.01  # four tensors: at most √4

    def clip_the_batch(optimizer):
        def clip_and_accumulate():
            sums = [sample.sum(0) for sample in optimizer.grad_samples]
            norm = torch.stack([each.norm() for each in sums]).norm()
            for p, each in zip(optimizer.params, sums, strict=True):
                p.summed_grad = each * 10 * min(1.0, 1 / float(norm))  # as if each of ten rows had been clipped

        optimizer.clip_and_accumulate = clip_and_accumulate

    found = Run(mlp(), fault=clip_the_batch, data=data)
    assert found.replayed.worst.factor > 2


def test_ghost_clipping_without_its_loss_moves_as_far_as_the_gradient():
    criterion = nn.CrossEntropyLoss()
    data = 10 * torch.randn(160, WIDTH)
    with pytest.warns(RuntimeWarning, match="nothing was"):
        found = Run(mlp(), mode="ghost", data=data, loss=lambda model, rows, labels: criterion(model(rows), labels))
    assert found.replayed.worst.factor > 2
    assert found.optimizer.audit._faults.counts.unclipped == 3  # the replay's own look at the norms does not count


def weighted_loss(model, rows, labels):
    """A mean over the batch's sum of weights, which the rows share."""
    weights = rows[:, 0].abs()
    each = nn.functional.cross_entropy(model(rows), labels, reduction="none")
    return (each * weights).sum() / weights.sum()


def honest_loss(model, rows, labels):
    weights = rows[:, 0].abs()
    return (nn.functional.cross_entropy(model(rows), labels, reduction="none") * weights).mean()


def load_balance(model, rows, labels):
    """A loss by rows, and one for the balance of the whole batch that each row's gradient contains."""
    logits = model(rows)
    share = logits.softmax(1).mean(0)
    return nn.functional.cross_entropy(logits, labels) + 5 * (share * share).sum()


@pytest.mark.full
@pytest.mark.parametrize("loss", [weighted_loss, load_balance])
def test_a_loss_that_rows_share_is_seen_with_the_loss_alone(loss):
    large = {"data": 0.3 * torch.randn(160, WIDTH, generator=torch.Generator().manual_seed(5))}
    without = Run(mlp(), loss=loss, **large)
    assert without.item.status == "checked"
    assert "the loss was taken as a sum over rows" in without.item.detail
    given = Run(mlp(), loss=loss, replay=lambda model, batch: loss(model, *batch), **large)
    assert given.item.status == "failed"
    assert given.replayed.worst.factor > 1.02
    honest = Run(mlp(), loss=honest_loss, replay=lambda model, batch: honest_loss(model, *batch), **large)
    assert honest.item.status == "checked"
    assert "sum over rows" not in honest.item.detail


class OwnLoss(nn.Module):
    """A model with labels among its inputs."""

    def __init__(self):
        super().__init__()
        self.net = mlp()()

    def forward(self, rows, labels=None):
        logits = self.net(rows)
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.full
def test_a_model_that_computes_its_loss_needs_the_loss():
    found = Run(OwnLoss, loss=lambda model, rows, labels: model(rows, labels)["loss"])
    assert found.item.status == "not checked"
    assert "pass replay=lambda model, batch: loss" in found.item.detail
    assert "how real rows enter the sum was not tested" in found.item.detail
    given = Run(
        OwnLoss,
        loss=lambda model, rows, labels: model(rows, labels)["loss"],
        replay=lambda model, batch: model(*batch)["loss"],
    )
    assert given.item.status == "checked"


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * (WIDTH - 2), CLASSES)
        )

    def forward(self, x):
        return self.net(x[:, None])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = DPLSTM(2, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x.reshape(len(x), LENGTH, 2))[0][:, -1])


class Tokens(nn.Module):
    """An embedding with padding, attention with a mask of that padding, and a mean over what is no padding."""

    def __init__(self, *, tied=False, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.attend = DPMultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        tokens = x.long().clamp(0, 10)
        padding = tokens == 0
        embedded = self.embed(tokens)
        seen = self.attend(embedded, embedded, embedded, key_padding_mask=padding, need_weights=False)
        seen = seen[0] if isinstance(seen, tuple) else seen
        kept = (~padding)[..., None].float()
        return self.head((seen * kept).sum(1) / kept.sum(1).clamp(min=1))


class Recomputed(nn.Module):
    """Gradient checkpointing: the body is computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 20), nn.Linear(20, CLASSES)

    def forward(self, x):
        hidden = checkpoint(lambda rows: torch.tanh(rows) * 2, self.body(x), use_reentrant=False)
        return self.head(hidden)


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 6, bias=False), nn.Linear(6, CLASSES)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Tied(nn.Module):
    """One layer used twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(torch.relu(self.layer(torch.relu(self.layer(x)))))


class SeveralOutputs(nn.Module):
    """The second output is made of the first."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 20), nn.Linear(20, CLASSES)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return {"hidden": hidden, "logits": self.head(hidden)}


def tokens(seed=4):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH + 1, (160, 1), generator=generator)
    return torch.randint(1, 11, (160, LENGTH), generator=generator).where(torch.arange(LENGTH) < lengths, 0).float()


def both_outputs(model, rows, labels):
    out = model(rows)
    return nn.functional.cross_entropy(out["logits"], labels) + out["hidden"].square().mean(1).mean()


full = pytest.mark.full
HONEST = {
    "mlp": (mlp(), {}),
    "dropout": (mlp(lambda: nn.Dropout(0.4)), {}),
    "dropout, loss given": (
        mlp(lambda: nn.Dropout(0.4)),
        {"replay": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])},
    ),
    "layer norm": (mlp(lambda: nn.LayerNorm(20)), {}),
    "group norm": (mlp(lambda: nn.GroupNorm(4, 20)), {}),
    "convolutions": (Convolutions, {}),
    "lstm": (Recurrent, {}),
    "attention with padding": (Tokens, {"data": tokens()}),
    "low rank": (LowRank, {}),
    "checkpointing": (Recomputed, {}),
    "tied": (Tied, {}),
    "several outputs": (SeveralOutputs, {"loss": both_outputs}),
    "float64": (lambda: mlp()().double(), {"data": torch.randn(160, WIDTH).double()}),
    "long rows": (mlp(), {"data": 1e4 * torch.randn(160, WIDTH)}),
    "short rows": (mlp(), {"data": 1e-4 * torch.randn(160, WIDTH)}),
    "autocast": (mlp(), {"autocast": torch.bfloat16}),
    "memory manager": (mlp(), {"physical": 8}),
    "memory manager, ghost": (mlp(), {"physical": 8, "mode": "ghost"}),
    "ghost": (mlp(), {"mode": "ghost"}),
    "ghost, dropout": (mlp(lambda: nn.Dropout(0.4)), {"mode": "ghost"}),
    "ghost, long rows": (mlp(), {"mode": "ghost", "data": 1e4 * torch.randn(160, WIDTH)}),
    "ghost, loss given": (mlp(), {"mode": "ghost", "replay": "criterion"}),
    "ghost, convolutions": (Convolutions, {"mode": "ghost"}),
    "ghost, attention": (Tokens, {"mode": "ghost", "data": tokens()}),
    "functorch": (mlp(lambda: nn.LayerNorm(20)), {"mode": "functorch"}),
    "functorch, convolutions": (Convolutions, {"mode": "functorch"}),
    "expanded weights": (mlp(), {"mode": "ew"}),
    "by layer": (mlp(), {"more": {"clipping": "per_layer", "max_grad_norm": [0.5] * 4}}),
    "no Poisson sampling": (mlp(), {"more": {"poisson_sampling": False}}),
    "sum of losses": (mlp(), {"more": {"loss_reduction": "sum"}, "loss": "sum"}),
    "through the clip": (mlp(), {"through_clip": True}),
}
QUICK = ("dropout", "attention with padding", "memory manager", "ghost, dropout", "autocast", "several outputs")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else full) for name in HONEST])
def test_honest_models_have_no_alarm(name):
    net, options = HONEST[name]
    options = dict(options)
    if options.get("loss") == "sum":
        options["loss"] = lambda model, rows, labels: nn.functional.cross_entropy(model(rows), labels, reduction="sum")
    if options.get("replay") == "criterion":
        holder = []
        options["replay"] = lambda model, batch: holder[0].criterion(model(batch[0]), batch[1])
        real = Run.train

        class Held(Run):
            def train(self, steps):
                holder.append(self)
                real(self, steps)

        run = Held(net, **options)
    else:
        run = Run(net, **options)
    assert run.item.status == "checked", run.item.detail
    assert run.replayed.worst.factor <= (1.001 if name != "autocast" else 1.03)
    assert sum(step.rows for step in run.replayed.steps) >= 3  # all padding is no number in a softmax


def frozen(run):
    """Everything that a replay might disturb, as bytes."""
    state = [value for each in run.optimizer.state.values() for value in each.values()]
    tensors = [
        *run.model.parameters(),
        *run.model.buffers(),
        *[each for each in state if isinstance(each, torch.Tensor)],
    ]
    numbers = [each.detach().numpy().tobytes() for each in tensors]
    generators = (torch.get_rng_state().numpy().tobytes(), run.optimizer.generator.get_state().numpy().tobytes())
    return numbers, generators, np.random.get_state(legacy=False)["state"]["pos"]  # noqa: NPY002


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": "ghost"},
        {"physical": 8, "mode": "ghost"},
        {"through_clip": True, "physical": 8},
        {"replay": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])},
        {"more": {"clipping": "adaptive", "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2,
                  "max_clipbound": 10.0, "min_clipbound": 0.01, "unclipped_num_std": 1.0}},
    ],
    ids=["hooks", "ghost", "memory manager", "through the clip", "loss given", "adaptive"],
)  # fmt: skip
def test_training_is_bit_for_bit_the_one_without_replays(settings, tmp_path):
    net = mlp(lambda: nn.Dropout(0.3), RunningMean)
    with_replays = Run(net, steps=4, directory=tmp_path / "one", **settings)
    after = frozen(with_replays)
    plain = Run(net, steps=4, directory=tmp_path / "other", **{**settings, "replay": False})
    assert with_replays.optimizer.audit.replays.steps
    assert after == frozen(plain)
    rounds = [run.optimizer.audit.log.rounds() for run in (with_replays, plain)]
    for one, other in zip(*rounds, strict=True):
        assert one.residual_norm == other.residual_norm


def test_without_replays_the_scope_says_that_rows_were_not_tested():
    run = Run(mlp(), replay=False)
    assert run.item.status == "not checked"
    assert run.item.detail == "replay=False: how real rows enter the sum was not tested"
    assert run.result.scope.endswith("How real rows enter the sum was not tested.")
    assert not run.model._forward_hooks


def test_the_witness_is_in_the_log_and_a_change_of_it_is_noticed(tmp_path):
    from in_process import called

    Run(mlp(Centre), directory=tmp_path / "run").optimizer.audit.finish()
    checks = {check.name: check.held for check in verify_run(tmp_path / "run", SEED)}
    assert checks["result"]
    told = called("replay", str(tmp_path / "run"))
    assert told.returncode == 1
    assert "step 1: 4 rows, at most" in told.stdout
    assert "the run is a VIOLATION" in told.stdout
    values = json.loads((tmp_path / "run" / "result.json").read_text())
    values["audited"]["rows"]["replayed"]["steps"][0]["factor"] = 1.0
    (tmp_path / "run" / "result.json").write_text(json.dumps(values))
    checks = {check.name: check.held for check in verify_run(tmp_path / "run", SEED)}
    assert not checks["trainer"] or not checks["result"]


@pytest.mark.full
def test_replays_before_a_restart_stay(tmp_path):
    class Restarted(Run):
        def train(self, steps):
            super().train(2)
            before = [p.detach().clone() for p in self.model.parameters()]
            self.optimizer.audit.close()
            unaudited(self.optimizer)
            settings = {"canaries": 30, "seed": SEED, "delta": 1e-5, "through_clip": False, "steps": 4}
            audited(self.optimizer, self.model, data_loader=self.loader, directory=tmp_path / "run", **settings)
            assert all(torch.equal(a, b) for a, b in zip(before, self.model.parameters(), strict=True))
            super().train(2)

    run = Restarted(mlp(), steps=4, directory=tmp_path / "run")
    assert [step.step for step in run.replayed.steps] == [1]
    assert run.replayed.passes > 4


def test_a_copy_of_the_model_has_no_part_of_the_audit():
    run = Run(mlp(), steps=1)
    run.optimizer.audit.replays._capture.start()
    for hook in (*run.model._forward_pre_hooks.values(), *run.model._forward_hooks.values()):
        assert vars(copy.deepcopy(hook)) == vars(pickle.loads(pickle.dumps(hook))) == {"_function": None}
        assert copy.deepcopy(hook)(1, 2) is None


def test_a_step_that_fails_to_replay_does_not_stop_the_training():
    def broken(model, batch):
        raise RuntimeError("no memory")

    run = Run(mlp(), replay=broken)
    assert run.item.status == "not checked"
    assert "the step could not be replayed (RuntimeError: no memory)" in run.item.detail


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": 3}, "replay must be True, False, or a function of model and batch, got 3"),
        ({"replay": None}, "replay must be True, False, or a function of model and batch, got None"),
    ],
)
def test_bad_input_gives_one_line(options, message):
    with pytest.raises(TypeError, match=message):
        Run(mlp(), **options)


def test_without_a_claim_nothing_is_judged():
    found = Run(mlp(Centre), claim=None).result
    assert isinstance(found.verdict.finding, NothingClaimed)
    assert next(item for item in found.audited if item.name == "rows").status == "failed"


@pytest.mark.parametrize(
    ("planned", "steps", "rows"), [(None, 4, 4), (1, 1, 4), (100, 1, 4), (1_200, 1, 7), (2_700, 2, 8), (10_000, 4, 8)]
)
def test_a_plan_takes_at_most_its_share(planned, steps, rows):
    plan = ReplayPlan.of(planned, b"key")
    assert (len(plan.steps), plan.rows) == (steps, rows)
    assert plan.steps[0] == 1
    assert list(plan.steps) == sorted(set(plan.steps))
    if planned and steps > 1:
        assert plan.steps[-1] == planned
        assert steps * (rows + 5) <= planned / 100
    assert ReplayPlan.of(planned, b"key") == plan
    assert sorted(rows_of(3, 20, rows, b"key")) == rows_of(3, 20, rows, b"key") != rows_of(4, 20, rows, b"key")


@pytest.mark.parametrize("given", [False, True])
def test_norms_of_ghost_clipping_that_are_too_small_are_refuted(given):
    """As where ignored tokens shorten the norm but not the gradient (opacus#792): rows are clipped at three clip norms."""

    def shorten(model, _):
        model.get_clipping_coef = lambda: 3 * type(model).get_clipping_coef(model)

    holder = []

    class Held(Run):
        def train(self, steps):
            holder.append(self)
            super().train(steps)

    options = {"replay": lambda model, batch: holder[0].criterion(model(batch[0]), batch[1])} if given else {}
    found = Held(mlp(), mode="ghost", data=10 * torch.randn(160, WIDTH), before=shorten, **options)
    assert found.replayed.worst.factor == pytest.approx(3.0, abs=1e-3)
    assert isinstance(found.result.verdict.finding, RowAboveClaim)


@pytest.mark.full
def test_a_layer_whose_gradient_is_not_clipped_is_refuted():
    """A hook that is lost: the last layer's rows are added as they are."""

    def lose(optimizer):
        real = optimizer.clip_and_accumulate

        def clip_and_accumulate():
            last = optimizer.params[-2]
            sample, before = last.grad_sample, last.summed_grad
            real()
            last.summed_grad = sample.sum(0) if before is None else before + sample.sum(0)

        optimizer.clip_and_accumulate = clip_and_accumulate

    found = Run(mlp(), fault=lose, data=30 * torch.randn(160, WIDTH))
    assert found.replayed.worst.factor > 2
    assert found.replayed.worst.tensors[0][0] == "2.weight"
    assert isinstance(found.result.verdict.finding, RowAboveClaim)
