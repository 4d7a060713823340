"""Run directories for the report tests: small, quick, real audits."""

import numpy as np
from training import train

from coalmine import Audit, Claim, Poisson, amplified_epsilon, mechanism_epsilon

HOSTILE = {
    "script": "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>",
    "long": "x" * 10_000,
    "right_to_left": "\u202eשלום עולם مرحبا\u202c",
    "emoji": "🐤💥👩‍🔬",
    "control": "a\x00b\x1bc",
    "<b onclick=alert(2)>": "\"quoted\" & 'ticked' `code` </title></style>",
}


def make_run(path, *, noise_multiplier=1.0, claim=True, presentations=1, config=None, more=None, **settings):
    """Write a finished run of 12 rounds to `path`, with metrics and a result like those of `coalmine run`."""
    settings = {"dim": 2_000, "canaries": 100, "rounds": 12} | settings
    audit = train(directory=path, noise_multiplier=noise_multiplier, presentations=presentations, **settings)
    home = audit.directory
    for number in range(1, settings["rounds"] + 1):
        home.append_metrics({"round": number, "accuracy": 1 - 0.9**number, "clip_norm": 0.5, "seconds": number * 0.5})
    if config is not None:
        home.write_config(config)
    times = max(presentations) if isinstance(presentations, tuple) else presentations
    analytical = mechanism_epsilon(noise_multiplier, delta=1e-6, participations=times)
    result = audit.result(claim=analytical if claim else None, analytical_epsilon=analytical)
    home.write_result(
        result.with_entries(task="digits", noise_multiplier=noise_multiplier, secret_seed=False, **(more or {}))
    )
    home.close()
    return path


def make_sampled_run(path, *, noise=1.0, rate=0.1, claimed=None, observed=True, rounds=60, config=None, more=None):
    """Write a finished run of a loop with Poisson sampling, judged by the accountant's epsilon for Poisson(0.1).

    `noise` is the actual noise where a multiplier of 1 is stated; `rate` is the actual sampling probability.
    """
    rng, dim, clients = np.random.default_rng(7), 2_000, 100
    sampling = Poisson(0.1, rounds=rounds)
    audit = Audit(dim, canaries=200, seed=b"tests only", delta=1e-5, sampling=sampling, directory=path)
    model = np.zeros(dim)
    for t in range(1, rounds + 1):
        present = np.flatnonzero(rng.random(200) < rate)
        others = rng.normal(size=dim)
        total = others + audit.updates(present, 1.0) + noise * rng.normal(size=dim)
        audit.observe_round(
            t, total / clients, present=present, others=others / clients, noise_std=1 / clients, clip_norm=1 / clients
        )
        model = model + total / clients
    audit.observe_final(model, initial=np.zeros(dim))
    home = audit.directory
    home.write_config({"trainer": "numpy"} if config is None else config)
    epsilon = claimed or float(amplified_epsilon(1.0, sampling, 1e-5))
    claim = Claim(epsilon, sampling=sampling, noise_multiplier=1.0, sampler_observed=observed)
    analytical = mechanism_epsilon(1.0, delta=1e-5, participations=6)
    result = audit.result(claim=claim, analytical_epsilon=analytical)
    home.write_result(
        result.with_entries(task="digits", noise_multiplier=1.0, secret_seed=False, presentations=6, **(more or {}))
    )
    home.close()
    return path
