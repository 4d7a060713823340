"""Canaries made of data: records that a secret coin each puts into the training data or leaves out.

    canaries = data_canaries.mislabelled(images, labels, count=1_000, classes=10, seed=seed)
    train_set = canaries.insert(train_set)
    ...  # train as usual
    print(canaries.result(canaries.score(model), delta=1e-5, claim=4.0))

What the model tells about the coins is a lower bound on epsilon from its outputs alone: the rung `black-box`.
"""

from coalmine.data_canaries.canaries import DataCanaries
from coalmine.data_canaries.images import blank, mislabelled, noise, patterns
from coalmine.data_canaries.scoring import token_likelihoods
from coalmine.data_canaries.tables import outliers
from coalmine.data_canaries.text import documents, rare_tokens, sampled, secrets

__all__ = [
    "DataCanaries",
    "blank",
    "documents",
    "mislabelled",
    "noise",
    "outliers",
    "patterns",
    "rare_tokens",
    "sampled",
    "secrets",
    "token_likelihoods",
]
