"""A language model, rows of text for it, and its loss. Each row is one privacy unit."""

import gzip
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

IGNORED = -100  # label of a position that is not predicted, as in transformers
END = 256  # token at the end of a text; the byte tokenizer has the 256 bytes and this token
LENGTH = 64  # tokens per row


class Rows(Dataset):
    """Rows of `input_ids` and `labels`, cut or padded to one length."""

    def __init__(self, tokens: list[list[int]], length: int, padding: int) -> None:
        self.input_ids = torch.full((len(tokens), length), padding)
        self.labels = torch.full((len(tokens), length), IGNORED)
        for row, row_tokens in enumerate(tokens):
            cut = torch.tensor(row_tokens[:length])
            self.input_ids[row, : len(cut)] = self.labels[row, : len(cut)] = cut

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids[row], "labels": self.labels[row]}


class NextTokenLoss(torch.nn.Module):
    """The cross entropy of the next token: the mean over the tokens of each row, then over the rows.

    A mean over all tokens of a batch would tie each row's gradient to the lengths of the others, which no clip bounds.
    """

    reduction = "mean"

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss, or one loss per row if `reduction` is "none", as ghost clipping requires."""
        predictions, targets = logits[:, :-1].transpose(1, 2), labels[:, 1:]
        each = torch.nn.functional.cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="none")
        losses = each.sum(dim=1) / (targets != IGNORED).sum(dim=1).clamp(min=1)
        return losses if self.reduction == "none" else losses.mean()


def load_model(name: str) -> tuple[Any, Any]:
    """A model with LoRA adapters and its tokenizer: a small random Llama or GPT-2 that reads bytes, or real weights."""
    tokenizer = None
    if name == "llama":
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=END + 1, **shape))
    elif name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=END + 1, n_embd=64, n_layer=2, n_head=4, n_positions=LENGTH))
    else:
        model = AutoModelForCausalLM.from_pretrained(name, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    return get_peft_model(model, adapters).train(), tokenizer


def read_rows(count: int, *, text: Path | None, unit: str, tokenizer: Any = None) -> Rows:
    """The first `count` rows: lines of the file, or sentences, posts or users of Stack Exchange."""
    texts = list(islice(_lines(text) if text else _stack_exchange(unit), count))
    if tokenizer is None:
        return Rows([[*text.encode(), END] for text in texts], LENGTH, END)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return Rows([tokenizer(text)["input_ids"] for text in texts], LENGTH, padding)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from (line.strip() for line in file if line.strip())


def _stack_exchange(unit: str) -> Iterator[str]:
    path = Path(os.environ.get("COALMINE_DATA_DIR", ".")) / "stackexchange" / "stackexchange_by_user.jsonl.gz"
    if not path.exists():
        raise SystemExit(
            f"{path} does not exist: set COALMINE_DATA_DIR to the folder with the data, or give --text FILE"
        )
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            posts = [post["sentences"] for post in json.loads(line)["posts"]]
            if unit == "sentence":
                yield from (sentence for sentences in posts for sentence in sentences)
            elif unit == "post":
                yield from (" ".join(sentences) for sentences in posts)
            else:
                yield " ".join(sentence for sentences in posts for sentence in sentences)
