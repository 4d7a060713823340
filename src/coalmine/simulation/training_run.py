"""A training run in a directory, with its audit and result. Killed at any moment, it can be resumed."""

import io
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coalmine.canaries.array_types import cores
from coalmine.estimators.sampling import Shuffled
from coalmine.log.files import remove_drafts, write_atomically
from coalmine.log.model_file import INITIAL
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.schedule import CanarySchedule
from coalmine.measure.settings import checked_settings
from coalmine.measure.torch_group import LostRankError
from coalmine.measure.vectors import NotFiniteError
from coalmine.result.audit_result import AuditResult
from coalmine.simulation.client_sums import ClientSums, engine_of
from coalmine.simulation.cohorts import Cohorts, plan_cohorts, sampling_of
from coalmine.simulation.config import RunConfig, TaskSettings
from coalmine.simulation.distributed.local_ranks import LocalRanks, SharedExamples
from coalmine.simulation.distributed.rank_group import RankGroup
from coalmine.simulation.distributed.rounds import RankSums
from coalmine.simulation.dp_fedavg import RoundReport, Steps, Training, TrainingState, population_of
from coalmine.simulation.engines import trains_one_by_one
from coalmine.simulation.participation import rounds_digest
from coalmine.simulation.planned_privacy import PlannedPrivacy
from coalmine.simulation.run_audit import audit_of_run, audit_settings, result_of_run
from coalmine.simulation.tasks import Task, load_task
from coalmine.simulation.training_checkpoint import load_checkpoint, save_checkpoint

log = logging.getLogger(__name__)
ROUNDS_DIGEST = "rounds.sha256"  # SHA-256 of the rounds file, in the format of sha256sum


@dataclass(frozen=True)
class Progress:
    """The progress of a run. `epsilon` is the analytical epsilon of the most exposed canary so far."""

    report: RoundReport
    rounds: int
    accuracy: float | None  # the last known
    epsilon: float
    seconds_left: float


def start(
    config: RunConfig,
    directory: Path,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
    steps: Steps | None = None,
    ranks: RankGroup | None = None,
    home: RunDirectory | None = None,
    most_workers: int | None = None,
) -> AuditResult:
    """Train with canaries in `directory` and return the outcome.

    If the directory holds the same run, it is resumed from its checkpoint; a different run there is a ValueError. On rank 0
    of several processes, `ranks` is their group; the other processes call `follow`. `most_workers` limits the number of
    workers if the config does not set it. `home` is the run directory, if the caller has already locked it.
    """
    config = replace(config, engine=config.engine.resolved())
    task = load_task_of(config)
    config = _with_workers(config, task, steps, ranks, most_workers)
    planned = None
    if (directory / "config.toml").exists():
        _check_workers(config, directory)
    else:
        planned = plan(config, task)  # validate before creating the directory
    home = home or RunDirectory(directory)
    with _explain_errors(directory):
        try:
            home.write_config(config.to_dict())
            return _train_in_directory(config, home, task, progress, steps, ranks, planned)
        finally:
            home.close()


def resume(
    directory: Path,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
    ranks: RankGroup | None = None,
    home: RunDirectory | None = None,
) -> AuditResult:
    """Resume the run in `directory` from its checkpoint. The result is the same as that of an uninterrupted run."""
    if not (directory / "config.toml").is_file():
        raise ValueError(f"{directory} holds no run: config.toml is missing")
    config = RunConfig.from_dict(RunDirectory(directory).read_config())
    return start(config, directory, progress=progress, ranks=ranks, home=home)


def follow(ranks: RankGroup) -> None:
    """On every rank except 0: train a share of each round until rank 0 ends the run."""
    config = RunConfig.from_dict(json.loads(ranks.read()))

    def prepare() -> tuple[Task, RankSums]:
        task = load_task_of(config).to(config.engine.device)
        engine = engine_of(config, task.model, task.train)
        return task, RankSums(ranks, ClientSums(config, population_of(config, task), engine))

    task, sums = ranks.run_on_all(prepare)
    try:
        sums.follow(torch.zeros(task.model.dim, device=config.engine.device))
    finally:
        sums.sums.engine.close()


