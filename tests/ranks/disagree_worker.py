"""One rank that runs a program: a list of words, one after the other, each a call of its user or a fault.

Started by forked.py for test_disagreement.py, which gives each rank a program of its own. A word is `CALL`, or
`CALL:DETAIL`: of shard the variant (`VARIANTS`), of forward, backward, step and shard the fault to suffer inside it
(`Faults`), of sleep the seconds. `try WORD` records the error that WORD raises and goes on. `scope` runs what follows
inside `with model:`. Calls are the methods of `Rank`.

Invariants:
1. The k-th batch of a rank is the same in every run, counted from shard.
2. The last line of output is a JSON object: `errors` (of `try`, and the one that ended the program), `digests`, `left`.
   A rank that ends by an error other than tiered's reports nothing: it ends as a program that never expected it.
3. Exit code: 0, `REFUSED` after an error of tiered, or what the fault makes it.
"""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tiered

REFUSED = 9
SLOW_S = 9.0  # of the fault `sleep`
WIDTH = 16
SHARD = {  # where `shard:FAULT` and `step:FAULT` strike: at the n-th call of a function of that file
    "shard": ("tiered/zero/build.py", 12),
    "step": ("tiered/optim/pipeline.py", 3),
}


class Surprise(Exception):
    """What a fault raises; no error of tiered."""


class Block(nn.Module):
    """A group of its own, in which a fault may strike."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_fault: Callable[[], None] | None = None
        self.backward_fault: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        if (fault := self.forward_fault) is not None:
            fault()
        if (late := self.backward_fault) is not None:
            y.register_hook(lambda grad: late())
        return x + y


class Net(nn.Module):
    """Blocks, used in an order that may be changed, and parameters of the root."""

    def __init__(self, width: int = WIDTH, blocks: int = 4) -> None:
        super().__init__()
        self.entry = nn.Parameter(torch.randn(width) / 4)
        self.shift = nn.Parameter(torch.randn(width) / 4)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.order = list(range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.entry
        for index in self.order:
            x = self.blocks[index](x)
        return (x + self.shift).square().mean()


class Swapped(Net):
    """The parameters of Net in another order."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters = dict(reversed(self._parameters.items()))


def half_frozen() -> Net:
    model = Net()
    model.blocks[2].requires_grad_(False)
    return model


HALF = tiered.MixedPrecision(param_dtype=torch.bfloat16)
VARIANTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {  # of shard: the model, and settings beside
    "wide": (lambda: Net(width=24), {}),
    "deep": (lambda: Net(blocks=5), {}),
    "frozen": (half_frozen, {}),
    "swapped": (Swapped, {}),
    "stage": (Net, {"stage": 2}),
    "precision": (Net, {"precision": HALF}),
    "tiers": (Net, {"optimizer_tier": "host"}),
    "patient": (Net, {"rank_timeout_s": 91}),
    "no folder": (Net, {"nvme": "/nowhere/at/all"}),
    "small budget": (Net, {"host_budget": 4096}),
    "unsupported": (lambda: Net().to(torch.complex64), {}),
}


