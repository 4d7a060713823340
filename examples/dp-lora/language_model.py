"""A language model, rows of text for it, its loss, and the options of the examples. Each row is one privacy unit."""

import argparse
import gzip
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from opacus.accountants import PRVAccountant
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from coalmine import data_canaries, read_seed
from coalmine.data.folders import data_folder

IGNORED = -100  # label of a position that is not predicted, as in transformers
END = 256  # token at the end of a text; the byte tokenizer has the 256 bytes and this token
UNITS = ("sentence", "post", "user")  # of Stack Exchange


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


def load_model(options: argparse.Namespace, *, sharded: bool = False) -> tuple[Any, Any]:
    """A model with LoRA adapters and its tokenizer: a small random Llama or GPT-2 that reads bytes, or real weights."""
    tokenizer, folder = None, Path(options.model)
    with torch.random.fork_rng():  # only the weights are the same in every run, not the noise
        torch.manual_seed(1)
        if options.model == "llama":
            shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
            model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=END + 1, **shape))
        elif options.model == "gpt2":
            shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": options.length}
            ends = {"bos_token_id": END, "eos_token_id": END}
            model = GPT2LMHeadModel(GPT2Config(vocab_size=END + 1, tie_word_embeddings=False, **shape, **ends))
        elif not (folder / "config.json").is_file():
            raise ValueError(f"--model must be llama, gpt2 or a folder with a config.json, got {options.model}")
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
            tokenizer = _load_tokenizer(folder)
        adapters = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
        _check_model(model, options, sharded)
        return get_peft_model(model, adapters).train(), tokenizer


def _load_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{folder} holds no tokenizer: put the model's own there ({reason})") from None


def _check_model(model: Any, options: argparse.Namespace, sharded: bool) -> None:
    longest = getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "n_positions", None)
    if longest is not None and options.length > longest:
        raise ValueError(
            f"--length must be at most {longest}, the most tokens that this model reads, got {options.length}"
        )
    if sharded and model.get_input_embeddings().weight is model.get_output_embeddings().weight:
        raise ValueError("FSDP2 cannot shard tied weights: use train.py, or a model with tie_word_embeddings=False")


def read_rows(options: argparse.Namespace, tokenizer: Any = None) -> Rows:
    """The first `--rows` rows: lines of the file, or sentences, posts or users of Stack Exchange."""
    texts = list(islice(_texts(options), options.rows))
    if len(texts) < 2:
        raise ValueError(f"the text must have at least two rows, got {len(texts)}")
    if tokenizer is None:
        return Rows([[*text.encode(), END] for text in texts], options.length, END)
    tokens = [tokenizer(text)["input_ids"] for text in texts]
    if max(map(len, tokens)) < 2:
        raise ValueError("the tokenizer makes no tokens of this text; is it the model's own?")
    padding = next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)
    return Rows(tokens, options.length, padding)


def _texts(options: argparse.Namespace) -> Iterator[str]:
    if options.text is not None:
        return _lines(options.text)
    path = data_folder() / "stackexchange" / "stackexchange_by_user.jsonl.gz"
    if path.is_file():
        return _stack_exchange(path, options.unit)
    if options.unit != "sentence":
        raise ValueError(f"--unit {options.unit} needs {path}: set COALMINE_DATA_DIR, or give --text FILE")
    print(f"{path} does not exist: training on the help texts that come with Python", file=sys.stderr)
    return _python_help()


