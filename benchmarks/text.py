"""Text models: the paper's LSTM on a CPU against plain PyTorch, and the share of padding in a round's work on real data.

The LSTM's floor is arithmetic: 18.5 MFLOP per symbol, 6 GFLOP per step of 16 sentences of 20 words, the same for both. The
gain comes from less waiting between cores, since recurrences are sequences of small products.
"""

import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.ranks import ranks_of
from coalmine.simulation.batches import Batches, draw_batches
from coalmine.simulation.engines import ClientSettings, Examples
from coalmine.simulation.engines.fast.lstm_clients import LstmTogether
from coalmine.simulation.models import word_lstm
from coalmine.simulation.population import Partition
from coalmine.simulation.tasks import Task, load_task

SPEED_BAR, PADDING_BAR = 1.0, 0.25
CLIENT = ClientSettings(learning_rate=0.05)
CLIENTS, REPEATS = 6, 5


class PlainLstm(nn.Module):
    """The model written with torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_004, 96)
        self.lstm = nn.LSTM(96, 670, batch_first=True)
        self.dense1, self.dense2 = nn.Linear(670, 96), nn.Linear(96, 10_004)

    def forward(self, symbols: Tensor) -> Tensor:
        logits: Tensor = self.dense2(self.dense1(self.lstm(self.embedding(symbols))[0]))
        return logits


def plain(net: nn.Module, start: list[Tensor], batches: Batches, examples: Examples) -> Tensor:
    """Train one client after another with nn.Module and torch.optim; return the summed updates."""
    total = [torch.zeros_like(tensor) for tensor in start]
    for steps in batches.examples:
        with torch.no_grad():
            for parameter, tensor in zip(net.parameters(), start, strict=True):
                parameter.copy_(tensor)
        optimizer = torch.optim.SGD(net.parameters(), lr=CLIENT.learning_rate)
        for step in steps:
            index = torch.from_numpy(step)
            optimizer.zero_grad()
            logits = net(examples.inputs[index].long())
            labels = examples.labels[index].long()
            nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        for summed, parameter, tensor in zip(total, net.parameters(), start, strict=True):
            summed += parameter.detach() - tensor
    return torch.cat([tensor.flatten() for tensor in total])


def speed() -> float:
    """The speed relative to plain PyTorch on the CPU; the two alternate."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, 10_000, (CLIENTS * 16, 21), generator=generator).to(torch.int16)
    examples = Examples(words[:, :-1], words[:, 1:])
    owned = list(np.arange(CLIENTS * 16).reshape(CLIENTS, 16))
    batches = draw_batches(owned, epochs=1, batch_size=16, rng=np.random.default_rng(0))
    model, net = word_lstm(), PlainLstm()
    start = [parameter.detach().clone() for parameter in net.parameters()]
    start[4].zero_()  # torch's LSTM has a second bias, the model does not
    vector = torch.cat([tensor.flatten() for number, tensor in enumerate(start) if number != 4])
    starts = np.arange(CLIENTS + 1) * 16
    ranks = ranks_of(model, examples, CLIENT, Partition(np.arange(CLIENTS * 16), starts), clients=CLIENTS)

    def ours() -> Tensor:
        """A clip norm so large that it changes nothing."""
        return ranks.compute(vector, np.arange(CLIENTS), 1, 1e30)[0]

    try:
        size = sum(tensor.numel() for tensor in start[:4])
        expected, found = plain(net, start, batches, examples), ours()
        expected = torch.cat([expected[:size], expected[size + len(start[4]) :]])
        error = float((found - expected).norm() / expected.norm())
        times: dict[str, list[float]] = {"plain": [], "ours": []}
        for _ in range(REPEATS):
            for name, call in (("plain", lambda: plain(net, start, batches, examples)), ("ours", ours)):
                began = time.perf_counter()
                call()  # type: ignore[no-untyped-call]
                times[name].append(time.perf_counter() - began)
    finally:
        ranks.close()
    slow, fast = min(times["plain"]), min(times["ours"])  # a busy machine only adds time
    print(f"{model.name}, {CLIENTS} clients, one step of 16 x 20: {ranks.description}; updates differ by {error:.1e}")
    print(
        f"  plain PyTorch {slow:.2f} s, coalmine {fast:.2f} s, ratio {slow / fast:.2f} (bar {SPEED_BAR:g})", flush=True
    )
    return slow / fast


def padding(task: Task, clients: int, most: int, rounds: int = 20) -> float:
    """Share of the work spent on padding instead of symbols or images."""
    rng = np.random.default_rng(0)
    needed = computed = 0
    engine = LstmTogether(task.model, task.train, CLIENT, memory_limit=1.0) if task.model.ignored_label == 0 else None
    for _ in range(rounds):
        chosen = rng.choice(len(task.population), clients, replace=False)
        owned = [task.population.examples(int(client)) for client in chosen]
        batches = draw_batches(owned, epochs=1, batch_size=16, rng=rng, max_examples=most)
        if engine is not None:
            need, done = engine.work(batches)
        else:
            need, done = int(batches.counts.sum()), int((batches.counts > 0).sum()) * 16
        needed, computed = needed + need, computed + done
    share = 1 - needed / computed
    name = f"{task.name}, {clients} clients of at most {most} examples"
    print(f"{name}: {share:.1%} of the work is padding (bar {PADDING_BAR:.0%})", flush=True)
    return share


def main() -> int:
    ratio = speed()
    folder = os.environ.get("COALMINE_DATA_DIR")
    shares = []
    if folder is None:
        print("padding: skipped, COALMINE_DATA_DIR names no folder with real data")
    else:
        for name, clients, mosts in (("stackexchange", 167, (64, 256)), ("mnist-by-writer", 34, (256,))):
            task = load_task(name, data_dir=Path(folder))
            shares += [padding(task, clients, most) for most in mosts]
    return 0 if ratio >= SPEED_BAR and all(share <= PADDING_BAR for share in shares) else 1


if __name__ == "__main__":
    raise SystemExit(main())
