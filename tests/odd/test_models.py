"""Whole models that are more than linears called one after the other: torch's own, and research code's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.odd.nets import ROWS, WIDTH, Block, Net, square
from tests.support.cases import DEFAULT, EACH, EACH_BF16, GROUPED, NVME, POISON, STAGE_2, Case, Cases

cases = Cases(__name__)
LENGTH = 5
EVERY = (EACH, GROUPED, DEFAULT, EACH_BF16, POISON)


def sequence(world: Any, step: int) -> Tensor:
    tensor: Tensor = world.randn(ROWS, LENGTH, WIDTH, seed=step)
    return tensor


def images(world: Any, step: int) -> Tensor:
    tensor: Tensor = world.randn(ROWS, 3, 8, 8, seed=step)
    return tensor


def rows(world: Any, step: int) -> Tensor:
    tensor: Tensor = world.randn(ROWS, WIDTH, seed=step)
    return tensor


def flattened(output: Any) -> Tensor:
    """A loss over every tensor of an output."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.stack([square(leaf) for leaf in leaves if leaf.is_floating_point()]).sum()


def model(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[Any, int], Any] = rows,
    *,
    evaluated: bool = True,
    loss: Callable[[Any], Tensor] = flattened,
    **kwargs: Any,
) -> None:
    """A case that trains the model, and evaluates it between the steps."""

    def script(world: Any) -> None:
        built = make()
        engine = world.initialize(built)
        for step in range(3):
            world.backward(engine, loss(engine(inputs(world, step))))
            engine.step()
            if evaluated:
                engine.eval()
                with torch.no_grad():
                    world.observe("evaluation", torch.utils._pytree.tree_leaves(engine(inputs(world, 9))))
                engine.train()

    script.__name__ = name
    script.__doc__ = (make.__doc__ or name.replace("_", " ")).strip().splitlines()[0]
    options: dict[str, Any] = {"must": "equal", "settings": EVERY, **kwargs}
    cases(**options)(script)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Any:
        output, state = self.layer(x)
        return self.head(output), state


class Packed(Recurrent):
    def forward(self, x: Tensor) -> Any:
        packed = pack_padded_sequence(x, torch.tensor([5, 4, 3, 2]), batch_first=True)
        output, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(output)


class Cells(nn.Module):
    """A cell called once a token."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        state = None
        for token in x.unbind(1):
            state = self.cell(token, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


model("lstm", lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, batch_first=True)), sequence, also=(NVME,))
model(
    "lstm_of_two_layers_both_ways_with_projection",
    lambda: Recurrent(nn.LSTM(WIDTH, 2 * WIDTH, 2, batch_first=True, bidirectional=True, proj_size=8), 16),
    sequence,
)
model("gru", lambda: Recurrent(nn.GRU(WIDTH, WIDTH, 2, batch_first=True)), sequence)
model("rnn", lambda: Recurrent(nn.RNN(WIDTH, WIDTH, batch_first=True)), sequence)
model("packed_lstm", lambda: Packed(nn.LSTM(WIDTH, WIDTH, batch_first=True)), sequence)
model("lstm_cell", lambda: Cells(nn.LSTMCell(WIDTH, WIDTH)), sequence)
model("gru_cell", lambda: Cells(nn.GRUCell(WIDTH, WIDTH)), sequence)


class Attention(nn.Module):
    """``need_weights=False`` in eval takes the fused path, which reads the parameters raw."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True, **kwargs)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


model("multihead_attention", Attention, sequence, also=(NVME,))
model("multihead_attention_with_key_bias", lambda: Attention(add_bias_kv=True), sequence)
model("multihead_attention_of_other_widths", lambda: Attention(kdim=WIDTH, vdim=WIDTH), sequence)
model(
    "transformer_encoder",
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, batch_first=True), 2),
    sequence,
    also=(NVME,),
)
model(
    "transformer_encoder_norm_first",
    lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, batch_first=True, norm_first=True),
        2,
        enable_nested_tensor=False,
    ),
    sequence,
)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 48, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.transformer(x, torch.tanh(x), tgt_mask=mask, tgt_is_causal=True)


