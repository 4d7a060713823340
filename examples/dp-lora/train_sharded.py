"""Fine-tune a language model with LoRA under differential privacy in several processes: FSDP2, with ghost clipping.

torchrun --nproc-per-node 2 examples/dp-lora/train_sharded.py
"""

import argparse
import warnings
from pathlib import Path

import torch
from language_model import NextTokenLoss, load_model, read_rows
from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import distributed
from torch.utils.data import DataLoader

from coalmine.integrations.opacus import audited

DELTA = 1e-5


def main(options: argparse.Namespace) -> None:
    """Train, and print the audit's result and the accountant's epsilon on rank 0."""
    warnings.filterwarnings("ignore")
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # torchrun sets the rank
    rank = distributed.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(1)
    model, tokenizer = load_model(options.model)
    rows = read_rows(options.rows, text=options.text, unit=options.unit, tokenizer=tokenizer)
    model = FSDP2Wrapper(model)
    torch.manual_seed(1_000 + rank)  # each rank samples its own rows
    engine = PrivacyEngine()
    private, optimizer, loss, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        criterion=NextTokenLoss(),
        data_loader=DataLoader(rows, batch_size=options.batch_size),  # in total over all ranks
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=1.0,
        grad_sample_mode="ghost_fsdp",
        rand_on_empty=True,
    )
    settings = {"canaries": 1_000, "seed_file": "canary-seed", "delta": DELTA, "directory": options.out}
    optimizer = audited(optimizer, private, data_loader=loader, **settings)
    for _ in range(options.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss(private(input_ids=batch["input_ids"]).logits, batch["labels"]).backward()
            optimizer.step()
    result = optimizer.audit.finish(task="LoRA", unit=options.unit)
    if rank == 0:
        print(result)
        print(f"epsilon {engine.get_epsilon(DELTA):.3g} by the accountant")
    distributed.destroy_process_group()


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
    parser.add_argument("--out", type=Path, default=Path("runs/dp-lora-fsdp2"))
    main(parser.parse_args())
