"""Averages, optimizers, quantizers, mamba, captum, metrics, einops, x-transformers, tensordict: small libraries."""

from __future__ import annotations

from typing import Any

import schedulefree
import torch
import torchmetrics
from captum.attr import IntegratedGradients
from einops import rearrange, reduce, repeat
from einops.layers.torch import Rearrange
from ema_pytorch import EMA
from lion_pytorch import Lion
from mambapy.mamba import Mamba, MambaConfig
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn import functional as F
from vector_quantize_pytorch import FSQ, VectorQuantize
from x_transformers import AutoregressiveWrapper, Decoder, Encoder, TransformerWrapper


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _step(loss: Any, optimizer: Any) -> Any:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def ema_model(wrap: Any) -> Any:
    net = _net()
    ema = EMA(net, beta=0.9, update_after_step=2, update_every=2)
    optimizer, forward, predict = torch.optim.SGD(net.parameters(), lr=0.1), wrap(net), wrap(ema)

    def step(_: int) -> Any:
        x = torch.randn(4, 8)
        loss = _step(forward(x).square().mean(), optimizer)
        ema.update()
        with torch.no_grad():
            return loss, predict(x)

    return step


def lion(wrap: Any) -> Any:
    net = _net()
    optimizer = Lion(net.parameters(), lr=1e-3, weight_decay=1e-2)
    train = wrap(lambda x, y: _step(F.cross_entropy(net(x), y), optimizer))
    return lambda _: (train(torch.randn(4, 8), torch.randint(0, 4, (4,))), list(net.parameters()))


def schedule_free(wrap: Any) -> Any:
    net = _net()
    optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=0.01, warmup_steps=10)
    forward = wrap(net)

    def step(n: int) -> Any:
        optimizer.train()
        loss = _step(F.cross_entropy(forward(torch.randn(4, 8)), torch.randint(0, 4, (4,))), optimizer)
        if n % 10 == 9:
            optimizer.eval()
            with torch.no_grad():
                return loss, forward(torch.randn(2, 8))
        return loss

    return step


def vector_quantize(wrap: Any) -> Any:
    quantizer = VectorQuantize(dim=8, codebook_size=16, decay=0.8, commitment_weight=1.0).eval()
    call = wrap(quantizer)

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(torch.randn(1, 6, 8))

    return step


def vector_quantize_training(wrap: Any) -> Any:
    encoder, quantizer, decoder = nn.Linear(8, 8), VectorQuantize(dim=8, codebook_size=16), nn.Linear(8, 8)
    params = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-3)

    @wrap
    def loss_of(x: Any) -> Any:
        z, _, commit = quantizer(encoder(x))
        return F.mse_loss(decoder(z), x) + commit.sum()

    return lambda _: (_step(loss_of(torch.randn(2, 6, 8)), optimizer), params, list(quantizer.buffers()))


def finite_scalar(wrap: Any) -> Any:
    call = wrap(FSQ([8, 5, 5]))

    def step(_: int) -> Any:
        with torch.no_grad():
            return call(torch.randn(1, 6, 3))

    return step


def mamba(wrap: Any) -> Any:
    model = Mamba(MambaConfig(d_model=8, n_layers=2, d_state=4, expand_factor=2))
    optimizer, forward = torch.optim.AdamW(model.parameters(), lr=1e-3), wrap(model)
    return lambda _: (_step(forward(torch.randn(2, 6, 8)).square().mean(), optimizer), list(model.parameters()))


def mamba_decoding(wrap: Any) -> Any:
    model = Mamba(MambaConfig(d_model=8, n_layers=2, d_state=4, expand_factor=2)).eval()
    decode = wrap(model.step)

    def step(_: int) -> Any:
        caches: Any = [(None, torch.zeros(1, 16, model.config.d_conv - 1)) for _ in range(2)]
        found = []
        with torch.no_grad():
            for _ in range(4):
                y, caches = decode(torch.randn(1, 8), caches)
                found.append(y.clone())
        return found

    return step


def integrated_gradients(wrap: Any) -> Any:
    explain = IntegratedGradients(wrap(_net().eval()))
    return lambda _: explain.attribute(torch.randn(2, 8, requires_grad=True), target=1, n_steps=5).detach()


