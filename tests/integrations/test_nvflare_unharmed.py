"""The audit of NVFlare passes replies on as they are, and stops the job if it fails. In an environment of its own."""

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed; python -m studies.other_frameworks runs this")
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType

from coalmine.integrations.nvflare import CANARY, AuditFilter, CanaryFilter

SHAPES, DIM, CANARIES, ROUNDS = {"a": (20, 30), "b": (40,)}, 640, 10, 3


@pytest.fixture
def seed(tmp_path):
    path = tmp_path / "seed"
    path.write_text("the seed of this test\n")
    return str(path)


def server(tmp_path, seed):
    """The server's filter, and the reasons with which it stopped the job."""
    audit, stopped = AuditFilter(DIM, CANARIES, 1e-5, seed, str(tmp_path / "run"), 1.0), []
    audit.system_panic = lambda reason, context: stopped.append(reason)
    return audit, stopped


def reply(rng):
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def passed(data, *filters):
    """What arrives of a reply behind these filters."""
    shareable, context = DXO(DataKind.WEIGHT_DIFF, data={name: each.copy() for name, each in data.items()}), FLContext()
    shareable = shareable.to_shareable()
    for each in filters:
        shareable = each.process(shareable, context)
    return from_shareable(shareable)


def aggregated(audit, mean):
    context = FLContext()
    context.set_prop(AppConstants.AGGREGATION_RESULT, FLModel(params=mean), private=True, sticky=False)
    audit.handle_event(AppEventType.AFTER_AGGREGATION, context)


def test_the_replies_of_real_sites_are_summed_as_without_the_audit(tmp_path, seed):
    audit, stopped = server(tmp_path, seed)
    audit.handle_event(EventType.START_RUN, FLContext())
    rng = np.random.default_rng(0)
    canaries = [CanaryFilter(index, DIM, 1.0, seed) for index in range(CANARIES)]
    for number in range(1, ROUNDS + 1):
        real = [reply(rng) for _ in range(4)]
        arrived = [passed(data, audit).data for data in real]
        for data, found in zip(real, arrived, strict=True):
            assert all(np.array_equal(data[name], found[name]) and found[name].dtype == np.float32 for name in SHAPES)
        sent = [passed(reply(rng), each, audit).data for each in canaries]
        mean = {name: sum(each[name] for each in [*arrived, *sent]) / (4 + CANARIES) for name in SHAPES}
        before = {name: values.copy() for name, values in mean.items()}
        aggregated(audit, mean)
        assert all(np.array_equal(before[name], mean[name]) for name in SHAPES)  # the audit only reads
        item = list(audit._audit.log.rounds())[-1]
        assert (item.number, item.present.tolist(), item.participants) == (number, list(range(CANARIES)), 4 + CANARIES)
        without = {name: sum(each[name] for each in real) for name in SHAPES}
        alone = np.concatenate([(mean[name] * (4 + CANARIES) - without[name]).reshape(-1) for name in SHAPES])
        expected = audit._audit.core.updates(range(CANARIES), 1.0)
        np.testing.assert_allclose(alone, expected, atol=1e-5)
    audit.handle_event(EventType.END_RUN, FLContext())
    assert stopped == []


@pytest.mark.parametrize("number", [CANARIES, -1, "0", 1.5, None, 10**30])
def test_a_site_with_a_number_of_no_canary_is_a_real_site(tmp_path, seed, number):
    audit, stopped = server(tmp_path, seed)
    audit.handle_event(EventType.START_RUN, FLContext())
    dxo = DXO(DataKind.WEIGHT_DIFF, data=reply(np.random.default_rng(0)))
    dxo.set_meta_prop(CANARY, number)
    audit.process(dxo.to_shareable(), FLContext())
    aggregated(audit, dxo.data)
    assert [item.present.size for item in audit._audit.log.rounds()] == [0]
    assert stopped == []


@pytest.mark.parametrize("spoiled", [np.nan, np.inf])
def test_a_round_that_cannot_be_audited_stops_the_job_with_one_line(tmp_path, seed, spoiled):
    """NVFlare would log the exception and go on, and later rounds would be taken for this one."""
    audit, stopped = server(tmp_path, seed)
    audit.handle_event(EventType.START_RUN, FLContext())
    aggregated(audit, {name: np.full(shape, spoiled) for name, shape in SHAPES.items()})
    (line,) = stopped
    assert line.startswith("the audit of round 1 failed, so the job stops: ")
    assert "\n" not in line


def test_an_audit_that_cannot_start_stops_the_job(tmp_path, seed):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text("{}")
    audit, stopped = server(tmp_path, seed)
    audit.handle_event(EventType.START_RUN, FLContext())
    assert [line.startswith("the audit cannot start, so the job stops: ") for line in stopped] == [True]
