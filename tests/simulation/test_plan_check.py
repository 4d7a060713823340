"""`coalmine verify` makes the plan of a run again from its config, so what was committed to cannot contradict it."""

import json

import pytest

from coalmine import RunDirectory
from coalmine.simulation.config import RunConfig
from coalmine.simulation.training_run import start
from coalmine.verification import verify_run
from damaged_runs import edit_record, rewrite_rounds

SEED = bytes.fromhex("7c1f0e35a9b84d2296d3e8f4b05a6c1d")
SMALL = {"rounds": 3, "canaries": {"count": 60}, "participation": {"clients_per_round": 20}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that trains a small run with these settings, once."""
    folder, made = tmp_path_factory.mktemp("plans"), {}
    (folder / "seed").write_bytes(SEED)

    def call(**sections):
        name = json.dumps(sections)
        if name not in made:
            made[name] = folder / str(len(made))
            config = RunConfig.from_dict(_merged(SMALL | {"canaries": {"seed_file": str(folder / "seed")}}, sections))
            start(config, made[name])
        return made[name]

    return call


def _merged(base, more):
    keys = SMALL.keys() | base.keys() | more.keys()
    return {
        key: {**SMALL.get(key, {}), **base.get(key, {}), **more.get(key, {})}
        if isinstance(base.get(key, more.get(key)), dict)
        else more.get(key, base.get(key))
        for key in keys
    }


def plan_of(path):
    return next(check for check in verify_run(path, SEED) if check.name == "plan")


VARIATIONS = (
    {},
    {"privacy": {"clipping": "adaptive"}},
    {"participation": {"kind": "poisson"}, "canaries": {"pattern": "clients"}, "claim": {"accountant": True}},
    {"privacy": {"noise": "tree"}},
)


@pytest.mark.parametrize("sections", VARIATIONS, ids=["plain", "adaptive", "poisson", "tree"])
def test_the_plan_of_an_honest_run_is_its_own(trained, sections):
    check = plan_of(trained(**sections))
    assert check.held, check.detail


EDITS = {
    "analytical_epsilon": 0.1,
    "noise_multiplier": 5.0,
    "update_noise_multiplier": 5.0,
    "update_epsilon": 0.1,
    "client_epsilon": 0.1,
    "client_rounds": 7,
    "sensitivity": 0.1,
    "population": 10**6,
    "presentations": 2,
    "secret_seed": False,
    "pipeline.clip_norm": 0.01,
    "pipeline.unit": "example",
    "audited_by_pipeline.sampler.status": "checked",
    "audited_by_pipeline.clipping": {"status": "checked", "detail": "verified by hand", "source": "pipeline"},
}


@pytest.mark.parametrize(("name", "value"), EDITS.items(), ids=EDITS)
def test_a_committed_fact_that_contradicts_the_config_is_refused(trained, tmp_path, name, value):
    """A dishonest auditor commits to it before round 1, so the commitment and the log's end agree with it."""
    run = edit_record(trained(), tmp_path / "run", name, value, seed=SEED)
    checks = {check.name: check for check in verify_run(run, SEED)}
    assert checks["commitment"].held
    assert checks["plan"].held is False
    assert name.split(".")[0] in checks["plan"].detail


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"participants": 900}, "states 900 participants"),
        ({"scale": 1.0}, "states canaries of scale 1"),
        ({"noise_std": 10.0}, "states a noise multiplier of"),
        ({"clip_norm": 1e-3, "noise_std": 0.5e-3}, "states a clip norm of 0.001"),
    ],
)
def test_a_round_that_contradicts_the_config_is_refused(trained, tmp_path, change, named):
    run = rewrite_rounds(trained(), tmp_path / "run", change)
    check = plan_of(run)
    assert check.held is False
    assert check.detail.startswith("round 1 ")
    assert named in check.detail


def test_without_its_data_a_plan_is_not_checked(trained, tmp_path):
    run = RunDirectory(
        edit_record(trained(), tmp_path / "run", None, None, seed=SEED, config={"task": {"name": "emnist"}})
    )
    check = plan_of(run.path)
    assert check.held is None
    assert check.detail.startswith("the plan cannot be made again from config.toml: ")
