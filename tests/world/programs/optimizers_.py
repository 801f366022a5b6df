"""Optimizers, schedules, scalers and averages of torch in usual training steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional as F


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _data() -> Any:
    return torch.randn(8, 8), torch.randint(0, 4, (8,))


def _trained(make: Any) -> Any:
    """The whole step in one captured function."""

    def program(wrap: Any) -> Any:
        model = _net()
        optimizer = make(model.parameters())

        @wrap
        def train(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return lambda _: (train(*_data()), list(model.parameters()))

    return program


def lbfgs(wrap: Any) -> Any:
    model = _net()
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    loss_of = wrap(lambda x, y: F.cross_entropy(model(x), y))

    def step(_: int) -> Any:
        x, y = _data()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            return loss

        return optimizer.step(closure), list(model.parameters())

    return step


def scaler_autocast(wrap: Any) -> Any:
    model = _net()
    optimizer, scaler = optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    @wrap
    def loss_of(x: Any, y: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y)

    def step(_: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(*_data())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), list(model.parameters())

    return step


def autocast_outside(wrap: Any) -> Any:
    model = _net()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    forward = wrap(model)

    def step(_: int) -> Any:
        x, y = _data()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), list(model.parameters())

    return step


def scheduled(wrap: Any) -> Any:
    model = _net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=1000)

    @wrap
    def train(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step(_: int) -> Any:
        loss = train(*_data())
        schedule.step()
        return loss, list(model.parameters())

    return step


def scheduled_tensor_lr(wrap: Any) -> Any:
    model = _net()
    optimizer = optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loss_of = wrap(lambda x, y: F.cross_entropy(model(x), y))

    def step(_: int) -> Any:
        loss = loss_of(*_data())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach(), list(model.parameters())

    return step


def accumulated(wrap: Any) -> Any:
    """A counter on the trainer says when the optimizer steps."""
    model = _net()

    class Trainer:
        def __init__(self) -> None:
            self.optimizer = optim.AdamW(model.parameters(), lr=0.01)
            self.micro_step, self.every = 0, 4

        def loss_of(self, x: Any, y: Any) -> Any:
            return F.cross_entropy(model(x), y) / self.every

        def train(self, x: Any, y: Any) -> Any:
            loss = self.loss_of(x, y)
            loss.backward()
            self.micro_step += 1
            if self.micro_step % self.every == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            return loss.detach()

    trainer = Trainer()
    trainer.loss_of = wrap(trainer.loss_of)  # type: ignore[method-assign]
    return lambda _: (trainer.train(*_data()), list(model.parameters()))


def accumulated_inside(wrap: Any) -> Any:
    model = _net()
    optimizer, counter = optim.SGD(model.parameters(), lr=0.1), {"micro": 0}

    @wrap
    def train(x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        counter["micro"] += 1
        if counter["micro"] % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return lambda _: (train(*_data()), list(model.parameters()), counter["micro"])


def clipped(wrap: Any) -> Any:
    model = _net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    @wrap
    def train(x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return lambda _: (train(*_data()), list(model.parameters()))


def averaged(wrap: Any) -> Any:
    model = _net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    average = optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
    loss_of, predict = wrap(lambda x, y: F.cross_entropy(model(x), y)), wrap(average)

    def step(_: int) -> Any:
        x, y = _data()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            return loss.detach(), predict(x)

    return step


def own_optimizer(wrap: Any) -> Any:
    """A class of one's own with a step count, as papers come with."""

    class Mine(optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            del closure
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["step"], state["m"] = 0, torch.zeros_like(p)
                    state["step"] += 1
                    state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                    p.add_(state["m"] / (1 - 0.9 ** state["step"]), alpha=-group["lr"])

    model = _net()
    optimizer = Mine(model.parameters(), 0.1)

    @wrap
    def train(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return lambda _: (train(*_data()), list(model.parameters()))


def functional_sgd(wrap: Any) -> Any:
    model = _net()
    params = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @wrap
    def update(params: Any, x: Any, y: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

        grads, loss = torch.func.grad_and_value(loss_of)(params)
        return {name: parameter - 0.1 * grads[name] for name, parameter in params.items()}, loss

    state = [params]

    def step(_: int) -> Any:
        state[0], loss = update(state[0], *_data())
        return loss, state[0]

    return step


def per_sample_gradients(wrap: Any) -> Any:
    model = _net()
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

    norms = wrap(lambda x, y: torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(params, x, y))
    return lambda _: norms(*_data())


def ensemble(wrap: Any) -> Any:
    models = [_net() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)

    @wrap
    def forward(x: Any) -> Any:
        one = lambda p, b, x: torch.func.functional_call(models[0], (p, b), (x,))  # noqa: E731
        return torch.func.vmap(one, in_dims=(0, 0, None))(params, buffers, x)

    def step(_: int) -> Any:
        with torch.no_grad():
            return forward(torch.randn(4, 8))

    return step


PROGRAMS = {
    "sgd_nesterov": _trained(lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)),
    "adam": _trained(lambda params: optim.Adam(params, lr=0.01)),
    "adamw_amsgrad": _trained(lambda params: optim.AdamW(params, lr=0.01, amsgrad=True)),
    "adam_foreach": _trained(lambda params: optim.Adam(params, lr=0.01, foreach=True)),
    "adamw_fused": _trained(lambda params: optim.AdamW(params, lr=0.01, fused=True)),
    "adagrad": _trained(lambda params: optim.Adagrad(params, lr=0.1)),
    "adadelta": _trained(lambda params: optim.Adadelta(params, lr=0.1)),
    "adamax": _trained(lambda params: optim.Adamax(params, lr=0.01)),
    "nadam": _trained(lambda params: optim.NAdam(params, lr=0.01)),
    "radam": _trained(lambda params: optim.RAdam(params, lr=0.01)),
    "rmsprop": _trained(lambda params: optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True)),
    "rprop": _trained(lambda params: optim.Rprop(params, lr=0.01)),
    "asgd": _trained(lambda params: optim.ASGD(params, lr=0.01)),
    "adafactor": _trained(lambda params: optim.Adafactor(params, lr=0.01)),
    "lbfgs": lbfgs,
    "scaler_autocast": scaler_autocast,
    "autocast_outside": autocast_outside,
    "scheduled": scheduled,
    "scheduled_tensor_lr": scheduled_tensor_lr,
    "accumulated": accumulated,
    "accumulated_inside": accumulated_inside,
    "clipped": clipped,
    "averaged": averaged,
    "own_optimizer": own_optimizer,
    "functional_sgd": functional_sgd,
    "per_sample_gradients": per_sample_gradients,
    "ensemble": ensemble,
}
