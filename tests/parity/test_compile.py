"""torch.compile over and under sharding, against plain torch compiled the same way; tracers that cannot work say so.

A compiled graph keeps what it assumed of its inputs, so parameters whose class, memory and gradient come and go are
what could break it: silently wrong numbers, or a compilation at every step. So scenarios also count what dynamo
compiles after the first step: nothing. Backend "aot_eager" runs dynamo and AOTAutograd, which hold all that guards and
saves tensors, without generating code; one test generates code as well.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Case, Gpt, token_batch
from parity.harness import EMULATED, HOST, Placement, Session, agree, config_for, refused, tiered_session, variant
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tiered
from tiered.errors import UsageError

pytestmark = pytest.mark.filterwarnings(  # of torch's own compiler, which hides the first from a log, not from a filter
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:.*torch.jit.*is deprecated:DeprecationWarning",
)

OLD = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),  # one that came with what is missing, in 2.8
    reason="the compiler of this torch takes no parameter of a class of its own for a tensor",
)
BACKEND = "aot_eager"
SMALL = Case("small_gpt", partial(Gpt, 3), token_batch)


@pytest.fixture(params=[HOST, EMULATED], ids=lambda place: place.name)
def placement(request: pytest.FixtureRequest) -> Placement:
    """Compiling takes seconds: where nothing moves, and where everything does."""
    return request.param


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiles() -> int:
    """How many graphs dynamo has compiled in this test."""
    return int(counters["stats"]["unique_graphs"])


def wrap_blocks(model: nn.Module, **options: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=BACKEND, **options)


def compile_blocks(model: nn.Module, *, backend: str = BACKEND, **options: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend, **options)


def compile_children(model: nn.Module) -> None:
    for block in model.blocks:
        block.up.compile(backend=BACKEND)
        block.norm_feed = torch.compile(block.norm_feed, backend=BACKEND)


def compile_model(model: nn.Module) -> None:
    model.compile(backend=BACKEND)


PREPARES = {
    "wrapped": partial(wrap_blocks, fullgraph=True),
    "in_place": partial(compile_blocks, fullgraph=True),
    "children": compile_children,
    "model": compile_model,
}


def train(session: Session) -> Any:
    """Four steps; the first compiles all there is to compile."""
    seen = [session.train(0)]
    first = compiles()
    seen += session.train_on(range(1, 4))
    assert first, "nothing was compiled"
    assert compiles() == first, "compiled again in a later step"
    torch._dynamo.reset()  # the next session compiles for itself
    return [seen, session.weights(), session.moments()]


@OLD
@pytest.mark.parametrize("prepare", PREPARES.values(), ids=PREPARES)
def test_modules_compiled_before_sharding_train_as_in_torch_and_compile_once(
    prepare: Callable[[nn.Module], None], placement: Placement, swap: Path
) -> None:
    """The names in the state dict are torch's too, with `_orig_mod.` where a module was wrapped."""
    agree(train, SMALL, placement, swap, prepare=prepare)


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("prepare", [wrap_blocks, compile_blocks])
def test_compiled_blocks_under_checkpointing_train_as_in_torch(
    prepare: Callable[[nn.Module], None], kind: str, placement: Placement, swap: Path
) -> None:
    case = variant(SMALL, "checkpointed", partial(Gpt, 3, checkpointing=kind))
    agree(train, case, placement, swap, prepare=prepare)


@OLD
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch generates C++, and there is no compiler")
def test_generated_code_trains_as_torchs_own(placement: Placement, swap: Path) -> None:
    agree(train, SMALL, placement, swap, prepare=partial(compile_blocks, backend="inductor", fullgraph=True))


