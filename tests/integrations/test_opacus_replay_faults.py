"""Faults that replays of Opacus steps must see, each beside an honest twin: state, outputs, shared parameters, losses."""

import pytest
from requires import require

torch = require("torch")
require("opacus")
from opacus_training import WARNINGS  # noqa: E402
from test_opacus_replay import CLASSES, WIDTH, Run, mlp, tokens  # noqa: E402
from torch import nn  # noqa: E402

from coalmine.verdict.findings.rows import RowAboveClaim, RowMovesOthers, RowMovesTooMuch  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(*WARNINGS, "ignore:.*torch.jit", "ignore:The .grad attribute of a Tensor"),
    pytest.mark.full,
]
BARRED = RowAboveClaim | RowMovesTooMuch | RowMovesOthers


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def long_rows(scale=10):
    return scale * torch.randn(160, WIDTH, generator=torch.Generator().manual_seed(3))


class Remembers(nn.Module):
    """Subtracts a moving average of what it has seen, kept where `place` says; no `place` is part of a saved model."""

    def __init__(self, place, *, reads=True):
        super().__init__()
        self.place, self.reads = place, reads
        mean = torch.zeros(20)
        if place == "attribute":
            self.mean = mean
        elif place == "buffer":
            self.register_buffer("mean", mean, persistent=False)
        else:
            self.held = {"list": [mean], "dictionary": {"mean": mean}}[place]

    @property
    def _mean(self):
        if self.place in ("attribute", "buffer"):
            return self.mean
        return self.held[0] if self.place == "list" else self.held["mean"]

    def forward(self, x):
        before = self._mean.clone()
        with torch.no_grad():
            after = 0.9 * before + 0.1 * x.mean(0)
            if self.place == "attribute":
                self.mean = after
            else:
                self._mean.copy_(after)
        return x - before if self.reads else x


class Counts(nn.Module):
    """Numbers in an attribute: a count of rows, which is the same without one, and the last loss, which nothing reads."""

    def __init__(self):
        super().__init__()
        self.seen, self.largest, self.parts = 0, 0.0, []

    def forward(self, x):
        self.seen += len(x)
        self.largest = float(x.detach().max())
        self.parts = [x.detach(), {"mean": x.detach().mean(0)}]
        return x


@pytest.mark.parametrize("place", ["attribute", "buffer", "list", "dictionary"])
def test_state_that_a_later_step_reads_bars_a_pass_wherever_it_is_kept(place):
    found = Run(mlp(lambda: Remembers(place)))
    assert len(found.replayed.leaks) == 1
    assert found.replayed.leaks[0].startswith("_module.1.")
    assert found.item.status == "failed"
    cache = Run(mlp(lambda: Remembers(place, reads=False)))
    assert (cache.item.status, cache.replayed.leaks) == ("checked", ())


def test_what_nothing_reads_is_no_fault():
    honest = Run(mlp(Counts))
    assert (honest.item.status, honest.replayed.leaks) == ("checked", ())
    assert honest.model._module[1].seen > 0


class SecondOutput(nn.Module):
    """A loss for the logits, and a second output whose rows see each other if `coupled`."""

    def __init__(self, *, coupled):
        super().__init__()
        self.body, self.head, self.coupled = nn.Linear(WIDTH, 20), nn.Linear(20, CLASSES), coupled

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        second = hidden.mean(1)
        if self.coupled:
            second = second - second.mean(0).detach()
        return self.head(hidden), {"more": [1e-3 * second]}


def of_both_outputs(model, rows, labels):
    logits, more = model(rows)
    return nn.functional.cross_entropy(logits, labels) + (more["more"][0] ** 2).mean()


def test_a_second_output_that_sees_other_rows_bars_a_pass():
    found = Run(lambda: SecondOutput(coupled=True), loss=of_both_outputs)
    assert found.replayed.coupled > 1e-3
    assert found.item.status == "failed"
    honest = Run(lambda: SecondOutput(coupled=False), loss=of_both_outputs)
    assert (honest.item.status, honest.replayed.coupled) == ("checked", 0)


