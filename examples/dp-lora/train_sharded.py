"""Fine-tune a language model with LoRA under differential privacy in several processes: FSDP2, with ghost clipping.

torchrun --nproc-per-node 2 examples/dp-lora/train_sharded.py
"""

import argparse
import os
import warnings

import torch
from language_model import NextTokenLoss, load_model, planned_epsilon, read_options, read_rows, run_example
from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import distributed
from torch.utils.data import DataLoader

from coalmine.integrations.opacus import audited


def main(options: argparse.Namespace) -> None:
    """Train, and print the audit's result and the accountant's epsilon on rank 0."""
    warnings.filterwarnings("ignore")
    if "RANK" not in os.environ:
        raise ValueError("start this example with: torchrun --nproc-per-node 2 examples/dp-lora/train_sharded.py")
    model, tokenizer = load_model(options, sharded=True)
    rows = read_rows(options, tokenizer)
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # torchrun sets the rank
    rank = distributed.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    model = FSDP2Wrapper(model)
    engine = PrivacyEngine()
    private, optimizer, loss, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.learning_rate),
        criterion=NextTokenLoss(),
        data_loader=DataLoader(rows, batch_size=options.batch_size),  # in total over all ranks
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=1.0,
        grad_sample_mode="ghost_fsdp",
        rand_on_empty=True,
    )
    settings = {"canaries": options.canaries, "seed_file": options.seed_file, "delta": options.delta}
    settings["unit"] = options.unit
    claim = planned_epsilon(options, loader)
    optimizer = audited(optimizer, private, claim=claim, data_loader=loader, directory=options.out, **settings)
    for _ in range(options.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss(private(input_ids=batch["input_ids"]).logits, batch["labels"]).backward()
            optimizer.step()
    result = optimizer.audit.finish(task="LoRA")
    if rank == 0:
        print(result)
        print(f"epsilon {engine.get_epsilon(options.delta):.3g} by the accountant")
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_example(main, read_options(__doc__, out="runs/dp-lora-fsdp2", modes=False))
