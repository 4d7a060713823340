"""Fine-tune a language model with LoRA under differential privacy, in a Hugging Face Trainer."""

import argparse
import warnings
from pathlib import Path

import torch
from language_model import NextTokenLoss, load_model, read_rows
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from coalmine.integrations.transformers import PrivateTraining, audited

DELTA = 1e-5


class PrivateTrainer(PrivateTraining, Trainer):
    """A Trainer that takes its batches from the loader that `make_private` returned."""


def main(options: argparse.Namespace) -> None:
    """Train, and print the audit's result."""
    warnings.filterwarnings("ignore", "Secure RNG turned off")
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    torch.manual_seed(1)
    model, tokenizer = load_model(options.model)
    rows = read_rows(options.rows, text=options.text, unit=options.unit, tokenizer=tokenizer)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        data_loader=DataLoader(rows, batch_size=options.batch_size),
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=1.0,
        rand_on_empty=True,  # a Llama cannot take a batch without rows
    )
    audit = audited(canaries=1_000, seed_file="canary-seed", delta=DELTA, directory=options.out)
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
        model,
        arguments,
        private_loader=loader,
        criterion=NextTokenLoss(),
        optimizers=(optimizer, None),
        callbacks=[audit],
    )
    trainer.train()
    print(audit.finish(task="LoRA", unit=options.unit))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="llama", help="llama or gpt2 with random weights, or a folder with a pretrained model"
    )
    parser.add_argument("--text", type=Path, help="file with one example per line, instead of Stack Exchange")
    parser.add_argument(
        "--unit", choices=["sentence", "post", "user"], default="sentence", help="content of one row, the privacy unit"
    )
    parser.add_argument("--rows", type=int, default=4_000)
    parser.add_argument("--batch-size", type=int, default=80)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--noise-multiplier", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("runs/dp-lora-trainer"))
    main(parser.parse_args())
