"""Fine-tune a language model with LoRA under differential privacy: transformers, PEFT and Opacus."""

import argparse
import warnings

import torch
from language_model import (
    NextTokenLoss,
    load_model,
    planned_epsilon,
    planted_secrets,
    read_options,
    read_rows,
    run_example,
)
from opacus import PrivacyEngine
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader

from coalmine.integrations.opacus import audited


def main(options: argparse.Namespace) -> None:
    """Train, print the audit's result and the accountant's epsilon, and save the adapters."""
    warnings.filterwarnings("ignore", "Secure RNG turned off")
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    model, tokenizer = load_model(options)
    rows, planted = read_rows(options, tokenizer), planted_secrets(options, tokenizer)
    rows = rows if planted is None else planted.insert(rows)
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
    loss = changed[0] if changed else loss  # ghost mode clips in the loss
    settings = {"canaries": options.canaries, "seed_file": options.seed_file, "delta": options.delta}
    settings |= {"unit": options.unit, "data_canaries": planted}
    claim = planned_epsilon(options, loader)
    optimizer = audited(optimizer, private, claim=claim, data_loader=loader, directory=options.out, **settings)
    for epoch in range(1, options.epochs + 1):
        for batch in track(loader, f"epoch {epoch} of {options.epochs}", console=Console(stderr=True)):
            optimizer.zero_grad()
            current = loss(private(input_ids=batch["input_ids"]).logits, batch["labels"])
            current.backward()
            optimizer.step()
    print(optimizer.audit.finish(task="LoRA"))
    print(f"last loss {current.item():.3g}; epsilon {engine.get_epsilon(options.delta):.3g} by the accountant")
    if planted is not None:
        print(planted.extraction(model))
    model.save_pretrained(options.out / "adapters")


if __name__ == "__main__":
    run_example(main, read_options(__doc__, out="runs/dp-lora"))
