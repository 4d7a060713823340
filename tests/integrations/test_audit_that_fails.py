"""An audit that goes wrong in the middle of a run stops the training at once, with its error in one line."""

import errno

import pytest
from requires import require

from coalmine.log.rounds_file import RoundLog

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
FAILING = 3  # the round that cannot be written


@pytest.fixture
def full_disk(monkeypatch):
    """The log of rounds cannot write round 3."""
    append = RoundLog.append

    def failing(self, item, *rest, **options):
        if item.number >= FAILING:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(self, item, *rest, **options)

    monkeypatch.setattr(RoundLog, "append", failing)


def stopped_after(train, steps):
    """The number of steps that began before the error."""
    with pytest.raises(OSError, match=r"^[^\n]*No space left on device[^\n]*$"):
        train()
    return steps()


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("watched", [False, True])
def test_opacus_stops_within_a_step(watched):
    """A step is measured during the next one, with an alarm before its noise."""
    require("opacus")
    from opacus_target import Run

    run = Run(**{"on_violation": "warn", "steps": 60} if watched else {})
    count, step = [], run.optimizer.step
    run.optimizer.step = lambda *args, **options: (count.append(1), step(*args, **options))
    assert stopped_after(run.train, lambda: len(count)) <= FAILING + 1


@pytest.mark.full
@pytest.mark.usefixtures("full_disk")
def test_a_trainer_stops_within_a_step(tmp_path):
    require("opacus")
    require("transformers")
    require("peft")
    from lora_training import make, trainer_of

    from coalmine.integrations.transformers import audited

    case = make()
    callback = audited(canaries=20, seed=b"tests only", delta=1e-5, claim=30.0)
    trainer = trainer_of(case, callback, tmp_path, steps=8)
    assert stopped_after(trainer.train, lambda: trainer.state.global_step) <= FAILING + 1


@pytest.mark.full
@pytest.mark.usefixtures("full_disk", "quiet_flower")
@pytest.mark.parametrize("mode", ["client", "extra"])
def test_flower_stops_in_the_round(mode):
    require("flwr")
    flower = __import__("flower_training")
    from coalmine.integrations.flower import audited, canary_mod

    canaries = flower.CANARIES if mode == "client" else 0
    seed = {"seed": flower.SEED} if mode == "client" else {}
    strategy = audited(flower.server_side(flower.REAL + canaries), audit=flower.small_audit(), mode=mode, **seed)
    app = flower.client_app([canary_mod] if mode == "client" else [])
    began = []
    configure = strategy.configure_train
    strategy.configure_train = lambda number, *rest: (began.append(number), configure(number, *rest))[1]
    grid = flower.LoopGrid(app, flower.nodes(flower.REAL, canaries))
    assert stopped_after(lambda: flower.small_run(strategy, grid, rounds=6), lambda: len(began)) <= FAILING + 1


@pytest.mark.full
@pytest.mark.usefixtures("full_disk")
def test_jax_privacy_stops_within_a_step():
    require("jax_privacy")
    helper = __import__("jax_training")
    privatizer = helper.gaussian()
    assert (
        stopped_after(lambda: helper.train(privatizer, helper.POISSON), lambda: privatizer.audit.last_round)
        <= FAILING + 1
    )
