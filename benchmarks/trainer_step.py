"""What the audit adds to a step of a Hugging Face Trainer that trains LoRA adapters of a small language model with Opacus.

Trainings with and without the audit alternate, in changing order. A step's time is that between two ends of steps, without
the first ones.
"""

import statistics
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from typing import Any

STEPS, WARM_UP, PAIRS = 50, 15, 3
ROWS, BATCH, LENGTH, WORDS, CANARIES, BAR = 2_000, 32, 32, 1_000, 1_000, 0.25


def main() -> int:
    """Print the share next to its bar; 1 if it is missed."""
    if not all(find_spec(name) for name in ("transformers", "peft", "accelerate")):
        print("skipped: it needs pip install 'coalmine[transformers]' peft")
        return 0
    taken: dict[bool, list[float]] = {False: [], True: []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pair in range(PAIRS):
            for audit in (False, True) if pair % 2 else (True, False):
                taken[audit].append(train(audit=audit))
    plain, audited = (statistics.median(taken[audit]) for audit in (False, True))
    share = audited / plain - 1
    print(f"a step of a Trainer {1e3 * plain:.1f} ms, audited {1e3 * audited:.1f} ms, {share:.0%} more (bar {BAR:.0%})")
    return int(share > BAR)


def train(*, audit: bool) -> float:
    """The median seconds of a step of one training."""
    import torch
    from opacus import PrivacyEngine
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from coalmine.integrations.transformers import PrivateTraining, audited

    class PrivateTrainer(PrivateTraining, Trainer):  # type: ignore[misc]
        """A Trainer on the loader of `make_private`."""

    class Clock(TrainerCallback):  # type: ignore[misc]
        """The times at which steps end, and per-example gradients are cleared, as the audit's callback does too."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            optimizer.zero_grad()
            self.ends.append(time.perf_counter())

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **shape))
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")).train()
    tokens = torch.randint(1, WORDS, (ROWS, LENGTH))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
        data_loader=DataLoader(rows, batch_size=BATCH),  # type: ignore[arg-type]
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    clock, callbacks = Clock(), list[Any]()
    if audit:
        callbacks.append(audited(canaries=CANARIES, seed=b"a benchmark's seed", delta=1e-5, claim=8.0, progress=False))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            max_grad_norm=0,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
            logging_strategy="no",
        )
        trainer = PrivateTrainer(
            private, arguments, private_loader=loader, optimizers=(optimizer, None), callbacks=[*callbacks, clock]
        )
        trainer.train()
    return statistics.median(
        two - one for one, two in zip(clock.ends[WARM_UP:], clock.ends[WARM_UP + 1 :], strict=False)
    )


if __name__ == "__main__":
    sys.exit(main())