def simulate(config: RunConfig, *, steps: Steps | None = None) -> AuditResult:
    """Train with canaries in memory, without writing any files, and return the outcome."""
    config = replace(config, engine=config.engine.resolved())
    with prepared(config, None, steps) as training:
        state = training.initial_state()
        accuracy, must_stop = None, _stop_check(training)
        for report in _train_rounds(training, state):
            accuracy = report.accuracy
            if must_stop():
                break
        training.audit.observe_final(state.model_vector, initial=training.initial_vector())
        return result_of_run(training, training.evaluate(state) if accuracy is None else accuracy)


def _with_workers(
    config: RunConfig, task: Task, steps: Steps | None, ranks: RankGroup | None, limit: int | None = None
) -> RunConfig:
    """The config with its number of workers: by default one per core if clients train one by one on a CPU, else one."""
    workers = config.engine.jobs
    if ranks is not None and workers not in (0, ranks.size):
        raise ValueError(
            f"the run has {workers} workers, but {ranks.size} ranks were started (WORLD_SIZE or SLURM_STEP_NUM_TASKS); "
            f"start {workers} ranks, or a new run in another directory"
        )
    on_gpu = torch.device(config.engine.device).type == "cuda"
    if ranks is None and on_gpu and workers > torch.cuda.device_count():
        raise ValueError(
            f"engine.jobs (--workers) must be at most the {torch.cuda.device_count()} GPUs of this machine, got {workers}"
        )
    if steps is not None and workers > 1:
        raise ValueError(f"engine.jobs must be 1 where the steps of a round are replaced, got {workers}")
    if workers:
        return config
    one_by_one = config.task.level == "client" and trains_one_by_one(config.engine.name, task.model, on_cpu=not on_gpu)
    parallel = one_by_one and not on_gpu and steps is None
    count = min(cores(), limit or cores(), config.participation.clients_per_round) if parallel else 1
    return replace(config, engine=replace(config.engine, jobs=count if ranks is None else ranks.size))


def _check_workers(config: RunConfig, directory: Path) -> None:
    """Raise ValueError if the run in the directory has another number of workers."""
    stored_engine = RunDirectory(directory).read_config().get("engine")
    stored_workers = stored_engine.get("jobs") if isinstance(stored_engine, dict) else None
    if isinstance(stored_workers, int) and stored_workers not in (0, config.engine.jobs):
        raise ValueError(
            f"{directory} holds a run with {stored_workers} workers, which cannot continue with {config.engine.jobs}: "
            f"sums in another order round differently; use --workers {stored_workers}, or choose another directory"
        )


def _train_in_directory(
    config: RunConfig,
    home: RunDirectory,
    task: Task,
    progress: Callable[[Progress], None],
    steps: Steps | None,
    ranks: RankGroup | None,
    planned: PlannedPrivacy | None,
) -> AuditResult:
    digest = _new_rounds_digest(config, home)
    with prepared(config, home, steps, task=task, ranks=ranks, planned=planned) as training:
        log.info("training %s", training.description)
        log.info("commitment (record it elsewhere before round 1): %s", training.audit.commitment.statement_sha256)
        if digest is not None:  # after validation, so that the user can correct an invalid file
            write_atomically(home.path / ROUNDS_DIGEST, f"{digest}  {config.participation.rounds_file}\n".encode())
        _save_initial(home.path / INITIAL, training)
        state = _restore_state(training, home, config)
        last_accuracy = _last_accuracy(home)
        planned = training.planned
        exposures = planned.exposures(state.round_number)
        started, first = time.monotonic(), state.round_number
        must_stop = _stop_check(training)
        for report in () if must_stop() else _train_rounds(training, state):
            spent = time.monotonic() - started
            last_accuracy = last_accuracy if report.accuracy is None else report.accuracy
            home.append_metrics(_metrics(report, spent) | {"log_digest": training.audit.log_digest})
            stops = must_stop()
            if stops or report.round_number % config.checkpoint_every == 0 or report.round_number == config.rounds:
                # Sync first, so that a checkpoint is never ahead of the audit, even after a power cut.
                training.audit.flush(sync=True)
                save_checkpoint(home.path, state, config)
            exposures.add(report.round_number, training.cohorts.of_round(report.round_number).canaries)
            left = spent / (report.round_number - first) * (config.rounds - report.round_number)
            progress(Progress(report, config.rounds, last_accuracy, planned.epsilon(exposures.largest), left))
            if stops:
                break
        with _explain_divergence(training):
            training.audit.observe_final(state.model_vector, initial=training.initial_vector())
        accuracy = _accuracy_after(state.round_number, home)
        result = result_of_run(training, training.evaluate(state) if accuracy is None else accuracy).written_to(home)
        log.info("digest of the log (record it elsewhere now): %s", result.log_digest)
        return result


