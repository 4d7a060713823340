"""Audit a Hugging Face Trainer that trains with Opacus: a callback puts canaries into its steps.

    class PrivateTrainer(PrivateTraining, Trainer): ...

    model, optimizer, loader = PrivacyEngine().make_private(...)
    audit = audited(claim=3.0, canaries=1_000, seed=..., delta=1e-5)
    trainer = PrivateTrainer(model, args, private_loader=loader, optimizers=(optimizer, None), callbacks=[audit])
    trainer.train()
    print(audit.finish())

A Trainer makes its own data loader, which shuffles. The accountant's epsilon is for Poisson sampling, so `PrivateTraining`
makes the Trainer use the loader of `make_private` unchanged.
"""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

try:
    import torch
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("auditing a Hugging Face Trainer needs: pip install 'coalmine[transformers]'") from error

from coalmine.argument_checks import short_repr
from coalmine.data_canaries import DataCanaries
from coalmine.integrations import opacus
from coalmine.integrations.opacus.options import ThroughClip
from coalmine.integrations.records import checked_canaries
from coalmine.integrations.setup import AuditSettings
from coalmine.result.audit_result import AuditResult
from coalmine.result.other_rank import ResultOnRank0
from coalmine.verdict.claim import Claim

__all__ = ["AuditCallback", "PrivateTraining", "audited"]
IGNORED = -100  # the label of a token that is not predicted
NO_GHOST_LOSS = (
    "ghost clipping takes place in the loss: pass criterion=, the one that make_private returned, or nothing is clipped"
)


def audited(
    *,
    scale: float | None = None,
    through_clip: ThroughClip = None,
    replay: bool = True,
    data_canaries: DataCanaries | None = None,
    **settings: Unpack[AuditSettings],
) -> "AuditCallback":
    """A callback for a Trainer whose model, optimizer and data loader `make_private` returned.

    The settings are those of `coalmine.integrations.opacus.audited`: `canaries`, `unobserved`, `delta`, `directory`,
    `claim`, `on_violation`, `deferred`, `unit` (what a row holds), and either `seed` or `seed_file`, or an `audit` of your
    own. Each canary is paired with one row of the data set. `claim` is the epsilon that Opacus's accountant quotes for one
    row over the whole training, and is committed to before the first step. With `on_violation="raise"`, an alarm ends
    `train` with a ViolationError. Call `finish` after `train`.

    With `replay`, a few steps are run again without one row, which measures how far a real row moves the sum. With
    `PrivateTraining` the replay computes the loss as the Trainer does (`compute_loss`). `data_canaries` are records that
    `coalmine.data_canaries` inserted; the result says what the model's outputs tell about them.
    """
    return AuditCallback(scale=scale, through_clip=through_clip, replay=replay, data_canaries=data_canaries, **settings)


class AuditCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Audits a Trainer: puts canaries into its steps, and clears per-example gradients after each step."""

    def __init__(
        self,
        *,
        scale: float | None = None,
        through_clip: ThroughClip = None,
        replay: bool = True,
        data_canaries: DataCanaries | None = None,
        **settings: Unpack[AuditSettings],
    ) -> None:
        unknown = [name for name in settings if name not in AuditSettings.__annotations__]
        if unknown:
            known = ", ".join(AuditSettings.__annotations__)
            raise TypeError(f"audited() takes scale, through_clip, data_canaries, {known}, got {unknown[0]}")
        settings.setdefault("progress", "line")  # a Trainer has a bar of its own
        if not isinstance(replay, bool):
            raise TypeError(f"replay must be True or False, got {short_repr(replay)}: the Trainer has the loss")
        self._scale, self._through_clip, self._settings = scale, through_clip, settings
        self._replay, self._data_canaries = replay, checked_canaries(data_canaries)
        self.compute_loss: Callable[..., Any] | None = None  # of the Trainer, if it is a PrivateTraining
        self._optimizer: Any = None
        self._audit: opacus.OpacusAudit | None = None
        self._state: TrainerState | None = None  # of the training that it audits

    @property
    def audit(self) -> opacus.OpacusAudit:
        """The audit; ValueError before the training has begun."""
        if self._audit is None:
            raise ValueError("the audit begins with the training: call trainer.train() first, with this callback in it")
        return self._audit

    def finish(
        self,
        *,
        claim: Claim | float | None = None,
        accounted_epsilon: float | None = None,
        initial: "Mapping[str, torch.Tensor] | torch.Tensor | None" = None,
        task: str | None = None,
    ) -> AuditResult | ResultOnRank0:
        """The result for the current model; the keywords are those of `OpacusAudit.finish`."""
        return self.audit.finish(claim=claim, accounted_epsilon=accounted_epsilon, initial=initial, task=task)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put canaries into the optimizer's steps. If the Trainer resumes, drop the rounds after its checkpoint."""
        optimizer = _private_optimizer(kwargs.get("optimizer"))
        _check_trainer(args, kwargs.get("train_dataloader"))
        if self._state is state:
            raise ValueError("this callback is in the Trainer's callbacks twice: add it once")
        if self._audit is not None:
            raise ValueError(
                "this callback has audited a training already: make a new one, with a directory of its own"
            )
        self._optimizer = opacus.audited(
            optimizer,
            kwargs["model"],
            data_loader=kwargs["train_dataloader"],
            scale=self._scale,
            through_clip=self._through_clip,
            steps=state.max_steps if state.max_steps > 0 else None,
            replay=self.compute_loss if self._replay and self.compute_loss is not None else self._replay,
            data_canaries=self._data_canaries,
            **self._settings,
        )
        self._audit, self._state = self._optimizer.audit, state
        if self.audit.last_round < state.global_step:
            observed = self.audit.last_round
            opacus.unaudited(self._optimizer)
            self.audit.close()
            self._optimizer = self._audit = self._state = None
            raise ValueError(
                f"the Trainer resumes after step {state.global_step}, but the audit has observed {observed} steps: give "
                "audited() the directory of the run that it resumes"
            )
        if self.audit.last_round > state.global_step:
            self.audit.rewind_to(state.global_step)
        optimizer.zero_grad()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Clear the per-example gradients, which the Trainer's `model.zero_grad()` does not clear."""
        self._optimizer.zero_grad()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write every round to disk before a checkpoint that relies on it."""
        self.audit.flush(sync=True)


class PrivateTraining:
    """A mixin that goes before `Trainer`: it trains on `private_loader`, the loader that `make_private` returned.

    `criterion` takes logits and labels and returns a loss. With ghost clipping it is the one that `make_private` returned.
    By default it is the cross entropy of the next token, a mean over each example's own tokens and then over the examples.
    The Trainer's own loss is a mean over all tokens of the batch. There, the lengths of other examples change an example's
    contribution, and no clip bounds that.

    Opacus wraps the model, which hides its arguments from the Trainer. So `remove_unused_columns` is off, and the labels are
    in the column "labels" unless `label_names` says otherwise. A Trainer that resumes skips no batches of the private
    loader (`ignore_data_skip`): they are drawn anew. A Trainer seeds torch with `args.seed`, so noise and batches are drawn
    from generators of their own.
    """

    def __init__(
        self,
        *args: Any,
        private_loader: "torch.utils.data.DataLoader[Any]",
        criterion: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(private_loader, torch.utils.data.DataLoader):
            raise TypeError(
                f"private_loader must be the loader that make_private returned, got {short_repr(private_loader)}"
            )
        if criterion is not None and not callable(criterion):
            raise TypeError(f"criterion must take logits and labels and return a loss, got {short_repr(criterion)}")
        loss, own_loss = next_token_loss if criterion is None else criterion, kwargs.get("compute_loss_func")
        if own_loss is None:
            kwargs["compute_loss_func"] = lambda outputs, labels, **_: self._checked_loss(loss(outputs.logits, labels))
        elif criterion is not None:
            raise ValueError("give criterion or compute_loss_func, not both")
        self._private_loader = private_loader
        super().__init__(*args, **kwargs)
        trainer: Any = self
        self._is_ghost = isinstance(trainer.optimizer, DPOptimizerFastGradientClipping)
        if self._is_ghost and own_loss is None and criterion is None:
            raise ValueError(NO_GHOST_LOSS)
        _use_fresh_generators(trainer.optimizer, private_loader)
        trainer.args.remove_unused_columns, trainer.args.ignore_data_skip = False, True
        trainer.label_names = trainer.label_names or ["labels"]
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, AuditCallback):
                callback.compute_loss = trainer.compute_loss

    def _checked_loss(self, loss: Any) -> Any:
        """The loss as it is; in an evaluation, where nothing is clipped, a loss of ghost clipping as a tensor."""
        if isinstance(loss, torch.Tensor) and self._is_ghost and torch.is_grad_enabled():
            raise ValueError(NO_GHOST_LOSS)
        evaluates = isinstance(loss, DPTensorFastGradientClipping) and not torch.is_grad_enabled()
        return loss.detach() if evaluates else loss

    def get_train_dataloader(self) -> "torch.utils.data.DataLoader[Any]":
        """The private loader itself: accelerate would prefetch its batches, and the Trainer would shuffle them."""
        return self._private_loader


def next_token_loss(logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
    """The cross entropy of the next token: the mean over the tokens of each example, then over the examples."""
    targets = labels[:, 1:]
    each = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    )
    return (each.sum(dim=1) / (targets != IGNORED).sum(dim=1).clamp(min=1)).mean()


def _use_fresh_generators(optimizer: Any, loader: Any) -> None:
    """Draw noise and batches from fresh generators, unless they have their own.

    A Trainer seeds torch's global generator with `args.seed`, 42 by default: whoever knows that can compute the noise.
    """
    if isinstance(optimizer, DPOptimizer) and optimizer.generator is None and not optimizer.secure_mode:
        optimizer.generator = torch.Generator(optimizer.params[0].device if optimizer.params else "cpu")
        optimizer.generator.seed()
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if sampler is not None and getattr(sampler, "generator", loader) is None:
            sampler.generator = torch.Generator()
            sampler.generator.seed()


def _private_optimizer(wrapped: Any) -> DPOptimizer:
    """The optimizer of `make_private`, which accelerate may have wrapped."""
    optimizer = wrapped if isinstance(wrapped, DPOptimizer) else getattr(wrapped, "optimizer", None)
    if not isinstance(optimizer, DPOptimizer):
        raise TypeError(
            "the Trainer must have the optimizer that make_private returned, got "
            f"{short_repr(wrapped if optimizer is None else optimizer)}: pass Trainer(optimizers=(optimizer, None))"
        )
    return optimizer


def _check_trainer(args: TrainingArguments, loader: Any) -> None:
    """Reject settings under which a step differs from the one that Opacus accounts for."""
    if type(loader).__module__.startswith("accelerate"):
        raise ValueError(
            "the Trainer must train on the loader that make_private returned, but it has made its own: use a class "
            "PrivateTrainer(PrivateTraining, Trainer), and pass it private_loader"
        )
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            "gradient_accumulation_steps must be 1, as the accountant counts one batch of the loader in each step, got "
            f"{args.gradient_accumulation_steps}; give the loader a larger batch_size"
        )
    if args.max_grad_norm:
        raise ValueError(
            f"max_grad_norm must be 0, got {args.max_grad_norm:g}: the Trainer would clip, and log, the gradient before it "
            "has noise; make_private's max_grad_norm clips each example"
        )
    if args.world_size > 1 or args.n_gpu > 1:
        raise ValueError(
            "the callback audits a Trainer in one process on one device; for several, write your own training loop with "
            "coalmine.integrations.opacus"
        )
