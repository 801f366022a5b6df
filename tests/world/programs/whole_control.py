"""Control by continuous actions in one file each: what acts takes an array and gives one, what learns counts steps."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.distributions import Normal
from torch.nn import functional as F

from tests.world.parts import Episodes, mlp, state_of


class SoftQ(nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, outputs)

    def forward(self, x: Any, a: Any) -> Any:
        x = torch.cat([x, a], 1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class SoftActor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc_mean, self.fc_logstd = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 2)
        self.register_buffer("action_scale", torch.tensor([1.0, 2.0]))

    def get_action(self, x: Any) -> Any:
        x = F.relu(self.fc1(x))
        mean, log_std = self.fc_mean(x), -5 + 3.5 * (torch.tanh(self.fc_logstd(x)) + 1)
        normal = Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return y_t * self.action_scale, log_prob.sum(1, keepdim=True), torch.tanh(mean) * self.action_scale


def sac_autotune(wrap: Any) -> Any:
    """SAC whose temperature is a Python number that is read after each of its updates."""
    actor, qf1, qf2 = SoftActor(), SoftQ(), SoftQ()
    target1, target2 = copy.deepcopy(qf1), copy.deepcopy(qf2)
    q_optimizer = optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-3)
    actor_optimizer = optim.Adam(list(actor.parameters()), lr=3e-4)
    log_alpha = torch.zeros(1, requires_grad=True)
    a_optimizer = optim.Adam([log_alpha], lr=1e-3)
    envs, st = Episodes(2, 4), {"alpha": 1.0}

    @wrap
    def act(obs: np.ndarray[Any, Any]) -> Any:
        actions, _, _ = actor.get_action(torch.Tensor(obs))
        return actions.detach().cpu().numpy()

    @wrap
    def update(obs: Any, actions: Any, rewards: Any, next_obs: Any, dones: Any, global_step: int) -> Any:
        alpha = st["alpha"]
        with torch.no_grad():
            next_actions, next_log_pi, _ = actor.get_action(next_obs)
            low = torch.min(target1(next_obs, next_actions), target2(next_obs, next_actions)) - alpha * next_log_pi
            goal = rewards.flatten() + (1 - dones.flatten()) * 0.99 * low.view(-1)
        qf1_loss, qf2_loss = F.mse_loss(qf1(obs, actions).view(-1), goal), F.mse_loss(qf2(obs, actions).view(-1), goal)
        q_optimizer.zero_grad()
        (qf1_loss + qf2_loss).backward()
        q_optimizer.step()
        if global_step % 2 == 0:
            for _ in range(2):
                pi, log_pi, _ = actor.get_action(obs)
                actor_loss = ((alpha * log_pi) - torch.min(qf1(obs, pi), qf2(obs, pi))).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                with torch.no_grad():
                    _, log_pi, _ = actor.get_action(obs)
                alpha_loss = (-log_alpha.exp() * (log_pi + 2)).mean()
                a_optimizer.zero_grad()
                alpha_loss.backward()
                a_optimizer.step()
                alpha = log_alpha.exp().item()
            st["alpha"] = alpha
        for own, target in ((qf1, target1), (qf2, target2)):
            for param, target_param in zip(own.parameters(), target.parameters(), strict=True):
                target_param.data.copy_(0.005 * param.data + 0.995 * target_param.data)
        return qf1_loss.item(), qf2_loss.item()

    def step(n: int) -> Any:
        actions = act(envs.obs)
        envs.step(actions.argmax(1))
        batch = torch.randn(16, 4), torch.randn(16, 2), torch.randn(16, 1), torch.randn(16, 4), torch.zeros(16, 1)
        return actions, update(*batch, n), st["alpha"], state_of(actor, qf1, target2, q_optimizer, a_optimizer)

    return step


class TD3:
    def __init__(self) -> None:
        self.actor, self.critic, self.critic2 = mlp(4, 32, 2), SoftQ(), SoftQ()
        self.actor_target, self.critic_target = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.actor_optimizer = optim.Adam(self.actor.parameters(), lr=3e-4)
        self.critic_optimizer = optim.Adam(self.critic.parameters(), lr=3e-4)
        self.max_action, self.discount, self.tau, self.policy_freq, self.total_it = 2.0, 0.99, 0.005, 2, 0

    def select_action(self, state: Any) -> Any:
        state = torch.FloatTensor(state.reshape(1, -1))
        return self.actor(state).cpu().data.numpy().flatten()

    def train(self, state: Any, action: Any, next_state: Any, reward: Any, not_done: Any) -> None:
        self.total_it += 1
        with torch.no_grad():
            noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
            next_action = (self.actor_target(next_state) + noise).clamp(-self.max_action, self.max_action)
            target_q = reward + not_done * self.discount * self.critic_target(next_state, next_action)
        critic_loss = F.mse_loss(self.critic(state, action), target_q)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        if self.total_it % self.policy_freq == 0:
            actor_loss = -self.critic(state, self.actor(state)).mean()
            self.actor_optimizer.zero_grad()
            actor_loss.backward()
            self.actor_optimizer.step()
            for param, target in zip(self.critic.parameters(), self.critic_target.parameters(), strict=True):
                target.data.copy_(self.tau * param.data + (1 - self.tau) * target.data)
            for param, target in zip(self.actor.parameters(), self.actor_target.parameters(), strict=True):
                target.data.copy_(self.tau * param.data + (1 - self.tau) * target.data)


def td3(wrap: Any) -> Any:
    """TD3 as its authors wrote it: a class that counts its steps, and acts on one observation of NumPy's doubles."""
    policy, rng = TD3(), np.random.RandomState(0)
    select_action, train = wrap(policy.select_action), wrap(policy.train)

    def step(_: int) -> Any:
        action = (select_action(rng.randn(4)) + rng.normal(0, 0.1, size=2)).clip(-2, 2)
        batch = torch.randn(16, 4), torch.randn(16, 2), torch.randn(16, 4), torch.randn(16, 1), torch.ones(16, 1)
        train(*batch)
        return action, policy.total_it, state_of(policy.actor, policy.critic_target, policy.actor_optimizer)

    return step


