"""Updates of reinforcement learning in one file each, as cleanrl and LeanRL write them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn, optim
from torch.distributions import Categorical, Normal
from torch.nn import functional as F


def _mlp(*sizes: int, end: Any = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(sizes):
        layers += [nn.Linear(one, other), nn.Tanh()]
    return nn.Sequential(*layers[:-1], *([end] if end else []))


class QNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: Any, a: Any) -> Any:
        x = torch.cat([x, a], 1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc_mean, self.fc_logstd = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 2)
        self.register_buffer("action_scale", torch.tensor([1.0, 2.0]))
        self.register_buffer("action_bias", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        x = F.relu(self.fc1(x))
        log_std = torch.tanh(self.fc_logstd(x))
        return self.fc_mean(x), -5 + 0.5 * 7 * (log_std + 1)

    def get_action(self, x: Any) -> Any:
        mean, log_std = self(x)
        normal = Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return y_t * self.action_scale + self.action_bias, log_prob.sum(1, keepdim=True)


def _transitions(n: int = 16) -> Any:
    return torch.randn(n, 4), torch.randn(n, 2), torch.randn(n), torch.randn(n, 4), torch.zeros(n)


def sac(wrap: Any) -> Any:
    actor, qf1, qf2, target1, target2 = Actor(), QNetwork(), QNetwork(), QNetwork(), QNetwork()
    target1.load_state_dict(qf1.state_dict())
    target2.load_state_dict(qf2.state_dict())
    q_optimizer = optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-3)
    actor_optimizer = optim.Adam(list(actor.parameters()), lr=3e-4)
    log_alpha = torch.zeros(1, requires_grad=True)
    a_optimizer = optim.Adam([log_alpha], lr=1e-3)

    @wrap
    def update_main(obs: Any, actions: Any, rewards: Any, next_obs: Any, dones: Any) -> Any:
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            next_actions, next_log_pi = actor.get_action(next_obs)
            low = torch.min(target1(next_obs, next_actions), target2(next_obs, next_actions)) - alpha * next_log_pi
            goal = rewards + (1 - dones) * 0.99 * low.view(-1)
        loss = F.mse_loss(qf1(obs, actions).view(-1), goal) + F.mse_loss(qf2(obs, actions).view(-1), goal)
        q_optimizer.zero_grad()
        loss.backward()
        q_optimizer.step()
        return loss.detach()

    @wrap
    def update_actor(obs: Any) -> Any:
        pi, log_pi = actor.get_action(obs)
        loss = (log_alpha.detach().exp() * log_pi - torch.min(qf1(obs, pi), qf2(obs, pi))).mean()
        actor_optimizer.zero_grad()
        loss.backward()
        actor_optimizer.step()
        a_optimizer.zero_grad()
        (-log_alpha.exp() * (log_pi.detach() - 2)).mean().backward()
        a_optimizer.step()
        return loss.detach()

    def step(n: int) -> Any:
        batch = _transitions()
        losses = [update_main(*batch)]
        if n % 2 == 0:
            losses += [update_actor(batch[0]) for _ in range(2)]
        for net, target_net in ((qf1, target1), (qf2, target2)):
            for param, target in zip(net.parameters(), target_net.parameters(), strict=True):
                target.data.copy_(0.005 * param.data + 0.995 * target.data)
        return losses, log_alpha, next(actor.parameters())

    return step


def sac_tensor_lr(wrap: Any) -> Any:
    """A policy that draws by hand, and a learning rate that is a tensor."""
    actor, qf = Actor(), QNetwork()
    optimizer = optim.Adam([*qf.parameters(), *actor.parameters()], lr=torch.tensor(1e-3))

    @wrap
    def update(obs: Any, rewards: Any) -> Any:
        mean, log_std = actor(obs)
        action = torch.tanh(mean + log_std.exp() * torch.randn_like(mean))
        loss = F.mse_loss(qf(obs, action).view(-1), rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return lambda _: (update(torch.randn(16, 4), torch.randn(16)), next(actor.parameters()))


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor = _mlp(4, 32, 1), _mlp(4, 32, 3)

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def ppo(wrap: Any) -> Any:
    agent = Agent()
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)

    @wrap
    def act(obs: Any) -> Any:
        with torch.no_grad():
            return agent.get_action_and_value(obs)

    @wrap
    def update(obs: Any, actions: Any, logprobs: Any, advantages: Any, returns: Any, values: Any) -> Any:
        _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs, actions)
        logratio = newlogprob - logprobs
        ratio = logratio.exp()
        with torch.no_grad():
            approx_kl = ((ratio - 1) - logratio).mean()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        pg_loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
        clipped = values + torch.clamp(newvalue.view(-1) - values, -0.2, 0.2)
        v_loss = 0.5 * torch.max((newvalue.view(-1) - returns) ** 2, (clipped - returns) ** 2).mean()
        loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return approx_kl, v_loss.detach(), pg_loss.detach()

    def step(n: int) -> Any:
        optimizer.param_groups[0]["lr"] = (1.0 - (n // 20) / 50) * 2.5e-4
        obs = torch.randn(16, 4)
        action, logprob, _, value = act(obs)
        return update(obs, action, logprob, torch.randn(16), torch.randn(16), value.view(-1)), next(agent.parameters())

    return step


def dqn(wrap: Any) -> Any:
    q_network, target_network = _mlp(4, 32, 32, 3), _mlp(4, 32, 32, 3)
    optimizer = optim.Adam(q_network.parameters(), lr=1e-3)

    @wrap
    def loss_of(obs: Any, actions: Any, rewards: Any, next_obs: Any, dones: Any) -> Any:
        with torch.no_grad():
            target_max, _ = target_network(next_obs).max(dim=1)
            td_target = rewards + 0.99 * target_max * (1 - dones)
        return F.mse_loss(td_target, q_network(obs).gather(1, actions).squeeze())

    def step(n: int) -> Any:
        obs, _, rewards, next_obs, dones = _transitions()
        loss = loss_of(obs, torch.randint(0, 3, (16, 1)), rewards, next_obs, dones)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if n % 25 == 0:
            for target, learned in zip(target_network.parameters(), q_network.parameters(), strict=True):
                target.data.copy_(learned.data)
        return loss.detach(), next(q_network.parameters())

    return step


def td3_ema(wrap: Any) -> Any:
    qf, target = QNetwork(), QNetwork()
    optimizer = optim.AdamW(qf.parameters(), lr=1e-3)

    @wrap
    def update(obs: Any, actions: Any, rewards: Any, next_obs: Any) -> Any:
        with torch.no_grad():
            noise = (torch.randn_like(actions) * 0.2).clamp(-0.5, 0.5)
            goal = rewards + 0.99 * target(next_obs, (actions + noise).clamp(-1, 1)).view(-1)
        loss = F.mse_loss(qf(obs, actions).view(-1), goal)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(qf.parameters()), 0.005)
        return loss.detach()

    def step(_: int) -> Any:
        obs, actions, rewards, next_obs, _ = _transitions()
        return update(obs, actions, rewards, next_obs), next(target.parameters())

    return step


def reinforce_rnn(wrap: Any) -> Any:
    """A policy with a state that it keeps from one call to the next."""
    cell, head = nn.GRUCell(4, 16), nn.Linear(16, 3)

    @wrap
    def act(obs: Any, hidden: Any) -> Any:
        with torch.no_grad():
            hidden = cell(obs, hidden)
            return head(hidden).argmax(-1), hidden

    state = {"hidden": torch.zeros(2, 16)}

    def step(n: int) -> Any:
        if n % 10 == 0:
            state["hidden"] = torch.zeros(2, 16)
        action, state["hidden"] = act(torch.randn(2, 4), state["hidden"])
        return action, state["hidden"]

    return step


PROGRAMS = {
    "sac": sac,
    "sac_tensor_lr": sac_tensor_lr,
    "ppo": ppo,
    "dqn": dqn,
    "td3_ema": td3_ema,
    "reinforce_rnn": reinforce_rnn,
}