def metrics(wrap: Any) -> Any:
    net, accuracy = _net().eval(), torchmetrics.MeanSquaredError()
    forward = wrap(net)

    def step(n: int) -> Any:
        with torch.no_grad():
            accuracy.update(forward(torch.randn(4, 8)), torch.randn(4, 4))
        if n % 20 == 19:
            found = accuracy.compute()
            accuracy.reset()
            return found
        return None

    return step


def metrics_inside(wrap: Any) -> Any:
    net, error = _net().eval(), torchmetrics.MeanSquaredError()

    @wrap
    def validate(x: Any, y: Any) -> Any:
        found = net(x)
        error.update(found, y)
        return F.mse_loss(found, y)

    def step(_: int) -> Any:
        with torch.no_grad():
            return validate(torch.randn(4, 8), torch.randn(4, 4)), error.sum_squared_error.clone(), error.total.clone()

    return step


def einops_vit(wrap: Any) -> Any:
    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Sequential(Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4), nn.Linear(48, 16))
            self.cls, self.qkv, self.head = nn.Parameter(torch.randn(16)), nn.Linear(16, 48), nn.Linear(16, 4)

        def forward(self, image: Any) -> Any:
            x = self.patch(image)
            x = torch.cat([repeat(self.cls, "d -> b 1 d", b=x.shape[0]), x], 1)
            q, k, v = rearrange(self.qkv(x), "b n (t h d) -> t b h n d", t=3, h=2)
            weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
            x = rearrange(torch.einsum("bhij,bhjd->bhid", weights, v), "b h n d -> b n (h d)")
            return self.head(reduce(x, "b n d -> b d", "mean"))

    model = ViT()
    optimizer, forward = torch.optim.AdamW(model.parameters(), lr=1e-3), wrap(model)

    def step(_: int) -> Any:
        loss = F.cross_entropy(forward(torch.randn(2, 3, 8, 8)), torch.randint(0, 4, (2,)))
        return _step(loss, optimizer), list(model.parameters())

    return step


def _decoder() -> Any:
    layers = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True, attn_flash=True)
    return TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)


def x_training(wrap: Any) -> Any:
    model = AutoregressiveWrapper(_decoder())
    optimizer, forward = torch.optim.AdamW(model.parameters(), lr=1e-3), wrap(model)
    return lambda _: (_step(forward(torch.randint(0, 64, (2, 9))), optimizer), next(model.parameters()))


def x_generate(wrap: Any) -> Any:
    net = _decoder().eval()
    net.forward = wrap(net.forward)
    model = AutoregressiveWrapper(net)

    def step(_: int) -> Any:
        return model.generate(torch.randint(0, 64, (1, 3)), 4, cache_kv=True, temperature=0.0)

    return step


def x_encoder_mask(wrap: Any) -> Any:
    model = TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=Encoder(dim=32, depth=1, heads=4)).eval()
    call = wrap(model)

    def step(_: int) -> Any:
        mask = torch.arange(8)[None] < torch.randint(3, 9, (2, 1))
        with torch.no_grad():
            return call(torch.randint(0, 64, (2, 8)), mask=mask)

    return step


def tensordict_modules(wrap: Any) -> Any:
    first = TensorDictModule(nn.Linear(4, 8), in_keys=["obs"], out_keys=["hidden"])
    second = TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["action"])
    policy = wrap(TensorDictSequential(first, second))

    def step(_: int) -> Any:
        with torch.no_grad():
            found = policy(TensorDict({"obs": torch.randn(3, 4)}, batch_size=[3]))
        return found["action"], found["hidden"]

    return step


PROGRAMS = {
    "ema_model": ema_model,
    "lion": lion,
    "schedule_free": schedule_free,
    "vector_quantize": vector_quantize,
    "vector_quantize_training": vector_quantize_training,
    "finite_scalar": finite_scalar,
    "mamba": mamba,
    "mamba_decoding": mamba_decoding,
    "integrated_gradients": integrated_gradients,
    "metrics": metrics,
    "metrics_inside": metrics_inside,
    "einops_vit": einops_vit,
    "x_training": x_training,
    "x_generate": x_generate,
    "x_encoder_mask": x_encoder_mask,
    "tensordict_modules": tensordict_modules,
}