class Recurrent(nn.Module):
    """Returns its last state too, whose first axis counts layers, as many as a batch has rows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        states = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            states.append(x)
        return self.head(x), torch.stack(states)


def test_an_output_with_another_first_axis_cannot_be_replayed_without_the_loss():
    def loss(model, rows, labels):
        logits, states = model(rows)
        return nn.functional.cross_entropy(logits, labels) + (states**2).mean(dim=(0, 2)).mean()

    options = {"loss": loss, "rows": 160, "batch": 4, "more": {"poisson_sampling": False}}
    without = Run(Recurrent, **options)
    assert without.item.status == "not checked"
    assert "pass replay=lambda model, batch: loss" in without.item.detail
    given = Run(Recurrent, replay=lambda model, batch: loss(model, *batch), **options)
    assert given.item.status == "checked"


def after_clip(change):
    """A fault that changes the clipped sum of a step: `change` takes the optimizer."""

    def fault(optimizer):
        clip = optimizer.clip_and_accumulate

        def clip_and_accumulate():
            clip()
            change(optimizer)

        optimizer.clip_and_accumulate = clip_and_accumulate

    return fault


class Shared(nn.Module):
    """One weight for the first and the last layer, as an embedding that is the head too."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.relu(self.middle(torch.relu(self.first(x)))))[:, :CLASSES]


def add_shared_again(optimizer):
    shared = max(optimizer.params, key=lambda p: float(p.summed_grad.norm()))
    shared.summed_grad = 2 * shared.summed_grad


def test_a_shared_parameter_that_counts_twice_is_refuted():
    found = Run(Shared, data=long_rows(), fault=after_clip(add_shared_again))
    assert found.replayed.worst.factor > 1.2
    assert isinstance(found.result.verdict.finding, RowAboveClaim)
    honest = Run(Shared, data=long_rows())
    assert honest.item.status == "checked"


def clip_at(quantile):
    """Each row is clipped at the batch's own quantile of norms; a fixed bound if there is none."""

    def fault(optimizer):
        def clip_and_accumulate():
            samples = [(p, optimizer._get_flat_grad_sample(p)) for p in optimizer.params]
            norms = torch.stack([each.reshape(len(each), -1).norm(dim=1) for _, each in samples]).norm(dim=0)
            bound = 1.0 if quantile is None else float(norms.quantile(quantile))
            factors = (bound / (norms + 1e-6)).clamp(max=1.0)
            for p, each in samples:
                total = torch.einsum("i,i...", factors, each)
                p.summed_grad = total if p.summed_grad is None else p.summed_grad + total

        optimizer.clip_and_accumulate = clip_and_accumulate

    return fault


def test_a_clip_at_the_batch_s_own_median_is_refuted():
    found = Run(mlp(), data=long_rows(), fault=clip_at(0.5))
    assert found.replayed.worst.factor > 2
    assert isinstance(found.result.verdict.finding, RowAboveClaim)
    honest = Run(mlp(), data=long_rows(), fault=clip_at(None))
    assert honest.item.status == "checked"


class Balanced(nn.Module):
    """Routes rows by a gate, and keeps its scores, of which a loss for balance is made."""

    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        self.scores = self.gate(x).softmax(1)
        return self.head(x) * self.scores.sum(1, keepdim=True)


def balance_after_clip(run, weight):
    """The gradient of a loss for balance, added to the sum after the clip."""

    def change(optimizer):
        gate = run[0]
        scores = gate.scores.detach()
        share = scores.mean(0)
        pull = weight * (share - share.mean())
        optimizer.params[1].summed_grad = optimizer.params[1].summed_grad + 100 * len(scores) * pull

    return change


