"""Valid runs with one damage: an audit from files, Flower messages, and steps of jax_privacy.

Everything except for the one damage is right, so the program gets as far as it can before it meets it.
"""

import contextlib
import copy
import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.cases import Case, FaultError, allow, check_command
from fuzz.values import damaged

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations"))
DIM, ROUNDS, CANARIES = 400, 3, 20
NUMBERS = (0.0, -0.0, 5e-324, 1e-30, 1e30, 1e300, float("nan"), float("inf"), -1.0)
KINDS = ("files", "files", "files", "run", "run", "flower", "jax")


def make_case(rng: random.Random, folder: Path) -> Case:
    """A valid run of a random kind, and one damage."""
    kind = rng.choice(KINDS)
    seed = rng.randrange(1 << 30)
    run = {"files": _files, "run": _verified_run, "flower": _flower, "jax": _jax}[kind]
    return Case(f"{kind}, seed {seed}", lambda: run(random.Random(seed), folder), 60.0)


def _files(rng: random.Random, folder: Path) -> None:
    """An audit from files: plan, export, releases, one damaged file, and then the mended one."""
    (folder / "seed").write_text("7c1f0e35a9b84d2296d3e8f4b05a6c1d\n")
    plan = folder / "audit.toml"
    plan.write_text(
        f'seed_file = "{folder}/seed"\nmodel = "{folder}/initial.npy"\nreleases = "{folder}/{{round:03}}.npy"\n'
        f'others = "{folder}/others-{{round:03}}.npy"\ndirectory = "{folder}/run"\nrounds = {ROUNDS}\n'
        f"canaries = {CANARIES}\nclip_norm = 1.0\nnoise_multiplier = 1.0\ndivisor = 10\ndelta = 1e-5\nclaim = 9.0\n"
    )
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    np.save(folder / "initial.npy", numbers.normal(size=DIM).astype(np.float32))
    if check_command("canaries", "export", str(plan), str(folder / "canaries"), "--sum").code:
        raise FaultError("a valid plan is not exported")
    for number in range(1, ROUNDS + 1):
        others = numbers.normal(size=DIM)
        sent = sum((np.load(file) for file in (folder / "canaries").glob(f"*{number:03}*.npy")), np.zeros(DIM))
        np.save(folder / f"others-{number:03}.npy", (others / 10).astype(np.float32))
        np.save(folder / f"{number:03}.npy", ((others + sent + numbers.normal(size=DIM)) / 10).astype(np.float32))
    victim = rng.choice([file for file in [*sorted(folder.glob("*.npy")), plan] if file.is_file()])
    whole = victim.read_bytes()
    victim.write_bytes(_spoiled_array(whole, rng) if victim.suffix == ".npy" else damaged(whole, rng))
    found = check_command("audit", str(plan))
    victim.write_bytes(whole)
    again = check_command("audit", str(plan))
    if found.code == 2 and again.code == 2 and "other" not in again.err and "differ" not in again.err:
        raise FaultError(f"the mended audit does not go on: {again.err.strip()[:200]}")


def _spoiled_array(whole: bytes, rng: random.Random) -> bytes:
    """A vector's file with bytes damaged, or with one number replaced by a strange one."""
    if rng.random() < 0.5:
        return damaged(whole, rng)
    spoiled = bytearray(whole)
    place = 128 + 4 * rng.randrange(DIM)
    with np.errstate(over="ignore"):
        spoiled[place : place + 4] = np.float32(rng.choice(NUMBERS)).tobytes()
    return bytes(spoiled)


def _verified_run(rng: random.Random, folder: Path) -> None:
    """A run of a loop, one damage of its directory, and every command that reads it: verify may not hold by accident."""
    from coalmine import Audit
    from coalmine.verification import verify_run

    seed, path = b"a seed of sixteen", folder / "run"
    numbers, model = np.random.default_rng(rng.randrange(1 << 30)), np.ones(DIM)
    with Audit(DIM, canaries=CANARIES, seed=seed, delta=1e-5, rounds=ROUNDS, claim=5.0, directory=path) as audit:
        audit.commit_to(initial=model)
        for number in range(1, ROUNDS + 1):
            present, others = audit.canaries_in_round(number), numbers.normal(size=DIM)
            delta = (others + audit.updates(present, 1.0) + numbers.normal(size=DIM)) / 10
            told = {"others": others / 10, "noise_std": 0.1, "clip_norm": 0.1}
            audit.observe_round(number, delta, present=present, **told)
            model = model + delta
        audit.observe_final(model)
        result = audit.finish()
    noted: dict[str, Any] = {"commitment": audit.commitment.statement_sha256, "log_digest": result.log_digest}
    (folder / "seed").write_bytes(seed)
    file = path / rng.choice(("audit/rounds.log", "audit/record.json", "result.json", "model.npy", "initial.npy"))
    whole = file.read_bytes()
    spoiled = damaged(whole, rng)
    file.write_bytes(spoiled)
    with contextlib.suppress(ValueError):  # one line, which `check_command` looks at below
        checks = verify_run(path, seed, **noted)
        held = all(check.held is not False for check in checks)
        if held and not _same(file, whole, spoiled):
            raise FaultError(f"{file.name} was damaged, and every check holds")
    for arguments in (["verify", str(path), "--seed-file", str(folder / "seed")], ["verdict", str(path)],
                      ["compare", str(path)], ["receipt", str(path)], ["statement", str(path)]):  # fmt: skip
        check_command(*arguments)


