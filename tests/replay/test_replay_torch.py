"""Replay of torch training steps: clipping by hand, dropout, batch statistics, and state that is restored bit for bit."""

import copy
from typing import Any

import pytest
from requires import require

torch = require("torch")
from torch import nn  # noqa: E402
from torch.func import functional_call, grad, vmap  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from coalmine.testing import replay  # noqa: E402

ROWS, INPUTS, LABELS = 16, 12, 4
RATE = 0.1


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(3)


def batch():
    return torch.randn(ROWS, INPUTS), torch.arange(ROWS) % LABELS


def network(*middle):
    return nn.Sequential(nn.Linear(INPUTS, 20), *middle, nn.ReLU(), nn.Linear(20, LABELS))


def loss_of_rows(model, given, weights):
    """One loss for each row, of a model that takes the whole batch."""
    inputs, labels = given
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none") * weights


def released(model, given, weights, *, noise=0.0, rowwise=loss_of_rows):
    """The clipped sum of the rows' gradients, one backward pass for each row as a careful user would write it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    losses = rowwise(model, given, weights)
    total = [torch.zeros_like(p) for p in parameters]
    for loss in losses:
        parts = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        length = torch.sqrt(sum(part.square().sum() for part in parts if part is not None))
        for place, part in zip(total, parts, strict=True):
            if part is not None:
                place += part / torch.clamp(length, min=1.0)
    return [part + noise * torch.randn_like(part) for part in total]


class Centre(nn.Module):
    def forward(self, rows):
        return rows - rows.mean(0, keepdim=True)


class Attention(nn.Module):
    """One-head attention over the words of each row; `mixed` swaps the axes, so rows attend to each other."""

    def __init__(self, *, mixed):
        super().__init__()
        self.mixed = mixed
        self.heads = nn.MultiheadAttention(4, 1, batch_first=not mixed)

    def forward(self, rows):
        words = rows.reshape(len(rows), -1, 4)
        return self.heads(words, words, words, need_weights=False)[0].reshape(rows.shape)


@pytest.mark.parametrize(
    ("middle", "fault"),
    [
        ((), False),
        ((nn.Dropout(0.4),), False),
        ((nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.2)), False),
        ((nn.LayerNorm(20),), False),
        ((Attention(mixed=False),), False),
        ((Centre(),), True),
        ((Attention(mixed=True),), True),
        ((nn.BatchNorm1d(20),), True),
    ],
    ids=["mlp", "dropout", "two dropouts", "layer norm", "attention", "centre", "rows attend", "batch norm"],
)
def test_models_with_weights_for_rows(middle, fault):
    model = network(*middle)
    found = replay(lambda given, weights: released(model, given, weights), batch(), model=model)
    assert found.ok is not fault
    if fault:
        assert found.is_counterexample
        assert found.factor > 1.05
    else:
        assert found.problems() == []
        assert 0.9 < found.factor < 1 + 1e-4


def test_dropout_without_weights_is_no_alarm_but_cannot_be_judged():
    model = network(nn.Dropout(0.5))
    given = batch()
    found = replay(lambda rows: released(model, rows, torch.ones(len(rows[0]))), given)
    assert found.unaligned
    assert not found.is_counterexample
    assert "let the step take a weight for each row" in str(found)
    model.eval()
    assert replay(lambda rows: released(model, rows, torch.ones(len(rows[0])), noise=1.0), given).ok


def test_weight_alone_would_miss_rows_that_see_each_other():
    """A row that keeps its content still couples to the others: then only its own gradient goes."""
    model = network(Centre())
    given = batch()

    def kept(rows, weights):
        return released(model, given, weights)

    assert replay(kept, given, extremes=False).factor < 1 + 1e-4
    full = replay(lambda rows, weights: released(model, rows, weights), given, extremes=False)
    assert full.factor > 1.05


def training(model, optimizer, *, noise=1.0):
    """A step of training that returns nothing: the release is the change of the weights."""

    def step(given, weights):
        optimizer.zero_grad()
        for p, part in zip(model.parameters(), released(model, given, weights, noise=noise), strict=True):
            p.grad = part
        optimizer.step()

    return step


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_a_training_step_is_measured_and_undone_bit_for_bit(kind):
    model = network(nn.Dropout(0.3))
    optimizer: Any = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), RATE),
        "momentum": lambda: torch.optim.SGD(model.parameters(), RATE, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters(), RATE),
    }[kind]()
    step = training(model, optimizer)
    step(batch(), torch.ones(ROWS))  # the optimizer has a state
    given = batch()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    gradients = [p.grad for p in model.parameters()]
    contents = [part.clone() for part in gradients]
    found = replay(step, given, model=model, optimizer=optimizer, clip_norm=RATE)
    if kind != "adam":  # Adam's change of the weights is no multiple of the sum
        assert found.ok
        assert 0.9 < found.factor < 1 + 1e-4
        assert "0.weight" in {each.name for each in found.worst.tensors}
    after = (model.state_dict(), optimizer.state_dict(), torch.get_rng_state())
    assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
    for place, values in before[1]["state"].items():
        assert all(
            torch.equal(torch.as_tensor(after[1]["state"][place][name]), torch.as_tensor(v))
            for name, v in values.items()
        )
    assert torch.equal(after[2], before[2])
    for p, gradient, content in zip(model.parameters(), gradients, contents, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, content)
    step(given, torch.ones(ROWS))
    replayed = copy.deepcopy(model.state_dict())
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    torch.set_rng_state(before[2])
    step(given, torch.ones(ROWS))
    assert all(torch.equal(replayed[name], value) for name, value in model.state_dict().items())


class Averaging(nn.Module):
    """Keeps a moving average of its inputs: as a buffer, as a plain attribute, or not at all."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("average", torch.zeros(20))
        self.seen = torch.zeros(20)
        self.calls = 0

    def forward(self, rows):
        self.calls += 1
        if self.how == "buffer":
            self.average.mul_(0.9).add_(0.1 * rows.detach().mean(0))
        elif self.how == "attribute":
            self.seen = 0.9 * self.seen + 0.1 * rows.detach().mean(0)
        return rows


