"""Four programs whose time goes into launching small operators, each made twice: to run eagerly, and to be captured.

Nothing here knows of capture: a ``Pair`` has two equal programs, which take a seed and give a tensor to compare.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from examples.gpt import GPT, Cache, Shape


class Pair(NamedTuple):
    """Two equal programs: the functions to call, and ``run``, which calls one ``calls`` times and gives the last
    result."""

    title: str
    eager: Callable[..., object]
    captured: Callable[..., object]
    run: Callable[[Callable[..., object], int], Tensor]
    with_gradients: bool
    static: tuple[str, ...] = ()


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    width = 32
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class SoftActorCritic:
    """Haarnoja et al. 2018: two critics, their slow copies, an actor and a temperature; 4 numbers observed, 2 done."""

    def __init__(self, device: torch.device) -> None:
        self.actor = mlp(4, 4).to(device)
        self.critics = nn.ModuleList([mlp(6, 1), mlp(6, 1)]).to(device)
        self.slow = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.zeros(1, device=device))
        self.optimizers = [
            torch.optim.Adam(parameters, lr=3e-4, fused=True, capturable=device.type == "cuda")
            for parameters in (self.critics.parameters(), self.actor.parameters(), [self.log_temperature])
        ]

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """An action between -1 and 1, and the logarithm of its density."""
        mean, log_std = self.actor(state).chunk(2, -1)
        noise = torch.randn_like(mean)
        action = torch.tanh(mean + log_std.clamp(-5, 2).exp() * noise)
        density = -0.5 * noise**2 - log_std.clamp(-5, 2) - torch.log(1 - action**2 + 1e-6)
        return action, density.sum(-1, keepdim=True)

    def update(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor) -> Tensor:
        """One update of everything; gives the critics' loss."""
        temperature = self.log_temperature.exp().detach()
        with torch.no_grad():
            next_action, density = self.act(following)
            pair = torch.cat([following, next_action], -1)
            goal = reward + 0.99 * (torch.minimum(*[critic(pair) for critic in self.slow]) - temperature * density)
        pair = torch.cat([state, action], -1)
        critics_loss = sum((F.mse_loss(critic(pair), goal) for critic in self.critics), torch.zeros_like(temperature))
        self._descend(0, critics_loss.sum())
        new_action, density = self.act(state)
        pair = torch.cat([state, new_action], -1)
        worth = torch.minimum(*[critic(pair) for critic in self.critics])
        self._descend(1, (temperature * density - worth).mean())
        self._descend(2, -(self.log_temperature * (density.detach() - 2)).mean())
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, 0.005)
        return critics_loss.detach()

    def _descend(self, number: int, loss: Tensor) -> None:
        self.optimizers[number].zero_grad()
        loss.backward()
        self.optimizers[number].step()


def actor_critic(device: torch.device) -> Pair:
    """An update of SAC on 16 transitions."""
    agent = SoftActorCritic(device)
    twin = copy.deepcopy(agent)
    batch = [torch.randn(16, width, device=device) for width in (4, 2, 1, 4)]

    def run(update: Callable[..., object], calls: int) -> Tensor:
        for _ in range(calls):
            loss = update(*batch)
        assert isinstance(loss, Tensor)
        return loss

    return Pair("SAC update", twin.update, agent.update, run, with_gradients=True)


class Coupling(nn.Module):
    """An affine coupling layer of RealNVP (Dinh et al. 2017) in two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))

    @override
    def forward(self, z: Tensor) -> Tensor:
        kept, moved = z.chunk(2, -1)
        scale, shift = self.net(kept).chunk(2, -1)
        return torch.cat([moved * scale.tanh().exp() + shift, kept], -1)


def flow(device: torch.device) -> Pair:
    """16 samples of a normalizing flow of 32 layers."""
    layers = nn.Sequential(*[Coupling() for _ in range(32)]).to(device)

    def sample() -> Tensor:
        points: Tensor = layers(torch.randn(16, 2, device=device))
        return points

    def run(draw: Callable[..., object], calls: int) -> Tensor:
        for _ in range(calls):
            points = draw()
        assert isinstance(points, Tensor)
        return points

    return Pair("flow, 16 samples", sample, sample, run, with_gradients=False)


class Policy(nn.Module):
    """An LSTM cell over a sequence, with a distribution over 4 actions and a value at each time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.actions, self.value = nn.LSTMCell(8, 32), nn.Linear(32, 4), nn.Linear(32, 1)

    @override
    def forward(self, observed_TBD: Tensor) -> Tensor:
        hidden = cell = observed_TBD.new_zeros(observed_TBD.shape[1], 32)
        out = []
        for observed in observed_TBD.unbind(0):
            hidden, cell = self.cell(observed, (hidden, cell))
            out.append(torch.cat([self.actions(hidden).softmax(-1), self.value(hidden)], -1))
        return torch.stack(out)


class PolicyGradient:
    """REINFORCE with a baseline, through time: one update from one episode."""

    def __init__(self, device: torch.device) -> None:
        self.policy = Policy().to(device)
        self.optimizer = torch.optim.Adam(
            self.policy.parameters(), lr=1e-3, fused=True, capturable=device.type == "cuda"
        )

    def update(self, observed_TBD: Tensor, actions_TB: Tensor, returns_TB: Tensor) -> Tensor:
        """One update: forward, loss, backward through time and the optimizer's step. Gives the loss."""
        out = self.policy(observed_TBD)
        chances, values = out[..., :4], out[..., 4]
        chosen = chances.gather(-1, actions_TB[..., None]).squeeze(-1)
        advantage = returns_TB - values
        loss: Tensor = (0.5 * advantage**2 - advantage.detach() * chosen.log()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def policy(device: torch.device) -> Pair:
    """An LSTM policy learns from an episode of 16 steps."""
    learner = PolicyGradient(device)
    twin = copy.deepcopy(learner)
    episode = (
        torch.randn(16, 1, 8, device=device),
        torch.randint(4, (16, 1), device=device),
        torch.randn(16, 1, device=device),
    )

    def run(update: Callable[..., object], calls: int) -> Tensor:
        for _ in range(calls):
            loss = update(*episode)
        assert isinstance(loss, Tensor)
        return loss

    return Pair("LSTM policy, an update", twin.update, learner.update, run, with_gradients=True)


def decoding(device: torch.device) -> Pair:
    """A small GPT that draws tokens, each fed to the next call. The cache keeps its address: ``static=["cache"]``."""
    shape = Shape(vocabulary=64, heads=2, width=32, context=64)
    model = GPT(shape).to(device).eval()
    cache = Cache.empty(shape, batch=1, device=device)

    def run(step: Callable[..., object], calls: int) -> Tensor:
        cache.clear()
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        for _ in range(min(calls, shape.context - 1)):
            drawn = step(token, cache)
            assert isinstance(drawn, Tensor)
            token = drawn
        return torch.cat([token.flatten().float(), cache.k.flatten()])

    return Pair("GPT, a token", model.step, model.step, run, with_gradients=False, static=("cache",))


WORKLOADS: tuple[Callable[[torch.device], Pair], ...] = (actor_critic, flow, policy, decoding)
