"""What others than the public see: single replies, and the sum without the noise of a coalition. Real client mods."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from requires import require

require("flwr")
from flower_training import REAL, SEED, SMALL, LoopGrid, client_app, fedavg, initial_arrays, nodes, small_run  # noqa: E402
from flwr.clientapp.mod import LocalDpMod  # noqa: E402

from coalmine import Claim, mechanism_epsilon  # noqa: E402
from coalmine.cli.main import main  # noqa: E402
from coalmine.integrations.flower import Observer, audited, canary_mod  # noqa: E402
from coalmine.log.run_directory import RunDirectory  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet_flower")

MANY, ROUNDS, DELTA = 40, 2, 1e-5


def local(noise, clip=1.0):
    """LocalDpMod with noise of this standard deviation, over a clip norm of 1."""
    return LocalDpMod(clip, 1.0, math.sqrt(2 * math.log(1.25 / DELTA)) / noise, DELTA)


def seen_by_server(noise, *, rounds=ROUNDS):
    """The epsilon of one client against a server that sees its replies: any two updates, so two clip norms apart."""
    return float(mechanism_epsilon(noise / 2 / math.sqrt(rounds), delta=DELTA))


def trained(mods, views, *, client_noise=1.0, directory=None, rounds=ROUNDS, claim=None, grid=None, canaries=MANY):
    strategy = audited(
        fedavg(),
        initial_arrays(SMALL),
        canaries=canaries,
        seed=SEED,
        delta=DELTA,
        mode="client",
        clip_norm=1.0,
        noise_multiplier=client_noise * math.sqrt(REAL + canaries),
        directory=directory,
        claim=claim,
        views=views,
        client_noise=client_noise,
    )
    small_run(strategy, grid or LoopGrid(client_app([*mods, canary_mod]), nodes(REAL, canaries)), rounds=rounds)
    return strategy


def test_honest_local_noise_passes_for_the_server_too(tmp_path):
    claim = seen_by_server(1.0)
    strategy = trained([local(1.0)], {"public": None, "server": claim}, directory=tmp_path)
    result = strategy.audit.finish()
    view = strategy.audit.views.results["server"]
    assert view.verdict.outcome == "PASS", view.verdict.reason
    assert view.claim.adjacency == "replace one"
    assert view.rounds == MANY * ROUNDS
    (stored,) = result.trainer.views
    assert (stored.name, stored.outcome, stored.claimed) == ("server", "PASS", claim)
    assert claim / 1.5 < stored.measured < 1.5 * claim  # also for any two updates
    assert "view of server, which sees every reply by itself: PASS" in result.details()
    assert "  views        server: PASS" in str(result)
    assert len(str(result).splitlines()) <= 10
    assert RunDirectory(tmp_path / "views" / "server").read_result()["verdict"] == "PASS"


def test_the_command_verdict_reads_the_views_of_a_run(tmp_path, capsys):
    claims = {"server": seen_by_server(1.0), "coalition(2)": None}
    sized = float(mechanism_epsilon(math.sqrt(REAL + MANY) / math.sqrt(ROUNDS), delta=DELTA))
    strategy = trained([local(0.4)], claims, directory=tmp_path / "run", claim=sized)
    strategy.audit.finish()
    strategy.audit.close()
    with pytest.raises(SystemExit) as ended:
        main(["verdict", str(tmp_path / "run"), "--json"])
    assert ended.value.code == 1
    runs = {Path(each["run"]).name: each["verdict"] for each in json.loads(capsys.readouterr().out)}
    assert runs == {"run": "VIOLATION", "server": "VIOLATION"}


class SeededMod:
    """Noise from a generator with the same seed in every client: each round's noise is one draw for all."""

    def __init__(self, noise):
        self.noise = noise

    def __call__(self, message, context, call_next):
        rng = np.random.default_rng(int(message.content["config"]["server-round"]))
        reply = call_next(message, context)
        name, record = next(iter(reply.content.array_records.items()))
        arrays = [each.numpy() for each in record.values()]
        noisy = [(each + rng.normal(size=each.shape) * self.noise).astype(each.dtype) for each in arrays]
        reply.content[name] = type(record)(dict(zip(record, map(_array, noisy), strict=True)))
        return reply


def _array(values):
    from flwr.app import Array

    return Array(values)


@pytest.mark.parametrize(
    "mods",
    [
        pytest.param([local(0.5)], id="half the noise"),
        pytest.param([local(1.0, clip=3.0)], id="a clip three times too wide"),
        pytest.param([SeededMod(1.0), local(1e-6)], id="one seed for all clients"),
        pytest.param([local(1.0 / math.sqrt(REAL + MANY))], id="noise at each client sized for the sum"),
    ],
)
def test_faults_at_the_clients_are_a_violation_for_the_server(mods):
    strategy = trained(mods, {"server": seen_by_server(1.0)})
    strategy.audit.finish()
    assert strategy.audit.views.results["server"].verdict.outcome == "VIOLATION"


def test_a_coalition_knows_its_own_share_of_the_noise():
    """Twenty of 48 clients collude, so 28 shares of noise are left, and one client is zeroed out."""
    members, clients = 20, REAL + MANY
    left = 0.2 * math.sqrt(clients - members)
    claim = float(mechanism_epsilon(left / math.sqrt(ROUNDS), delta=DELTA))
    strategy = trained([local(0.2)], {f"coalition({members})": claim}, client_noise=0.2)
    strategy.audit.finish()
    view = strategy.audit.views.results["coalition(20)"]
    low, high = view["known-round"].headline.estimate.interval
    assert low <= claim <= high
    assert view.verdict.outcome != "VIOLATION", view.verdict.reason
    strict = trained([local(0.2)], {"coalition(20)": claim / 2.5}, client_noise=0.2)
    strict.audit.finish()
    assert strict.audit.views.results["coalition(20)"].verdict.outcome == "VIOLATION"


@pytest.mark.full
def test_views_resume_with_the_training(tmp_path):
    whole = trained([local(1.0)], ["server"], directory=tmp_path / "whole", rounds=3)
    whole.audit.finish()
    trained([local(1.0)], ["server"], directory=tmp_path / "cut", rounds=2).audit.close()
    strategy = trained([local(1.0)], ["server"], directory=tmp_path / "cut", rounds=3)
    strategy.audit.finish()
    numbers = [list(each.audit.views.by_name["server"].log.numbers) for each in (whole, strategy)]
    assert numbers[0] == numbers[1] == list(range(1, 3 * MANY + 1))


def test_views_that_nobody_has_are_refused():
    with pytest.raises(ValueError, match="views must name 'public', 'server' or 'coalition"):
        trained([], ["everybody"])
    with pytest.raises(ValueError, match="a coalition must have 1 to 39 members, fewer than canaries, got 40"):
        trained([], ["coalition(40)"])
    few = {"canaries": 10, "seed": SEED, "delta": DELTA, "clip_norm": 1.0}
    with pytest.raises(ValueError, match="needs canaries that clients send: mode 'client', got 'extra'"):
        audited(fedavg(), initial_arrays(SMALL), mode="extra", views=["server"], **few)
    with pytest.raises(TypeError, match="views"):
        Observer(None, clip_norm=1.0, views=["server"])  # type: ignore[call-arg, arg-type]


def test_a_view_without_a_claim_is_measured_only():
    strategy = trained([local(1.0)], ["server"])
    result = strategy.audit.finish()
    assert result.trainer.views[0].outcome != "PASS"
    assert Claim(1.0).epsilon < result.trainer.views[0].measured
