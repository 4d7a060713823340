"""Run directories for the report's tests: real audits, small and quick."""

import sys
from pathlib import Path

from coalmine import mechanism_epsilon

sys.path.insert(0, str(Path(__file__).parents[1] / "audit"))
from training import train

HOSTILE = {
    "script": "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>",
    "long": "x" * 10_000,
    "right_to_left": "\u202eשלום עולם مرحبا\u202c",
    "emoji": "🐤💥👩‍🔬",
    "control": "a\x00b\x1bc",
    "<b onclick=alert(2)>": "\"quoted\" & 'ticked' `code` </title></style>",
}


def make_run(path, *, noise_multiplier=1.0, claim=True, presentations=1, config=None, more=None, **settings):
    """A finished run of 12 rounds in `path`, with metrics and a result as `coalmine run` writes them."""
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
    home.write_result(result, task="digits", noise_multiplier=noise_multiplier, secret_seed=False, **(more or {}))
    home.close()
    return path
