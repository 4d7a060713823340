"""A random Llama with LoRA adapters under Opacus, in a plain loop and in a Trainer, and the faults that tests put in."""

from dataclasses import dataclass
from typing import Any

import torch
from language_model import NextTokenLoss, Rows
from opacus import PrivacyEngine
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from coalmine.integrations.opacus import audited
from coalmine.integrations.transformers import PrivateTraining

WARNINGS = (
    "ignore:Secure RNG turned off",
    "ignore:Optimal order is",
    "ignore:Full backward hook",
    "ignore:.*alphas",
    "ignore:divide by zero encountered in log",
)


class PrivateTrainer(PrivateTraining, Trainer):
    """A Trainer on the loader of `make_private`."""


@dataclass
class Case:
    model: Any
    optimizer: Any
    loss: Any
    loader: Any
    rows: Rows
    engine: PrivacyEngine


def rows_of(tokens, length=12):
    return Rows(tokens, length, padding=0)


def random_rows(count, vocabulary, length):
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randint(4, length + 1, (count,), generator=generator).tolist()
    return rows_of([torch.randint(1, vocabulary, (size,), generator=generator).tolist() for size in sizes], length)


def make(
    *, rows=40, batch=10, mode="hooks", hidden=16, layers=1, rank=4, poisson=True, lr=1e-2, noise=1.0, train_only=""
):
    """A model with adapters on all linear layers; generators of its own make the batches and the noise."""
    torch.manual_seed(0)
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_attention_heads=2, **shape))
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules="all-linear")).train()
    for name, p in model.named_parameters():
        if train_only and train_only not in name:
            p.requires_grad = False
    data = random_rows(rows, 50, 12)
    loss = NextTokenLoss()
    engine = PrivacyEngine()
    private, optimizer, *changed, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr),
        criterion=loss,
        data_loader=DataLoader(data, batch_size=batch, shuffle=not poisson, generator=torch.Generator().manual_seed(3)),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        poisson_sampling=poisson,
        noise_generator=torch.Generator().manual_seed(5),
        grad_sample_mode=mode,
        rand_on_empty=True,
    )
    return Case(private, optimizer, changed[0] if changed else loss, loader, data, engine)


def plain_loop(case, *, steps, **settings):
    """The audit of a loop that takes so many steps."""
    optimizer = audited(case.optimizer, case.model, data_loader=case.loader, **settings)
    while optimizer.audit.last_round < steps:
        for batch in case.loader:
            optimizer.zero_grad()
            case.loss(case.model(input_ids=batch["input_ids"]).logits, batch["labels"]).backward()
            optimizer.step()
            if optimizer.audit.last_round >= steps:
                break
    return optimizer.audit


def trainer_of(case, callback, folder, *, steps, eval_dataset=None, **changes):
    """A Trainer that takes so many steps at a constant learning rate."""
    arguments = {"max_grad_norm": 0, "lr_scheduler_type": "constant", "save_strategy": "no", "report_to": "none"}
    arguments |= {"max_steps": steps, "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    return PrivateTrainer(
        case.model,
        TrainingArguments(output_dir=str(folder / "trainer"), **(arguments | changes)),
        private_loader=case.loader,
        criterion=case.loss,
        eval_dataset=eval_dataset,
        optimizers=(case.optimizer, None),
        callbacks=[callback],
    )


def frozen(case):
    """The optimizer's steps change nothing."""
    for group in case.optimizer.param_groups:
        group["lr"] = 0.0


def halve_noise(optimizer, left=0.5):
    """Less noise than the accountant counts."""
    real = optimizer.add_noise

    def add_noise():
        multiplier = optimizer.noise_multiplier
        optimizer.noise_multiplier = left * multiplier
        real()
        optimizer.noise_multiplier = multiplier

    optimizer.add_noise = add_noise


def cut_off(case):
    """One adapter is no longer part of the model's output."""
    layer = next(m for name, m in case.model.named_modules() if name.endswith("layers.0.mlp.down_proj"))
    layer.scaling = dict.fromkeys(layer.scaling, 0.0)