@pytest.mark.parametrize("what", ["model", "in_place", "blocks"])
def test_a_model_compiled_after_sharding_trains_as_in_torch(what: str, placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        if what == "model":
            session.model = torch.compile(session.model, backend=BACKEND)
        else:
            {"in_place": compile_model, "blocks": compile_blocks}[what](session.model)
        seen = train(session)
        session.model = getattr(session.model, "_orig_mod", session.model)
        return seen

    agree(scenario, SMALL, placement, swap)


class Calling(nn.Module):
    """Calls a compiled function with its own parameters."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.function(self.norm(x), self.up.weight, self.up.bias))


def calling_gpt() -> nn.Module:
    model = Gpt(3)
    function = torch.compile(lambda x, weight, bias: torch.tanh(F.linear(x, weight, bias)), backend=BACKEND)
    model.blocks = nn.ModuleList(Calling(function) for _ in range(3))
    return model


def test_a_compiled_function_may_be_given_parameters_inside_forward(placement: Placement, swap: Path) -> None:
    agree(train, variant(SMALL, "calling", calling_gpt), placement, swap)


def test_compiling_late_with_gradients_present_and_for_new_shapes_and_modes_is_right(
    placement: Placement, swap: Path
) -> None:
    def scenario(session: Session) -> Any:
        def backward(length: int) -> float:
            loss = session.model(*(t[:, :length] for t in session.batch(length)))
            loss.backward()
            return loss.item()

        seen: list[Any] = [session.backward(0)]
        compile_blocks(session.model)
        seen += [backward(12), backward(5)]  # both compile while gradients have accumulated
        session.optimizer.step()
        session.optimizer.zero_grad(set_to_none=False)
        seen.append(backward(7))
        session.optimizer.step()
        with torch.no_grad():
            seen.append(session.model(*session.batch(3)).item())
        with torch.inference_mode():
            seen.append(session.model(*session.batch(3)).item())
        before = compiles()
        assert before
        seen.append(session.train(6))
        assert compiles() == before
        torch._dynamo.reset()
        return [seen, session.weights()]

    agree(scenario, SMALL, placement, swap)


@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_a_compiled_training_step_is_a_training_step(zero: str, placement: Placement, swap: Path) -> None:
    """The graph ends where the model, backward and the optimizer begin, and the compiler traces none of them."""

    def scenario(session: Session) -> Any:
        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss = session.model(tokens, targets) * 1.0
            loss.backward()
            session.optimizer.step()
            (session.optimizer if zero == "optimizer" else session.model).zero_grad()
            return loss.detach() + 1

        if session.config is not None:
            step = torch.compile(step, backend=BACKEND)
        seen = [step(*session.batch(0)).item()]
        first = compiles()
        seen += [step(*session.batch(seed)).item() for seed in range(1, 4)]
        assert not session.config or compiles() == first, "compiled again in a later step"
        torch._dynamo.reset()
        return [seen, session.weights()]

    agree(scenario, SMALL, placement, swap)


def test_a_compiled_function_in_gather_reads_values_and_gradients(placement: Placement, swap: Path) -> None:
    def scenario(session: Session) -> Any:
        @torch.compile(backend=BACKEND)
        def read(x: Tensor, weight: Tensor) -> Tensor:
            y = x @ weight
            return y if weight.grad is None else y + weight.grad.sum()

        def call() -> Tensor:
            position = session.model.position
            if session.config is None:
                return read(torch.ones(12), position)
            with tiered.gather(position):
                return read(torch.ones(12), position)

        seen = []
        for seed in range(3):
            seen.append(call().detach())
            session.backward(seed)
        torch._dynamo.reset()
        return seen

    agree(scenario, SMALL, placement, swap)


def test_a_closed_model_goes_on_compiled_as_a_plain_one(swap: Path) -> None:
    model = SMALL.build()
    compile_blocks(model)
    want = model(*token_batch(0)).item()
    with tiered.shard(model, config_for(SMALL.build, EMULATED, swap)):
        assert model(*token_batch(0)).item() == want
    assert model(*token_batch(0)).item() == want
    assert "forward" not in model.blocks[0].__dict__


# --- what cannot work says so ---


@pytest.fixture
def session(swap: Path) -> Iterator[Session]:
    """A session that must train on as if nothing had happened, whatever was refused."""
    with tiered_session(SMALL, EMULATED, swap) as untouched:
        want = untouched.train_on(range(2))
    with tiered_session(SMALL, EMULATED, swap) as opened:
        yield opened
        assert opened.train_on(range(2)) == want


def under_fake_tensors(model: nn.Module, *batch: Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(*batch)


def touched_under_fake_tensors(model: nn.Module, *batch: Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model.position + 1


TRACERS: list[tuple[str, Callable[..., Any]]] = [
    ("export", lambda model, *batch: torch.export.export(model, batch)),
    ("make_fx", lambda model, *batch: make_fx(lambda *given: model(*given))(*batch)),
    ("make_fx_fake", lambda model, *batch: make_fx(lambda *given: model(*given), tracing_mode="fake")(*batch)),
    ("make_fx_module", lambda model, *batch: make_fx(model)(*batch)),
    ("fake_tensors", under_fake_tensors),
    ("fake_tensors_touch", touched_under_fake_tensors),
    ("jit_trace", lambda model, *batch: torch.jit.trace(model, batch)),
    ("jit_trace_of_a_block", lambda model, *batch: torch.jit.trace(model.blocks[1], torch.randn(1, 4, 32))),
    ("jit_script", lambda model, *batch: torch.jit.script(model)),
]


@OLD
@pytest.mark.parametrize(("name", "trace"), TRACERS, ids=[name for name, _ in TRACERS])
def test_a_tracer_that_would_keep_memory_is_refused_by_name(
    name: str, trace: Callable[..., Any], session: Session
) -> None:
    with pytest.raises(UsageError) as refusal:
        trace(session.model, *session.batch(0))
    refused(refusal.value, "sharded", "tiered.close(model)")


@OLD
def test_one_graph_over_a_whole_sharded_model_is_refused_with_what_to_do(session: Session) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"block\.compile\(\)"):
        torch.compile(session.model, backend=BACKEND, fullgraph=True)(*session.batch(0))


@OLD
def test_a_compiled_function_given_a_parameter_that_is_away_is_refused_by_name(session: Session) -> None:
    read = torch.compile(lambda x, weight: x @ weight, backend=BACKEND)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"'position'.*tiered\.gather"):
        read(torch.ones(12), session.model.position)


def test_a_forward_while_the_device_may_not_move_memory_is_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a CUDA graph is captured: of the model, and of any unit called alone."""
    device = session.model._tiered_model.runtime.device

    def capturing() -> None:
        raise UsageError("a CUDA graph is being captured")

    hidden = torch.randn(1, 4, 32)
    with monkeypatch.context() as patched:
        patched.setattr(type(device), "check_usable", lambda self: capturing())
        for call in (lambda: session.model(*session.batch(0)), lambda: session.model.blocks[1](hidden)):
            with pytest.raises(UsageError, match="CUDA graph"):
                call()


PROGRAM = """
import sys, torch, tiered
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
with tiered.shard(model, tiered.Config(device="cpu", host_budget="8MiB")):
    optimizer = tiered.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict()
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
"""


def test_training_without_the_compiler_does_not_import_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
