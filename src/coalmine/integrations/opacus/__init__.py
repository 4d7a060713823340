"""Audit Opacus: canaries take part in steps like examples, and the audit observes every noised gradient.

    model, optimizer, loader = PrivacyEngine().make_private(...)
    optimizer = audited(optimizer, model, data_loader=loader, claim=3.0, canaries=1_000, seed=..., delta=1e-5)
    ...  # train as usual
    print(optimizer.audit.finish())

Each canary is paired with one row of the data set, and is in a step exactly when the loader's sampler picks that row. So the
audit checks the sampler too, and judges the accountant's epsilon.
"""

try:
    import opacus  # noqa: F401
except ImportError as error:
    raise ImportError("auditing Opacus needs: pip install 'coalmine[opacus]'") from error

from coalmine.integrations.opacus.attach import audited, unaudited
from coalmine.integrations.opacus.audit import OpacusAudit
from coalmine.integrations.opacus.parameters import named_layers, trained_parameters

__all__ = ["OpacusAudit", "audited", "named_layers", "trained_parameters", "unaudited"]
