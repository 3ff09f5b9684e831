"""The command line's GPT: its count of parameters, its causality, ties, checkpointing and refusals."""

import pytest
import torch

from tiered.cli.gpt import GPT, GPTShape
from tiered.errors import ConfigError

SMALL = {"vocabulary": 11, "hidden": 8, "layers": 2, "heads": 2}


def tokens(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    text = torch.randint(11, (3, 6), generator=random)
    return text[:, :-1], text[:, 1:]


def loss_and_gradients(**change: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = GPT(GPTShape(**SMALL, **change))  # type: ignore[arg-type]
    loss = model(*tokens())
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def test_the_reference_shape_has_117_million_parameters() -> None:
    assert GPTShape().parameters == 117_549_056


@pytest.mark.parametrize("tied", [False, True])
def test_the_shape_predicts_the_number_of_parameters(tied: bool) -> None:
    shape = GPTShape(**SMALL, tied_head=tied)  # type: ignore[arg-type]
    assert sum(p.numel() for p in GPT(shape).parameters()) == shape.parameters


def test_a_tied_head_is_the_embedding_itself() -> None:
    model = GPT(GPTShape(**SMALL, tied_head=True))  # type: ignore[arg-type]
    assert model.head.weight is model.embed.weight


def test_a_token_never_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model = GPT(GPTShape(**SMALL))  # type: ignore[arg-type]
    seen, _ = tokens()
    stream = model.embed(seen).detach().requires_grad_()
    out = model.blocks[1](model.blocks[0](stream))
    out[:, 2].sum().backward()
    assert stream.grad is not None
    assert stream.grad[:, :3].abs().sum() > 0
    assert torch.equal(stream.grad[:, 3:], torch.zeros_like(stream.grad[:, 3:]))


def test_an_untrained_model_is_about_as_unsure_as_a_uniform_guess() -> None:
    loss, _ = loss_and_gradients()
    assert abs(loss - torch.log(torch.tensor(11.0))) < 0.5


def test_checkpointing_changes_no_loss_and_no_gradient() -> None:
    loss, gradients = loss_and_gradients()
    again, recomputed = loss_and_gradients(checkpoint_activations=True)
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, recomputed, strict=True))


def test_heads_that_do_not_divide_the_hidden_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads: got 3, expected a divisor of hidden=8"):
        GPTShape(hidden=8, heads=3)


@pytest.mark.parametrize("field", ["vocabulary", "hidden", "layers", "heads"])
def test_an_empty_size_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: got 0"):
        GPTShape(**{field: 0})
