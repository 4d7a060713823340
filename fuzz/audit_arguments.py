"""Arguments of `Audit`: settings, vectors of every kind, indices. Rejected with one line, or measured correctly."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from coalmine import Audit
from fuzz.cases import Case, FaultError, allow
from fuzz.values import NOT_FINITE, TINY_AND_HUGE, plain_value

DIM, CANARIES = 120, 12


def make_case(rng: random.Random, folder: Path) -> Case:
    """The constructor, a round, a final model, or the arguments of the result."""
    kind = rng.randrange(5)
    if kind == 0:
        return _construction(rng)
    if kind == 1:
        return _result(rng)
    return _round(rng, final=kind == 2)


def _construction(rng: random.Random) -> Case:
    settings: dict[str, Any] = {"dim": DIM, "canaries": CANARIES, "seed": b"fuzz", "delta": 1e-5, "rounds": 4}
    names = [*settings, "unobserved", "kind", "presentations", "momentum", "layers", "scores", "noise"]
    for name in rng.sample(names, rng.choice((1, 1, 2))):
        settings[name] = _strange(rng)
    if isinstance(settings["dim"], int) and abs(settings["dim"]) > 10**6:
        settings["dim"] = DIM
    if any(isinstance(settings.get(name), int) and settings[name] > 10**6 for name in ("rounds", "presentations")):
        settings["rounds"] = 4  # a schedule of that many rounds is valid, but slow

    def run() -> None:
        with allow(ValueError):
            audit = Audit(settings.pop("dim"), **settings)
            repr(audit)
            if audit.settings.rounds is not None and audit.settings.rounds < 100:
                audit.canaries_in_round(1)

    return Case(f"Audit({settings!r:.300})", run)


def _result(rng: random.Random) -> Case:
    told: dict[str, Any] = {"claim": 3.0}
    for name in rng.sample(("claim", "analytical_epsilon", "clients", "audited"), rng.choice((1, 2))):
        told[name] = _strange(rng)

    def run() -> None:
        with allow(ValueError):
            found = _trained().result(**told)
            str(found)
            if found.verdict is None and told["claim"] is not None:
                raise FaultError("a claim without a verdict")

    return Case(f"result({told!r:.300})", run)


@cache
def _trained() -> Audit:
    audit = Audit(DIM, canaries=CANARIES, seed=b"fuzz", delta=1e-5, rounds=2)
    rng = np.random.default_rng(0)
    for t in (1, 2):
        present = audit.canaries_in_round(t)
        audit.observe_round(t, audit.updates(present, clip_norm=1.0) + rng.normal(size=DIM), present=present)
    return audit


def _round(rng: random.Random, *, final: bool) -> Case:
    kind = rng.choice(("rotated", "rotated", "sphere"))
    said, vector, plain = _vector(rng)
    other_said, other, _ = _vector(rng) if rng.random() < 0.4 else ("none", None, None)
    more: dict[str, Any] = {}
    for name in ("noise_std", "clip_norm", "scale"):
        if rng.random() < 0.3:
            more[name] = _strange(rng) if rng.random() < 0.5 else rng.choice((1.0, 0.1, *TINY_AND_HUGE))
    present = _strange(rng) if rng.random() < 0.1 else rng.sample(range(CANARIES), rng.randint(0, 3))

    def run() -> None:
        audit = Audit(DIM, canaries=CANARIES, seed=b"fuzz", delta=1e-5, rounds=2, kind=kind)
        with allow(ValueError):
            if final:
                audit.observe_final(vector, initial=other)
                assert audit.log.final is not None
                _compare(audit, plain, audit.log.final.norm, audit.log.final.cosines)
            else:
                audit.observe_round(1, vector, present=present, others=other, **more)
                for item in audit.log.rounds():
                    _compare(audit, plain, item.norm, item.cosines)
            with allow(ValueError):
                audit.result(claim=2.0)

    call = "observe_final" if final else "observe_round"
    return Case(f"{call}({said}, {other_said}, present={present!r:.60}, {more!r:.100}), {kind}", run)


def _compare(audit: Audit, plain: Any, norm: float, cosines: Any) -> None:
    """Compare the stored numbers with those of the same values as a plain float64 array."""
    if plain is None:
        raise FaultError("a vector was accepted that holds no row of real numbers")
    size = float(np.abs(plain).max())
    if not np.isfinite(norm) or not np.isfinite(cosines).all():
        raise FaultError(f"norm {norm} or cosines that are not finite")
    length = size * float(np.linalg.norm(plain / size)) if size else 0.0
    if not np.isclose(norm, length, rtol=1e-2):
        raise FaultError(f"the norm is {length:g}, recorded was {norm:g}")
    if size:
        expected = np.asarray(audit.measurer.canaries.cosines(plain / size))
        if not np.allclose(cosines, expected, atol=2e-2):
            raise FaultError(f"a cosine is off by {np.abs(cosines - expected).max():.2g}")


def _strange(rng: random.Random) -> Any:
    return rng.choice(
        (plain_value(rng), plain_value(rng), rng.choice(TINY_AND_HUGE), rng.choice(NOT_FINITE), 1 + 2j, b"x", np.float32(2),
         np.array([1, 2]), np.ma.masked_array([1.0, 2.0], [0, 1]), object(), range(3), "3", 3, 20)
    )  # fmt: skip


def _vector(rng: random.Random) -> tuple[str, Any, Any]:
    """A name, a vector, and the same values as float64, or None if it is not a row of DIM real numbers."""
    import torch

    values = np.random.default_rng(rng.randrange(1 << 30)).normal(size=DIM)
    scale = rng.choice((1.0, 1.0, 1.0, *TINY_AND_HUGE))
    with np.errstate(over="ignore", under="ignore"):
        values = np.clip(values, -1.5, 1.5) * scale
    name = rng.choice(
        ("float64", "float32", "float16", "int", "strided", "big-endian", "masked", "complex", "bool", "object", "list",
         "nan", "inf", "short", "2d", "0d", "matrix", "tensor", "tensor32", "bfloat16", "half", "grad", "complex tensor",
         "sparse", "meta", "quantized", "int tensor", "strided tensor", "string", "record", "longdouble", "subclass",
         "readonly", "datetime", "none", "memoryview", "nested")
    )  # fmt: skip
    with np.errstate(all="ignore"):
        return f"{name}×{scale:g}", *_made(name, values, torch)


def _made(name: str, values: Any, torch: Any) -> tuple[Any, Any]:
    tensor = torch.from_numpy(values.copy())
    if name == "float64":
        return values, values
    if name in ("float32", "float16", "longdouble"):
        cast = values.astype(name)
        return cast, cast.astype(np.float64) if np.isfinite(cast).all() else None
    if name == "int":
        cast = np.clip(values * 100, -1e6, 1e6).astype(np.int64)
        return cast, cast.astype(np.float64)
    if name == "strided":
        return np.repeat(values, 2)[::2], values
    if name == "big-endian":
        return values.astype(">f8"), values
    if name == "readonly":
        values.setflags(write=False)
        return values, values
    if name == "masked":
        return np.ma.masked_array(values, np.arange(DIM) % 3 == 0), None
    if name == "subclass":
        return values.view(type("Own", (np.ndarray,), {})), values
    if name == "tensor" or name == "strided tensor":
        return (tensor if name == "tensor" else tensor.repeat_interleave(2)[::2]), values
    if name in ("tensor32", "bfloat16", "half"):
        cast = tensor.to({"tensor32": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}[name])
        plain = cast.double().numpy()
        return cast, plain if np.isfinite(plain).all() else None
    if name == "grad":
        return tensor.clone().requires_grad_(True), values
    others = {
        "complex": lambda: values.astype(complex),
        "bool": lambda: values > 0,
        "object": lambda: values.astype(object),
        "list": lambda: values.tolist(),
        "nan": lambda: np.where(np.arange(DIM) == 3, np.nan, values),
        "inf": lambda: np.where(np.arange(DIM) == 3, np.inf, values),
        "short": lambda: values[:-1],
        "2d": lambda: values.reshape(2, -1),
        "0d": lambda: values[0],
        "matrix": lambda: np.matrix(values),
        "complex tensor": lambda: tensor.to(torch.complex128),
        "sparse": lambda: tensor.to_sparse(),
        "meta": lambda: tensor.to("meta"),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(DIM), 0.1, 0, torch.qint8),
        "int tensor": lambda: torch.arange(DIM),
        "string": lambda: np.array(["x"] * DIM),
        "record": lambda: np.zeros(DIM, dtype=[("a", float)]),
        "datetime": lambda: np.zeros(DIM, dtype="M8[s]"),
        "none": lambda: None,
        "memoryview": lambda: memoryview(values),
        "nested": lambda: torch.nested.nested_tensor([tensor]),
    }
    return others[name](), None