class Rank:
    """This process: its model, and the calls that programs are made of."""

    def __init__(self, rank: int, folder: Path, settings: dict[str, Any]) -> None:
        self.rank = rank
        self.folder = folder
        self.settings = settings
        self.errors: list[dict[str, str]] = []
        self.digests: list[str] = []
        self.model: Any = None
        self.values: dict[str, Tensor] = {}

    def run(self, program: list[str]) -> None:
        for position, word in enumerate(program):
            if word == "scope":
                with self.model:
                    self.run(program[position + 1 :])
                return
            wanted, call, detail = _parse(word)
            try:
                getattr(self, call)(*detail)
            except (tiered.TieredError, Surprise) as error:
                if not wanted:
                    raise
                self.note(word, error)

    def note(self, word: str, error: BaseException) -> None:
        self.errors.append({"word": word, "type": type(error).__name__, "message": str(error)})

    # --- calls of tiered's user ---

    def shard(self, detail: str = "") -> None:
        torch.manual_seed(3)
        build, beside = VARIANTS.get(detail, (Net, {}))
        places = {"param_tier": "nvme", "optimizer_tier": "nvme", "nvme": str(self.folder / "swap")}
        budgets = {"device": "cpu", "host_budget": "16MiB", "device_budget": "64KiB"}
        config = tiered.Config(**{**budgets, **places, **self.settings, **beside})
        with _fault_inside("shard", detail if detail not in VARIANTS else ""):
            self.model = tiered.shard(build(), config)
        self.optimizer = tiered.AdamW(self.model.parameters(), lr=1e-2, max_grad_norm=0.5)
        self.data = torch.Generator().manual_seed(11 + self.rank)

    def forward(self, fault: str = "") -> None:
        self.model.blocks[2].forward_fault = FAULTS.get(fault)
        try:
            self.loss = self.model(torch.randn(4, WIDTH, generator=self.data))
        finally:
            self.model.blocks[2].forward_fault = None

    def backward(self, fault: str = "") -> None:
        """A whole forward and backward."""
        self.model.blocks[2].backward_fault = FAULTS.get(fault)
        try:
            self.forward()
        finally:
            self.model.blocks[2].backward_fault = None
        self.loss.backward()

    def unsynced(self) -> None:
        with tiered.no_sync(self.model):
            self.backward()

    def step(self, fault: str = "") -> None:
        with _fault_inside("step", fault):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> None:
        self.backward()
        self.step()

    def endless(self) -> None:
        while True:
            self.train()

    def again(self) -> None:
        """The last batch once more, as a user does who has caught an error."""
        self.data = torch.Generator().manual_seed(11 + self.rank)
        self.optimizer.zero_grad()

    def state_dict(self) -> None:
        self.values = {name: value.clone() for name, value in self.model.state_dict().items()}

    def saved(self) -> None:
        """The optimizer's state dict: at every stage each rank has a part of it."""
        self.optimizer.state_dict()

    def load_state_dict(self) -> None:
        self.model.load_state_dict(self.values)

    def digest(self) -> None:
        seen = hashlib.sha256()
        for value in self.model.state_dict().values():
            seen.update(value.numpy().tobytes())
        self.digests.append(seen.hexdigest())

    def gather(self) -> None:
        with tiered.gather(self.model.blocks[1], modify=True), torch.no_grad():
            self.model.blocks[1].linear.bias.fill_(0.5)

    def edit(self) -> None:
        with torch.no_grad():
            self.model.blocks[1].linear.bias.add_(1.0)

    def average(self) -> None:
        tiered.average(self.model, 1.0)

    def close(self) -> None:
        tiered.close(self.model)

    def drop(self) -> None:
        tiered.close(self.model, keep_weights=False)

    # --- what needs no other rank ---

    def read(self) -> None:
        float(self.model.blocks[3].linear.weight.sum())

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, WIDTH))

    def turn(self) -> None:
        self.model.order.reverse()

    # --- faults between calls ---

    def join(self) -> None:
        dist.init_process_group("gloo")

    def sleep(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def exit(self) -> None:
        sys.exit(0)

    def fault(self, kind: str) -> None:
        FAULTS[kind]()

    def wake(self, rank: str) -> None:
        os.kill(int((self.folder / f"{rank}.pid").read_text()), signal.SIGCONT)


def _parse(word: str) -> tuple[bool, str, list[str]]:
    call, _, detail = word.removeprefix("try ").partition(":")
    return word.startswith("try "), call, [detail] if detail else []


def _surprise() -> None:
    raise Surprise("a fault of this test")


FAULTS: dict[str, Callable[[], None]] = {
    "raise": _surprise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "sleep": lambda: time.sleep(SLOW_S),
    "drag": lambda: time.sleep(0.01),
}


class _fault_inside:
    """A scope in which `fault` strikes in the middle of what is called there, shard or step; `drag` all the way."""

    def __init__(self, place: str, fault: str) -> None:
        self.file, self.left = SHARD[place]
        self.fault = FAULTS.get(fault)
        self.always = fault == "drag"

    def __enter__(self) -> None:
        if self.fault is not None:
            sys.setprofile(self._see)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: Any, event: str, value: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(self.file):
            self.left -= 1
            if (self.always or self.left == 0) and self.fault is not None:
                self.fault()


def main(rank: int, request: dict[str, Any]) -> None:
    faulthandler.dump_traceback_later(request["limit"] - 1.0)  # for whoever is about to be killed there
    torch.set_num_threads(1)
    folder = Path(request["folder"])
    me = Rank(rank, folder, request["settings"])
    code = 0
    try:
        me.run(request["programs"][rank])
    except tiered.TieredError as error:
        me.note("end", error)
        if me.model is not None:
            tiered.close(me.model, keep_weights=False)
        code = REFUSED
    print(json.dumps({"errors": me.errors, "digests": me.digests}), flush=True)
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)