def test_a_loss_for_balance_outside_of_the_clip_is_refuted():
    for weight, status in ((1.0, "failed"), (0.0, "checked")):
        held = []

        def net(held=held):
            held.append(Balanced())
            return held[0]

        found = Run(net, data=long_rows(3), fault=after_clip(balance_after_clip(held, weight)))
        assert found.item.status == status


class Labels(nn.Module):
    """A label for every token; those of padding are ignored."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.embed(x.long().clamp(0, 10)))


def ignoring(model, rows, labels):
    """The mean over all tokens of the batch that are not ignored: each row's gradient follows the others' lengths."""
    targets = torch.zeros_like(rows.long()).where(rows > 0, -100)
    return nn.functional.cross_entropy(model(rows).transpose(1, 2), targets, ignore_index=-100)


def ignoring_by_row(model, rows, labels):
    targets = torch.zeros_like(rows.long()).where(rows > 0, -100)
    each = nn.functional.cross_entropy(model(rows).transpose(1, 2), targets, ignore_index=-100, reduction="none")
    return (each.sum(1) / (rows > 0).sum(1).clamp(min=1)).mean()


def test_a_mean_over_all_tokens_that_are_not_ignored_is_seen_with_the_loss():
    options = {"data": tokens(), "more": {"max_grad_norm": 1.2}, "planned": 10_000}  # few gradients are longer
    found = Run(Labels, loss=ignoring, replay=lambda model, batch: ignoring(model, *batch), **options)
    assert found.item.status == "failed"
    assert found.replayed.worst.factor > 1.01
    honest = Run(Labels, loss=ignoring_by_row, replay=lambda model, batch: ignoring_by_row(model, *batch), **options)
    assert honest.item.status == "checked"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_part_of_a_model_is_honest_and_does_not_hide_a_fault(backend):
    """The wrapped model's own hooks stay outside of what is compiled."""

    class Centred(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.first, self.head = nn.Linear(WIDTH, 20), nn.Linear(20, CLASSES)
            self.between = torch.compile(lambda x: torch.relu(x - shift * x.mean(0, keepdim=True)), backend=backend)

        def forward(self, x):
            return self.head(self.between(self.first(x)))

    honest = Run(lambda: Centred(0.0))
    assert honest.item.status == "checked"
    assert honest.replayed.worst.factor == pytest.approx(1.0, abs=1e-3)
    found = Run(lambda: Centred(1.0))
    assert isinstance(found.result.verdict.finding, RowAboveClaim)


def contrastive(model, rows, labels):
    """Each row against all others of the batch: no sum over rows."""
    seen = nn.functional.normalize(model(rows), dim=1)
    return nn.functional.cross_entropy(seen @ seen.T / 0.1, torch.arange(len(rows)))


def test_a_contrastive_loss_needs_the_loss_and_the_printout_says_so():
    without = Run(mlp(), loss=contrastive, data=long_rows(1))
    assert without.item.status == "checked"
    assert "single rows (loss was taken as a sum over rows)" in " ".join(str(without.result).split())
    given = Run(mlp(), loss=contrastive, data=long_rows(1), replay=lambda model, batch: contrastive(model, *batch))
    assert given.item.status == "failed"
    assert "loss was taken" not in str(given.result)


def test_findings_use_the_unit_that_was_named():
    found = Run(mlp(lambda: Remembers("attribute")), unit="document").result
    text = " ".join(str(found).split())
    assert "one document" in text
    assert "one row" not in text
    assert "4 real documents in 1 step" in found.details()


class OwnGenerator(nn.Module):
    """Dropout from a generator that the model holds."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=self.generator) < 0.7)


def test_a_generator_that_the_model_holds_is_frozen_and_left_as_it_was():
    honest = Run(mlp(OwnGenerator))
    assert honest.item.status == "checked"
    without = Run(mlp(OwnGenerator), replay=False)
    assert torch.equal(honest.model._module[1].generator.get_state(), without.model._module[1].generator.get_state())
    pairs = zip(honest.model.parameters(), without.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
