"""One process of `tools/bench_step`: the reference GPT trained by DeepSpeed ZeRO-3, on a CPU.

    python tools/bench_step_deepspeed.py cpu|nvme SWAP_FOLDER STEPS

Runs under an interpreter that has deepspeed and need not have this package, so the model is stated again here: the
same modules, shapes and order of operations as `tiered/cli/gpt.py` with its default shape. Prints one line of JSON:
seconds of each step, peak resident bytes, growth above what the process held before the model, and the last loss.

The first run compiles DeepSpeed's operators, which takes minutes and is not part of any step. A run stopped meanwhile
leaves a `lock` file under ~/.cache/torch_extensions that later runs wait for; delete it then.
"""

import json
import os
import resource
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, LAYERS, HEADS = 8192, 1024, 8, 16
BATCH, CONTEXT = 2, 128


class Layer(nn.Module):
    """Attention and perceptron, each behind a norm and added; (batch, time, hidden) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mix_in, self.mix_out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.widen, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, stream: Tensor) -> Tensor:
        split = self.mix_in(self.first_norm(stream)).unflatten(-1, (3, HEADS, -1))  # (batch, time, 3, heads, width)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        stream = stream + self.mix_out(mixed)
        return stream + self.narrow(F.gelu(self.widen(self.second_norm(stream))))


class Model(nn.Module):
    """Tokens and targets, each int64 (batch, time), to a mean cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.embed(tokens)
        for layer in self.layers:
            stream = layer(stream)
        return F.cross_entropy(self.head(self.norm(stream)).float().flatten(0, 1), targets.flatten())


def settings(place: str, swap: str) -> dict[str, Any]:
    """DeepSpeed's settings for states on "cpu" or "nvme": asynchronous I/O with both pipelines on, as it advises."""
    optimizer: dict[str, Any] = {"device": place}
    parameters: dict[str, Any] = {"device": place}
    if place == "nvme":
        optimizer |= {"nvme_path": swap, "buffer_count": 5, "pipeline_read": True, "pipeline_write": True}
        parameters |= {"nvme_path": swap, "buffer_count": 8, "buffer_size": int(8e7)}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": optimizer, "offload_param": parameters},
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "thread_count": 1, "overlap_events": True},
        "steps_per_print": 10**9,
    }


def peak_resident() -> int:
    """Peak resident bytes of this process, on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Trains and prints the figures as the last line."""
    place, swap, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for name, value in single.items():
        os.environ.setdefault(name, value)
    import deepspeed  # reads the rank from the environment, which must be there before

    deepspeed.init_distributed(dist_backend="gloo")
    before = peak_resident()
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(place, swap))
    text = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    seconds, loss = [], torch.zeros(())
    for _ in range(steps):
        start = time.perf_counter()
        loss = engine(text[:, :-1], text[:, 1:])
        engine.backward(loss)
        engine.step()
        seconds.append(round(time.perf_counter() - start, 4))
    peak = peak_resident()
    figures = {"step_s": seconds, "peak_rss_bytes": peak, "growth_bytes": peak - before, "loss": loss.detach().item()}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