model("transformer", Whole, sequence)
model(
    "convolutions",
    lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.ConvTranspose2d(8, 3, 3)),
    images,
)
model("channels_last_convolutions", lambda: convolutions().to(memory_format=torch.channels_last), images)
model("group_norms", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.PReLU(8)), images)
model("instance_norms", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)), images)
model("bilinear", lambda: Bilinear())
model("embedding_bag", lambda: nn.EmbeddingBag(11, WIDTH, mode="mean"), lambda world, step: tokens(world, step))
model(
    "sparse_embedding",
    lambda: nn.Embedding(11, WIDTH, sparse=True),
    lambda world, step: tokens(world, step),
    must="refused",
)
model("sparse_tied_embedding", lambda: SparseTied(), lambda world, step: tokens(world, step), must="either")
model("embedding_with_padding", lambda: nn.Embedding(11, WIDTH, padding_idx=0), lambda w, s: tokens(w, s))
model("adaptive_softmax", lambda: Adaptive())


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3))


def tokens(world: Any, step: int) -> Tensor:
    tensor: Tensor = world.tokens(ROWS, LENGTH, below=11, seed=step)
    return tensor


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(WIDTH, WIDTH, 5)

    def forward(self, x: Tensor) -> Any:
        return self.mix(x, torch.tanh(x))


class SparseTied(nn.Module):
    """A sparse embedding whose weight a dense head uses as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return F.linear(self.words(x), self.words.weight)


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 40, [5, 15])

    def forward(self, x: Tensor) -> Any:
        return self.head(x, torch.arange(len(x)) * 9).loss


class Shared(nn.Module):
    """ALBERT: one block many times, and under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.again = nn.ModuleList([self.block, self.block])

    def forward(self, x: Tensor) -> Any:
        for block in (self.block, *self.again, self.block):
            x = block(x)
        return x


class Recursive(nn.Module):
    """A module that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 3) -> Any:
        return self.mix(x) if depth == 0 else torch.tanh(self.mix(self(x, depth - 1)))


class Experts(nn.Module):
    """A router over a list of experts; which ones are called depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            if len(row):
                output = output.index_add(0, row, expert(x[row]) * weights[row, slot, None])
        return output


class Stacked(nn.Module):
    """All experts in one parameter, as grouped matrix products have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Any:
        return torch.stack([F.linear(x, weight) for weight in self.weights]).mean(0)


class Hyper(nn.Module):
    """A hypernetwork: one net makes the other's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.shape = nn.Linear(5, WIDTH * WIDTH), (WIDTH, WIDTH)
        self.code = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.maker(self.code).view(self.shape) * 0.1)


class Implicit(nn.Module):
    """A fixed point found without gradients, and one step with them (deep equilibrium)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.inject = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.orthogonal_(self.mix.weight, gain=0.5)

    def forward(self, x: Tensor) -> Any:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                z = torch.tanh(self.mix(z) + self.inject(x))
        return torch.tanh(self.mix(z) + self.inject(x))


class Momentum(nn.Module):
    """MoCo: the key encoder follows the query encoder inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = Net(1), Net(1)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.mul_(0.9).add_(query, alpha=0.1)
            target = self.key(x)
        return self.query(x) - target


class Quantised(nn.Module):
    """A codebook in a buffer, moved by forward; a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(7, WIDTH))

    def forward(self, x: Tensor) -> Any:
        h = self.encode(x)
        chosen = torch.cdist(h.float(), self.codes.float()).argmin(1)
        if self.training:
            with torch.no_grad():
                self.codes[chosen] = self.codes[chosen] * 0.9 + h.detach() * 0.1
        return self.decode(h + (self.codes[chosen] - h).detach())


class FakeQuantised(nn.Linear):
    """Rounded weights with a straight-through gradient."""

    def forward(self, x: Tensor) -> Tensor:
        rounded = (self.weight * 16).round() / 16
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


class Noisy(nn.Linear):
    """Noise on the weights, drawn like them."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + 0.01 * torch.randn_like(self.weight), self.bias)


