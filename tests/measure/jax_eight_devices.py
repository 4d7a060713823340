"""Run by test_jax_devices.py with eight virtual devices: an audit of sharded arrays, one leaf of them replicated."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coalmine import Audit
from coalmine.canaries import rotation_jax
from coalmine.canaries.sharded_jax import ShardedCanaries

rotation_jax.on_cpu = lambda array: False  # every device counts as one that is not the host's
assert len(jax.devices()) == 8
SETTINGS = {"canaries": 40, "unobserved": 60, "seed": 9, "delta": 1e-5, "rounds": 3}
rng = np.random.default_rng(0)
mesh = jax.make_mesh((4, 2), ("a", "b"))
whole = jax.device_put(np.zeros((80, 40), np.float32), NamedSharding(mesh, P("b", "a")))

# One array: the audit's canaries are ShardedCanaries, without a host copy.
alone = Audit.for_model({"w": whole}, **SETTINGS)
assert alone.settings.blocks == (400,) * 8, alone.settings
total = alone.updates([3, 7], 1.0)["w"]
assert total.sharding.is_equivalent_to(whole.sharding, 2)
expected = ShardedCanaries(100, whole, seed=9).combine(np.isin(np.arange(100), [3, 7]))
np.testing.assert_allclose(total, expected, atol=1e-6)

# Several arrays: sharded over both axes, over one (each part on two devices), and on all devices.
specs = {"w": ((80, 40), P("b", "a")), "half": ((40, 70), P("a")), "b": ((50,), P())}
params = {k: jax.device_put(np.zeros(s, np.float32), NamedSharding(mesh, p)) for k, (s, p) in specs.items()}
audit = Audit.for_model(params, **SETTINGS)
names = [name for name, _ in audit.settings.layers]
assert audit.settings.dim == 80 * 40 + 40 * 70 + 50
assert names.count("b") == 1
assert sum(name.startswith("half@") for name in names) == 4
for number in (1, 2, 3):
    present = audit.canaries_in_round(number)
    others = {
        k: jax.device_put(rng.normal(size=s).astype(np.float32), params[k].sharding) for k, (s, _) in specs.items()
    }
    noise = {k: rng.normal(size=s).astype(np.float32) for k, (s, _) in specs.items()}
    canaries = audit.updates(present, 1.0)
    release = {k: others[k] + canaries[k] + noise[k] for k in specs}
    audit.observe_round(number, release, present=present, others=others, noise_std=1.0, clip_norm=1.0)
    for item in list(audit.log.rounds())[-1:]:
        exact = np.sqrt(sum(np.square(np.asarray(release[k]), dtype=float).sum() for k in specs))
        np.testing.assert_allclose(item.norm, exact, rtol=1e-5)
        rests = np.sqrt(sum(np.square(noise[k], dtype=float).sum() for k in specs))
        np.testing.assert_allclose(np.linalg.norm(item.layer_rests), rests, rtol=1e-4)
        b = names.index("b")
        np.testing.assert_allclose(item.layer_rests[b], np.linalg.norm(noise["b"]), rtol=1e-3)
        along = item.residual_cosines[present] * item.residual_norm
        assert abs(along.mean() - 1) < 5 / np.sqrt(len(present)), along
audit.observe_final(release, initial=params)
result = audit.result(claim=5.0)
assert all(gauge.status == "ok" for gauge in result.gauges), [g for g in result.gauges if g.status != "ok"]

# Arrays that come with another sharding are moved; the record is the same.
moved = {k: jax.device_put(np.asarray(v), jax.devices()[0]) for k, v in release.items()}
twin = Audit.for_model(params, **SETTINGS)
twin.observe_round(1, moved, present=[0])
other = Audit.for_model(params, **SETTINGS)
other.observe_round(1, release, present=[0])
assert twin.log_digest == other.log_digest
for wrong, message in [({"blocks": [6050]}, "blocks must be omitted"), ({"canaries": 400}, "every block must hold")]:
    with pytest.raises(ValueError, match=message):
        Audit.for_model(params, **SETTINGS | wrong)
with pytest.raises(ValueError, match="n is on the host"):
    Audit.for_model({"w": whole, "n": np.zeros(500, np.float32)}, **SETTINGS)
print("same")
