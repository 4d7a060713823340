"""Fine-tune a language model with LoRA under differential privacy, in a Hugging Face Trainer."""

import argparse
import warnings

import torch
from language_model import NextTokenLoss, load_model, planned_epsilon, read_options, read_rows, run_example
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from coalmine.integrations.transformers import PrivateTraining, audited


class PrivateTrainer(PrivateTraining, Trainer):
    """A Trainer that takes its batches from the loader that `make_private` returned."""


def main(options: argparse.Namespace) -> None:
    """Train, print the audit's result and the accountant's epsilon, and save the adapters."""
    warnings.filterwarnings("ignore", "Secure RNG turned off")
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    model, tokenizer = load_model(options)
    rows = read_rows(options, tokenizer)
    loss = NextTokenLoss()
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.learning_rate),
        criterion=loss,
        data_loader=DataLoader(rows, batch_size=options.batch_size),
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=1.0,
        grad_sample_mode=options.mode,
        rand_on_empty=True,  # a Llama cannot take a batch without rows
    )
    private, optimizer, *changed, loader = made
    settings = {"canaries": options.canaries, "seed_file": options.seed_file, "delta": options.delta}
    settings["unit"] = options.unit
    audit = audited(claim=planned_epsilon(options, loader), directory=options.out, **settings)
    arguments = TrainingArguments(
        output_dir=str(options.out / "trainer"),
        num_train_epochs=options.epochs,
        lr_scheduler_type="constant",
        max_grad_norm=0,  # Opacus clips
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = PrivateTrainer(
        private,
        arguments,
        private_loader=loader,
        criterion=changed[0] if changed else loss,  # ghost mode clips in the loss
        optimizers=(optimizer, None),
        callbacks=[audit],
    )
    trainer.train()
    print(audit.finish(task="LoRA"))
    print(f"epsilon {engine.get_epsilon(options.delta):.3g} by the accountant")
    model.save_pretrained(options.out / "adapters")


if __name__ == "__main__":
    run_example(main, read_options(__doc__, out="runs/dp-lora-trainer"))