class Standardised(nn.Conv2d):
    """Weight standardisation."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight / (weight.std(dim=(1, 2, 3), keepdim=True) + 1e-5), self.bias)


class SlicedQkv(nn.Module):
    """One parameter sliced three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (F.linear(x, part) for part in self.qkv.chunk(3))
        return F.scaled_dot_product_attention(q, k, v)


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        return {"a": self.a(x), "both": [self.b(x), (x, None, "text", 3)], "sum": self.a(x).sum()}


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: Tensor, scale: float = 1.0) -> Any:
        return self.mix(x) * scale


class SkipsLayers(nn.Module):
    """Stochastic depth: blocks are left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.6:
                x = block(x)
        return x * 1.5 if x.requires_grad else x + 0 * self.blocks[0].norm.weight.mean()


class MethodsOfItsOwn(nn.Module):
    """Children are used through methods other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Any:
        return self.inner.decode(self.inner.encode(x))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.ones(7))

    def encode(self, x: Tensor) -> Any:
        return self.a(x) * self.scale

    def decode(self, x: Tensor) -> Any:
        return self.b(x)


class Hiding(nn.Module):
    """What it gives an optimizer is not all that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.frozen, self.b = Net(1), Net(1).requires_grad_(False), nn.Linear(WIDTH, WIDTH)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (param for param in super().parameters(recurse) if param.requires_grad)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.frozen(self.a(x)))


class HidingAPart(nn.Sequential):
    """Its children are those that train."""

    def children(self) -> Iterator[nn.Module]:
        return (child for child in super().children() if next(child.parameters()).requires_grad)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return (each for each in super().named_modules(*args, **kwargs) if not each[0].endswith("1"))


def hiding_a_part() -> nn.Module:
    return nn.Sequential(HidingAPart(Net(1), Net(1).requires_grad_(False), Net(1)), nn.Linear(WIDTH, WIDTH))


model("a_shared_block", Shared)
model("a_module_that_calls_itself", Recursive)
model("experts_chosen_by_data", Experts)
model("experts_in_one_parameter", Stacked)
model("a_hypernetwork", Hyper)
model("a_deep_equilibrium", Implicit)
model("a_momentum_encoder_inside_forward", Momentum, must="either")
model("a_quantised_autoencoder", Quantised)
model("fake_quantised_weights", lambda: nn.Sequential(FakeQuantised(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
model("noisy_weights", lambda: nn.Sequential(Noisy(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), evaluated=False)
model("standardised_weights", lambda: nn.Sequential(Standardised(3, 8, 3), nn.Conv2d(8, 3, 3)), images)
model("a_sliced_parameter", SlicedQkv, sequence)
model("many_outputs", ManyOutputs, evaluated=False)
model("stochastic_depth", SkipsLayers, evaluated=False)
model("methods_other_than_forward", MethodsOfItsOwn)
model("a_sequential_of_sequentials", lambda: nn.Sequential(nn.Sequential(Net(1), nn.Sequential(Net(1))), nn.Identity()))
model("one_big_parameter", lambda: nn.Linear(WIDTH, 1009))
model("very_many_small_parameters", lambda: nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(40))))


model("children_that_hide_what_is_frozen", hiding_a_part, settings=(EACH, GROUPED, NVME, STAGE_2))
model("parameters_that_hides_what_is_frozen", Hiding, settings=(GROUPED, DEFAULT, STAGE_2, EACH_BF16))


@cases(must="equal")
def keyword_only_arguments(world: Any) -> None:
    engine = world.initialize(KeywordsOnly())
    world.train(engine, lambda step: square(engine(x=rows(world, step), scale=0.5)))


@cases.parametrized()
def test_models(case: Case, judged: Any) -> None:
    judged(__name__, case)