def _stop_check(training: Training) -> Callable[[], bool]:
    """A function that returns whether the training must stop because the rounds so far refute the claim.

    It does not wait for a round that is still being measured; the next call includes that round.
    """
    settings = training.config.claim
    if not settings.stop_on_violation:
        return lambda: False
    claim = training.planned.claim
    return lambda: claim is not None and training.audit.alarm(claim, wait=False) is not None


def _new_rounds_digest(config: RunConfig, home: RunDirectory) -> str | None:
    """The digest of the run's rounds file, or None if it is already stored; ValueError if the stored one differs."""
    if config.participation.rounds_file is None:
        return None
    digest, digest_file = rounds_digest(Path(config.participation.rounds_file)), home.path / ROUNDS_DIGEST
    if not digest_file.exists():
        return digest
    if digest_file.read_bytes().split()[:1] != [digest.encode()]:
        raise ValueError(
            f"the rounds file {config.participation.rounds_file} must be the one that {home.path} started with, but its "
            f"SHA-256 is not the one in {digest_file.name}; restore it from a copy, or start a new run in another directory"
        )
    return None


def _restore_state(training: Training, home: RunDirectory, config: RunConfig) -> TrainingState:
    """The state of the newest usable checkpoint, or the initial state; rewinds audit and metrics to it."""
    recorded = training.audit.last_round
    state = load_checkpoint(home.path, config, config.engine.device, recorded_rounds=recorded)
    if state is None:
        state = training.initial_state()
    if state.round_number:
        log.info("resuming after round %d", state.round_number)
    training.audit.rewind_to(state.round_number)
    home.rewind_metrics_to(state.round_number)
    return state


def _save_initial(path: Path, training: Training) -> None:
    """Save the initial model, to which the audit committed, unless an earlier start did."""
    if not path.exists():
        _save_model(path, training.initial_vector())


def _save_model(path: Path, vector: torch.Tensor) -> None:
    """Save a model as one vector, from which `coalmine verify` recomputes cosines."""
    remove_drafts(path)
    content = io.BytesIO()
    np.save(content, vector.cpu().numpy(), allow_pickle=False)
    write_atomically(path, content.getvalue())


def _last_accuracy(home: RunDirectory) -> float | None:
    accuracies = [line["accuracy"] for line in home.read_metrics() if line.get("accuracy") is not None]
    return accuracies[-1] if accuracies else None


def _accuracy_after(rounds: int, home: RunDirectory) -> float | None:
    """The accuracy after the last round, or None if its line is lost."""
    return next((line.get("accuracy") for line in home.read_metrics() if line.get("round") == rounds), None)


def _metrics(report: RoundReport, seconds: float) -> dict[str, Any]:
    return {
        "round": report.round_number,
        "clients": report.clients,
        "canaries": report.canaries,
        "clip_norm": report.clip_norm,
        "clipped_share": report.clipped_share,
        "accuracy": report.accuracy,
        "seconds": round(seconds, 3),
    }


def _train_rounds(training: Training, state: TrainingState) -> Iterator[RoundReport]:
    with _explain_divergence(training):
        yield from training.rounds(state)


@contextmanager
def _explain_divergence(training: Training) -> Iterator[None]:
    """Turn a non-finite release into an error that says which settings to change."""
    try:
        yield
    except NotFiniteError:
        raise ValueError(
            f"training has diverged: the release of round {training.audit.last_round + 1} is not finite; lower "
            "client.learning_rate or server.learning_rate"
        ) from None