def _lines(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--text must be a text in UTF-8, got {path}") from None
    return (line.strip() for line in text.splitlines() if line.strip())


def _stack_exchange(path: Path, unit: str) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            posts = [post["sentences"] for post in json.loads(line)["posts"]]
            if unit == "sentence":
                yield from (sentence for sentences in posts for sentence in sentences)
            elif unit == "post":
                yield from (" ".join(sentences) for sentences in posts)
            else:
                yield " ".join(sentence for sentences in posts for sentence in sentences)


def _python_help() -> Iterator[str]:
    """Each sentence of Python's own help once."""
    from pydoc_data.topics import topics

    sentences: Iterable[str] = (
        sentence
        for topic in topics.values()
        for paragraph in topic.split("\n\n")
        for sentence in re.split(r"(?<=[.!?]) ", " ".join(paragraph.split()))
    )
    return iter(dict.fromkeys(sentence for sentence in sentences if len(sentence) > 20))


def planted_secrets(options: argparse.Namespace, tokenizer: Any = None) -> data_canaries.DataCanaries | None:
    """Secrets that a coin each plants in the text, as rows of `read_rows`; None without `--secrets`."""
    if not options.secrets:
        return None

    def encode(text: str) -> list[int]:
        return list(text.encode()) if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"]

    return data_canaries.secrets(
        "The code of {name} is {secret}.",
        encode,
        count=options.secrets,
        seed=read_seed(options.seed_file),
        width=options.length,
    )


def planned_epsilon(options: argparse.Namespace, loader: Any) -> float:
    """The epsilon that Opacus's accountant will quote after the planned steps."""
    accountant = PRVAccountant()
    accountant.history = [(options.noise_multiplier, 1 / len(loader), options.epochs * len(loader))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of orders at the end of their range
        return float(accountant.get_epsilon(options.delta))


def read_options(description: str | None, *, out: str, modes: bool = True) -> argparse.Namespace:
    """The options of an example, checked."""
    kind = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=kind, allow_abbrev=False)
    parser.add_argument(
        "--model", default="llama", help="llama or gpt2 with random weights, or a folder with real ones"
    )
    parser.add_argument("--text", type=Path, help="file with one row per line, instead of Stack Exchange")
    parser.add_argument(
        "--unit",
        help=f"content of one row, the privacy unit: {', '.join(UNITS)} of Stack Exchange (default: sentence); for --text "
        "your own word for one line (default: line)",
    )
    parser.add_argument("--rows", type=_count, default=4_000, help="most rows to train on")
    parser.add_argument("--length", type=_count, default=64, help="tokens of a row; longer rows are cut off")
    parser.add_argument(
        "--batch-size", type=_count, default=80, help="expected rows in a batch: Poisson sampling varies it"
    )
    parser.add_argument("--epochs", type=_count, default=1, help="passes over the rows, in expectation")
    parser.add_argument("--learning-rate", type=_positive, default=1e-2, help="learning rate of AdamW")
    parser.add_argument(
        "--noise-multiplier", type=_positive, default=1.0, help="standard deviation of the noise over the clip"
    )
    parser.add_argument("--delta", type=_positive, default=1e-5, help="the delta of (epsilon, delta)")
    parser.add_argument(
        "--canaries", type=_count, help="number of canaries (default: 1,000, or as many as there are rows)"
    )
    parser.add_argument(
        "--secrets", type=int, default=0, help="secrets that a coin plants in the text or leaves out (default: none)"
    )
    parser.add_argument(
        "--seed-file", type=Path, default=Path("canary-seed"), help="file made by: coalmine seed canary-seed"
    )
    if modes:
        parser.add_argument(
            "--mode", choices=["hooks", "ghost"], default="hooks", help="how Opacus clips each row's gradient"
        )
    parser.add_argument("--out", type=Path, default=Path(out), help="run directory, which must be new")
    options = parser.parse_args()
    if options.text is None and options.unit not in (None, *UNITS):
        parser.error(f"--unit must be one of {', '.join(UNITS)} unless --text is given, got {options.unit}")
    options.unit = options.unit or ("sentence" if options.text is None else "line")
    return options


def run_example(main: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Run an example; an error in its input is one line and exit code 2."""
    try:
        if (options.out / "audit").exists():
            raise ValueError(f"{options.out} holds a run already: choose another --out, or remove it")
        main(options)
    except (OSError, ValueError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr)
        raise SystemExit(2) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return number
