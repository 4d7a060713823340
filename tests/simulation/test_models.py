"""The models have the parameter counts of their originals and the outputs of torch.nn."""

import pytest
import torch
from torch import nn

from coalmine.simulation.models import (
    accuracy,
    character_lstm,
    cnn_dropout,
    mlp,
    model_by_name,
    word_lstm,
)

COUNTS = [
    (word_lstm(), 4_050_748),
    (character_lstm(), 820_522),
    (cnn_dropout(10), 1_199_882),
    (cnn_dropout(62), 1_206_590),
    (mlp(784, 200, 200, 10), 199_210),
    (mlp(784, 200, 200, 62), 209_662),
]


@pytest.mark.parametrize(("model", "count"), COUNTS, ids=lambda part: getattr(part, "name", part))
def test_models_have_the_parameter_counts_of_their_originals(model, count):
    assert model.dim == count
    assert model_by_name(model.name).dim == count


def test_the_lstm_equals_torchs_with_one_bias():
    model = word_lstm(20)
    vector = torch.randn(model.dim, generator=torch.Generator().manual_seed(1)) * 0.1
    parts = model.split(vector)
    embedding, lstm = nn.Embedding(24, 96), nn.LSTM(96, 670, batch_first=True)
    dense = nn.Sequential(nn.Linear(670, 96), nn.Linear(96, 24))
    with torch.no_grad():
        embedding.weight.copy_(parts["embedding"])
        for parameter, name in zip(lstm.parameters(), ("kernel", "recurrent", "bias"), strict=False):
            parameter.copy_(parts[f"lstm1.{name}"])
        lstm.bias_hh_l0.zero_()
        for number in (1, 2):
            dense[number - 1].weight.copy_(parts[f"dense{number}.weight"])
            dense[number - 1].bias.copy_(parts[f"dense{number}.bias"])
    symbols = torch.randint(24, (3, 20), generator=torch.Generator().manual_seed(2))
    expected = dense(lstm(embedding(symbols))[0])
    for logits in (model.logits, model.logits_alone):
        torch.testing.assert_close(logits(parts, symbols, ()), expected, rtol=1e-4, atol=1e-5)


def test_an_lstm_is_initialised_like_keras():
    model = word_lstm(20)
    parts = model.split(model.initial(torch.Generator().manual_seed(1)))
    recurrent = parts["lstm1.recurrent"]
    torch.testing.assert_close(recurrent.T @ recurrent, torch.eye(670), rtol=0, atol=1e-4)
    assert parts["lstm1.bias"].view(4, 670)[1].eq(1).all()
    assert parts["lstm1.bias"].sum() == 670
    assert parts["embedding"].abs().max() <= 0.05
    kernel = character_lstm().split(character_lstm().initial(torch.Generator().manual_seed(1)))["lstm2.kernel"]
    assert float(kernel.std()) == pytest.approx((2 / 256) ** 0.5, rel=0.02)


def test_accuracy_of_text_ignores_unscored_labels():
    """A model that always predicts 3 is right on a third of the scored labels; padding and the end do not count."""
    model = word_lstm(6)
    vector = torch.zeros(model.dim)
    model.split(vector)["dense2.bias"][3] = 1.0
    labels = torch.tensor([[3, 4, 9, 0], [5, 9, 0, 0]], dtype=torch.int16)
    inputs = torch.ones_like(labels)
    assert accuracy(model, vector, inputs, labels, unscored=(0, 9)) == pytest.approx(1 / 3)
    assert accuracy(model, vector, inputs, labels) == pytest.approx(1 / 8)