def ddpg(wrap: Any) -> Any:
    """DDPG: exploration noise around what acts, the policy's update every other step inside of the update."""
    actor, qf1 = mlp(4, 32, 2), SoftQ()
    target_actor, qf1_target = copy.deepcopy(actor), copy.deepcopy(qf1)
    q_optimizer, actor_optimizer = optim.Adam(qf1.parameters(), lr=3e-4), optim.Adam(actor.parameters(), lr=3e-4)
    envs, log = Episodes(2, 4), []
    low, high, noise_scale = np.float32(-1), np.float32(1), torch.tensor([0.1, 0.2])

    @wrap
    def act(obs: Any) -> Any:
        with torch.no_grad():
            actions = actor(torch.Tensor(obs))
            actions += torch.normal(0, noise_scale)
            return actions.cpu().numpy().clip(low, high)

    @wrap
    def update(data: Any, global_step: int) -> Any:
        with torch.no_grad():
            following = qf1_target(data["next_observations"], target_actor(data["next_observations"]))
            goal = data["rewards"].flatten() + (1 - data["dones"].flatten()) * 0.99 * following.view(-1)
        values = qf1(data["observations"], data["actions"]).view(-1)
        loss = F.mse_loss(values, goal)
        q_optimizer.zero_grad()
        loss.backward()
        q_optimizer.step()
        if global_step % 2 == 0:
            actor_loss = -qf1(data["observations"], actor(data["observations"])).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            for param, target in zip(actor.parameters(), target_actor.parameters(), strict=True):
                target.data.copy_(0.005 * param.data + 0.995 * target.data)
        if global_step % 100 == 0:
            log.append(loss.item())
        return values.mean().item()

    def step(n: int) -> Any:
        actions = act(envs.obs)
        envs.step(actions.argmax(1))
        data = {"observations": torch.randn(16, 4), "actions": torch.randn(16, 2), "rewards": torch.randn(16, 1),
                "next_observations": torch.randn(16, 4), "dones": torch.zeros(16, 1)}  # fmt: skip
        return actions, update(data, n), len(log), state_of(actor, target_actor, qf1)

    return step


PROGRAMS = {
    "sac_autotune": sac_autotune,
    "td3": td3,
    "ddpg": ddpg,
}
