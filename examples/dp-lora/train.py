"""Fine-tune a language model with LoRA under differential privacy: transformers, PEFT and Opacus."""

import argparse
import warnings
from pathlib import Path

import torch
from language_model import NextTokenLoss, load_model, read_rows
from opacus import PrivacyEngine
from torch.utils.data import DataLoader

from coalmine.integrations.opacus import audited

DELTA = 1e-5


def main(options: argparse.Namespace) -> None:
    """Train, print the audit's result and the accountant's epsilon, and save the adapters."""
    warnings.filterwarnings("ignore", "Secure RNG turned off")
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    torch.manual_seed(1)
    model, tokenizer = load_model(options.model)
    rows = read_rows(options.rows, text=options.text, unit=options.unit, tokenizer=tokenizer)
    loss = NextTokenLoss()
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        criterion=loss,
        data_loader=DataLoader(rows, batch_size=options.batch_size),
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=1.0,
        grad_sample_mode=options.mode,
        rand_on_empty=True,  # a Llama cannot take a batch without rows
    )
    private, optimizer, *changed, loader = made
    loss = changed[0] if changed else loss  # ghost mode clips in the loss
    settings = {"canaries": 1_000, "seed_file": "canary-seed", "delta": DELTA, "directory": options.out}
    optimizer = audited(optimizer, private, data_loader=loader, **settings)
    for _ in range(options.epochs):
        for batch in loader:
            optimizer.zero_grad()
            current = loss(private(input_ids=batch["input_ids"]).logits, batch["labels"])
            current.backward()
            optimizer.step()
    print(optimizer.audit.finish(task="LoRA", unit=options.unit))
    print(f"last loss {current.item():.3g}; epsilon {engine.get_epsilon(DELTA):.3g} by the accountant")
    model.save_pretrained(options.out / "adapters")


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
    parser.add_argument("--mode", choices=["hooks", "ghost"], default="hooks")
    parser.add_argument("--out", type=Path, default=Path("runs/dp-lora"))
    main(parser.parse_args())