@contextmanager
def prepared(
    config: RunConfig,
    home: RunDirectory | None,
    steps: Steps | None,
    *,
    task: Task | None = None,
    ranks: RankGroup | None = None,
    planned: PlannedPrivacy | None = None,
) -> Iterator[Training]:
    """A training with its task, engine, ranks and audit; leaving the context releases them."""
    task = task or load_task_of(config)
    config = _with_workers(config, task, steps, ranks)
    shared = SharedExamples(task.train) if config.engine.jobs > 1 and ranks is None else None
    task = task.to(config.engine.device)
    planned = planned or plan(config, task)
    config, cohorts = planned.config, planned.cohorts
    audit = audit_of_run(planned, task, home)
    _warn_of_many_canaries(config, cohorts)
    engine = engine_of(config, task.model, task.train)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.engine.threads)
    training = Training(planned, task=task, engine=engine, audit=audit, steps=steps)
    local = None if shared is None else LocalRanks(task.model, shared, training.sums, size=config.engine.jobs)
    if local is not None:
        training.clients_sum = local.compute
    elif ranks is not None:
        ranks.publish(json.dumps(config.to_dict()))
        ranks.run_on_all(lambda: None)
        training.clients_sum = RankSums(ranks, training.sums).compute
    try:
        yield training
        if ranks is not None:
            ranks.end()
    finally:
        torch.set_num_threads(threads)
        if local is not None:
            local.close()
        engine.close()


def check_plans(configs: Mapping[str, RunConfig]) -> None:
    """Raise ValueError with the name of an invalid run, for instance one with more clients per round than clients."""
    tasks: dict[TaskSettings, Task] = {}
    for name, config in configs.items():
        try:
            task = tasks.get(config.task) or tasks.setdefault(config.task, load_task_of(config))
            plan(config, task)
        except ValueError as error:
            raise ValueError(f"{name} cannot be run: {error}") from error


def plan(config: RunConfig, task: Task, *, seed: int | bytes | None = None) -> PlannedPrivacy:
    """The plan of a run: its config with the number of canaries, its cohorts, and the privacy that follows. Validates it.

    The canaries' `seed` is by default the one of the config.
    """
    population = len(population_of(config, task))
    config = replace(config, canaries=config.canaries.with_count(population))
    schedule = CanarySchedule(
        checked_settings(task.model.dim, momentum=0.0, **audit_settings(config, task)),
        config.canary_seed() if seed is None else seed,
    )
    cohorts = plan_cohorts(config, population, schedule.in_round)
    config.privacy.clipping_of(cohorts.expected_size)  # validate now
    _check_epochs(config, population)
    return PlannedPrivacy(config, cohorts, population)


def _check_epochs(config: RunConfig, population: int) -> None:
    """Check that a claim about shuffling covers whole epochs, since the range of epsilon is known only for those."""
    scheme = sampling_of(config, population) if config.claim.amplified else None
    if isinstance(scheme, Shuffled) and scheme.total_rounds != config.rounds:
        raise ValueError(
            f"rounds must make whole epochs of {scheme.rounds} rounds if a claimed number relies on shuffling, got "
            f"{config.rounds}; use {scheme.total_rounds}"
        )


def load_task_of(config: RunConfig) -> Task:
    """The task of a run, with its data."""
    data_dir = None if config.task.data_dir is None else Path(config.task.data_dir)
    return load_task(config.task.name, clients=config.task.clients, data_dir=data_dir)


def _warn_of_many_canaries(config: RunConfig, cohorts: Cohorts) -> None:
    """Warn if so many canaries are above (or below) the clip norm that the adaptive clip cannot reach its quantile."""
    share = cohorts.expected_canaries / cohorts.expected_size
    always_above = config.canaries.scale > 1
    drifts = 1 - share < config.privacy.quantile if always_above else share > config.privacy.quantile
    if config.privacy.clipping == "adaptive" and drifts:
        log.warning(
            "%.0f %% of the participants are canaries, too many for the adaptive clip's quantile: the clip norm will %s in "
            "every round; use fewer canaries or more rounds",
            100 * share,
            "grow" if always_above else "shrink",
        )


@contextmanager
def _explain_errors(directory: Path) -> Iterator[None]:
    """Extend file system errors with the run that they stopped and how to resume it."""
    try:
        yield
    except LostRankError as error:
        raise LostRankError(f"{error}; `coalmine run --resume {directory}` continues the run") from error
    except OSError as error:
        elsewhere = isinstance(error.filename, str) and not Path(error.filename).is_relative_to(directory)
        if error.errno is None or elsewhere:
            raise
        started = _exists(directory / "config.toml")
        resumable = f"nothing before this round is lost: `coalmine run --resume {directory}` continues the run"
        advice = resumable if started else "choose another directory with --out"
        raise OSError(f"writing {directory} failed ({error.strerror}); {advice}") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