def _same(file: Path, whole: bytes, spoiled: bytes) -> bool:
    """Whether two files say the same: the same bytes, JSON values, or numbers."""
    if whole == spoiled:
        return True
    with contextlib.suppress(ValueError):
        if file.suffix == ".json":
            return _meaning(json.loads(whole)) == _meaning(json.loads(spoiled))
    if file.suffix == ".npy":
        with contextlib.suppress(Exception):
            return bool(np.array_equal(np.load(file), np.frombuffer(whole[128:], "<f4")))
    # a log whose first line is damaged is mended
    return file.name == "rounds.log" and len(whole) == len(spoiled) and whole[18:] == spoiled[18:]


def _meaning(value: Any) -> Any:
    """A value of JSON without sentences, which verification does not compare, and with rounded numbers."""
    if isinstance(value, dict):
        return {name: _meaning(item) for name, item in value.items() if name not in ("reason", "detail", "question")}
    if isinstance(value, list):
        return [_meaning(item) for item in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def _flower(rng: random.Random, folder: Path) -> None:
    """A valid Flower run in which one message is damaged, and in the next round comes again undamaged."""
    del folder
    import flower_training as flower

    from coalmine.integrations.flower import audited

    honest = flower.client_app()
    node, when, kind = rng.randrange(1, flower.REAL + 1), rng.randrange(1, 3), rng.randrange(4)

    def answer(message: Any, context: Any) -> Any:
        reply = honest(message, context)
        (config,) = message.content.config_records.values()
        if context.node_id == node and config["server-round"] == when and reply.has_content():
            reply = copy.deepcopy(reply)
            with contextlib.suppress(TypeError, ValueError, KeyError):  # Flower's own refusal
                _damage_reply(reply, kind, rng)
        return reply

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = audited(flower.server_side(flower.REAL), audit=flower.small_audit(), mode="extra", progress=False)
        flower.small_run(strategy, flower.LoopGrid(answer, flower.nodes(canaries=0)))
        result = strategy.audit.finish()
    if result.rounds + result.skipped != 3:
        raise FaultError(f"one bad message ended the run after {result.rounds} of 3 rounds")


def _damage_reply(reply: Any, kind: int, rng: random.Random) -> None:
    from flwr.app import Array

    (arrays,), (metrics,) = reply.content.array_records.values(), reply.content.metric_records.values()
    name = rng.choice(list(arrays))
    values = np.array(arrays[name].numpy())
    if kind == 0:
        values.flat[rng.randrange(values.size)] = rng.choice(NUMBERS)
        arrays[name] = Array(values)
    elif kind == 1:
        arrays[name] = Array(values.reshape(-1)[: rng.randrange(values.size)])
    elif kind == 2:
        metrics["num-examples"] = rng.choice((0, -1, 10**9, 3.5))
    else:
        held = arrays[name]
        arrays[name] = Array(dtype=held.dtype, shape=held.shape, stype=held.stype, data=damaged(held.data, rng))


def _jax(rng: random.Random, folder: Path) -> None:
    """Valid steps of a privatizer with one that is wrong: refused in one line, or recorded; the next step goes on."""
    del folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import jax
        import jax.numpy as jnp
        import jax_training

        params = jax.tree.map(jnp.asarray, jax_training.PARAMS)
        privatizer = jax_training.gaussian(canaries=20, progress=False)
        state, wrong = privatizer.init(params), rng.randrange(4)
        for number in range(4):
            batch: Any = np.arange(number, number + 50)
            zeros = jax.tree.map(jnp.zeros_like, params)
            if number == 2:
                with allow(ValueError, TypeError):
                    if wrong == 0:
                        privatizer.next_step(rng.choice((None, 3, (), {}, state.canaries)), batch)
                    elif wrong == 1:
                        privatizer.next_step(
                            state, rng.choice((np.array([10**9]), np.array([-1]), "all", np.array([0.5])))
                        )
                    elif wrong == 2:
                        bad = jax.tree.map(lambda leaf: leaf + rng.choice((jnp.nan, jnp.inf)), zeros)
                        _, spoiled = privatizer.update(bad, privatizer.next_step(state, batch))
                        privatizer.next_step(spoiled, batch)
                    else:
                        privatizer.next_step(privatizer.next_step(state, batch), batch)
                if wrong:
                    return  # the step was prepared or recorded, so it cannot be taken again
            state = privatizer.next_step(state, batch)
            _, state = privatizer.update(zeros, state)
        privatizer.audit.finish(noise_state=state)