@pytest.mark.parametrize(("how", "leak"), [("none", []), ("buffer", ["1.average"]), ("attribute", ["1.seen"])])
def test_running_statistics_that_move_with_a_row_are_named(how, leak):
    model = network(Averaging(how))
    found = replay(lambda given, weights: released(model, given, weights), batch(), model=model)
    assert list(found.leaks) == leak
    assert found.ok is (not leak)
    assert not found.is_counterexample
    assert model[1].calls == 0
    assert not model[1].average.any()
    assert not model[1].seen.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_precision_is_no_alarm(dtype):
    model = network().to(dtype)
    inputs, labels = batch()
    found = replay(lambda given, weights: released(model, given, weights), (inputs.to(dtype), labels), model=model)
    assert found.ok
    assert found.tolerance == pytest.approx(1e-6 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps * 4, rel=3)


def test_per_sample_gradients_by_vmap_and_tied_weights():
    """A parameter used twice: its gradient is one sum. Clipped use by use, one row moves it by up to 2."""
    weights = {"tied": torch.randn(INPUTS, INPUTS) / 3}
    inputs, _ = batch()

    def loss(parameters, row):
        return 5 * torch.tanh(torch.tanh(row @ parameters["tied"]) @ parameters["tied"]).sum()

    def step(rows, *, apart):
        if apart:

            def halves(place):
                def one_use(parameters, row):
                    uses = [weights["tied"], weights["tied"]]
                    uses[place] = parameters["tied"]
                    return 5 * torch.tanh(torch.tanh(row @ uses[0]) @ uses[1]).sum()

                return one_use

            parts = [vmap(grad(halves(place)), (None, 0))(weights, rows)["tied"] for place in (0, 1)]
        else:
            parts = [vmap(grad(loss), (None, 0))(weights, rows)["tied"]]
        return sum((part / part.flatten(1).norm(dim=1).clamp(min=1)[:, None, None]).sum(0) for part in parts)

    assert replay(lambda rows: step(rows, apart=False), inputs).ok
    assert replay(lambda rows: step(rows, apart=True), inputs).factor > 1.05


def test_low_rank_adapters_and_checkpointing():
    base = nn.Linear(INPUTS, 20).requires_grad_(False)
    adapters = {"down": torch.randn(INPUTS, 2), "up": torch.randn(2, 20)}

    def loss(parameters, row):
        hidden = torch.relu(functional_call(base, {}, (row,)) + row @ parameters["down"] @ parameters["up"])
        return hidden.square().sum()

    def step(rows):
        gradients = vmap(grad(loss), (None, 0))(adapters, rows)
        length = torch.sqrt(sum(part.flatten(1).square().sum(1) for part in gradients.values()))
        return {name: torch.einsum("i,i...", 1 / length.clamp(min=1), part) for name, part in gradients.items()}

    assert replay(step, batch()[0]).ok
    model = network()

    def checkpointed(model, given, weights):
        inputs, labels = given
        out = checkpoint(model, inputs, use_reentrant=False)
        return nn.functional.cross_entropy(out, labels, reduction="none") * weights

    found = replay(lambda given, weights: released(model, given, weights, rowwise=checkpointed), batch(), model=model)
    assert found.ok
