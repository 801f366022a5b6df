"""Reinforcement learning in one file each: what acts takes an array and gives one, what learns logs its numbers.

The environments are random draws of NumPy. ``wrap`` stands where a user would write ``@capture``: on what acts and on
the whole update.
"""

from __future__ import annotations

import collections
import copy
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from tests.world.parts import Episodes, Replay, mlp, state_of


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor = mlp(4, 32, 32, 1), mlp(4, 32, 32, 2)

    def get_value(self, x: Any) -> Any:
        return self.critic(x)

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def ppo(wrap: Any) -> Any:
    """PPO: the loss of a minibatch with its log, annealed learning rate and a stop by the divergence."""
    envs, agent = Episodes(4, 4), ActorCritic()
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    clip_coef, ent_coef, vf_coef, max_grad_norm = 0.2, 0.01, 0.5, 0.5
    clipfracs: list[float] = []

    @wrap
    def act(obs: np.ndarray[Any, Any]) -> Any:
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(torch.Tensor(obs))
        return action.cpu().numpy(), logprob, value.flatten()

    @wrap
    def update(obs: Any, actions: Any, logprobs: Any, advantages: Any, returns: Any, values: Any) -> Any:
        _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs, actions.long())
        logratio = newlogprob - logprobs
        ratio = logratio.exp()
        with torch.no_grad():
            old_approx_kl = (-logratio).mean()
            approx_kl = ((ratio - 1) - logratio).mean()
            clipfracs.extend([((ratio - 1.0).abs() > clip_coef).float().mean().item()])
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        pg_loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)).mean()
        newvalue = newvalue.view(-1)
        v_clipped = values + torch.clamp(newvalue - values, -clip_coef, clip_coef)
        v_loss = 0.5 * torch.max((newvalue - returns) ** 2, (v_clipped - returns) ** 2).mean()
        loss = pg_loss - ent_coef * entropy.mean() + v_loss * vf_coef
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
        optimizer.step()
        return v_loss.item(), pg_loss.item(), entropy.mean().item(), old_approx_kl.item(), approx_kl.item()

    def step(n: int) -> Any:
        optimizer.param_groups[0]["lr"] = (1.0 - (n // 20) / 50) * 2.5e-4
        rollout, log = [], []
        for _ in range(4):
            action, logprob, value = act(envs.obs)
            obs, reward, done = envs.step(action)
            rollout.append((torch.Tensor(obs), torch.tensor(action), logprob, torch.tensor(reward), value))
            log.append((action, logprob.sum().item(), done.sum()))
        b = [torch.cat(rows) for rows in zip(*rollout, strict=True)]
        for indices in np.array_split(np.random.RandomState(n).permutation(16), 2):
            mb = torch.from_numpy(indices)
            losses = update(b[0][mb], b[1][mb], b[2][mb], b[3][mb] - b[4][mb], b[3][mb], b[4][mb])
            log.append(losses)
            if losses[-1] > 0.5:
                break
        return log, np.mean(clipfracs[-2:]), len(clipfracs), envs.log(), state_of(agent, optimizer)

    return step


def ppo_continuous(wrap: Any) -> Any:
    """PPO with a state-independent deviation; the agent's own method is captured."""
    envs = Episodes(2, 4)

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic, self.actor_mean = mlp(4, 32, 1), mlp(4, 32, 2)
            self.actor_logstd = nn.Parameter(torch.zeros(1, 2))

        def get_action_and_value(self, x: Any, action: Any = None) -> Any:
            action_mean = self.actor_mean(x)
            action_std = torch.exp(self.actor_logstd.expand_as(action_mean))
            probs = Normal(action_mean, action_std)
            if action is None:
                action = probs.sample()
            return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)

    agent = Agent()
    optimizer = optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)

    @wrap
    @torch.no_grad()
    def act(obs: Any) -> Any:
        action, logprob, _, value = agent.get_action_and_value(obs)
        return action, logprob, value

    @wrap
    def learn(b_obs: Any, b_actions: Any, b_logprobs: Any, b_returns: Any, ent_coef: float) -> Any:
        _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs, b_actions)
        ratio = (newlogprob - b_logprobs).exp()
        adv = b_returns - newvalue.detach().view(-1)
        pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
        v_loss = 0.5 * ((newvalue.view(-1) - b_returns) ** 2).mean()
        loss = pg_loss - ent_coef * entropy.mean() + v_loss * 0.5
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return {"loss": loss.item(), "std": agent.actor_logstd.exp().mean().item()}

    def step(n: int) -> Any:
        obs = torch.Tensor(envs.obs)
        action, logprob, value = act(obs)
        _, reward, _ = envs.step(action.numpy().argmax(1))
        return action, value, learn(obs, action, logprob, torch.tensor(reward), 0.01), state_of(agent, optimizer)

    return step


def dqn(wrap: Any) -> Any:
    """DQN: an epsilon that falls, a target network that is copied by the count of steps, the log now and then."""
    envs, buffer = Episodes(1, 4), Replay(4)
    q_network, target_network = mlp(4, 32, 32, 2), mlp(4, 32, 32, 2)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = optim.Adam(q_network.parameters(), lr=2.5e-4)
    rng, log = np.random.RandomState(1), []

    def linear_schedule(start_e: float, end_e: float, duration: int, t: int) -> float:
        return max((end_e - start_e) / duration * t + start_e, end_e)

    @wrap
    def act(obs: np.ndarray[Any, Any]) -> Any:
        q_values = q_network(torch.Tensor(obs))
        return torch.argmax(q_values, dim=1).cpu().numpy()

    @wrap
    def train(observations: Any, actions: Any, rewards: Any, next_observations: Any, dones: Any) -> Any:
        with torch.no_grad():
            target_max, _ = target_network(next_observations).max(dim=1)
            td_target = rewards.flatten() + 0.99 * target_max * (1 - dones.flatten())
        old_val = q_network(observations).gather(1, actions).squeeze()
        loss = F.mse_loss(td_target, old_val)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss, old_val

    def step(global_step: int) -> Any:
        epsilon = linear_schedule(1, 0.05, 100, global_step)
        actions = np.array([rng.randint(2)]) if rng.rand() < epsilon else act(envs.obs)
        before = envs.obs.copy()
        obs, reward, done = envs.step(actions)
        buffer.add(before[0], actions[0], reward[0], obs[0], done[0])
        act(obs)
        loss, old_val = train(*buffer.sample(16))
        if global_step % 10 == 0:
            log.append((loss.item(), old_val.mean().item()))
        if global_step % 25 == 0:
            for target, own in zip(target_network.parameters(), q_network.parameters(), strict=True):
                target.data.copy_(1.0 * own.data + 0.0 * target.data)
        return actions, log[-1], envs.log(), state_of(q_network, target_network, optimizer)

    return step


def dqn_class(wrap: Any) -> Any:
    """An agent as tutorials write it: a class that counts its steps and copies its target in ``learn``."""

    class Agent:
        def __init__(self) -> None:
            self.local, self.target = mlp(4, 32, 2), mlp(4, 32, 2)
            self.optimizer, self.t_step, self.tau = optim.Adam(self.local.parameters(), lr=5e-4), 0, 1e-3
            self.losses: Any = collections.deque(maxlen=100)

        def act(self, state: Any) -> Any:
            state = torch.from_numpy(state).float().unsqueeze(0)
            self.local.eval()
            with torch.no_grad():
                action_values = self.local(state)
            self.local.train()
            return np.argmax(action_values.cpu().data.numpy())

        def learn(self, experiences: Any, gamma: float) -> None:
            states, actions, rewards, next_states, dones = experiences
            q_targets_next = self.target(next_states).detach().max(1)[0].unsqueeze(1)
            q_targets = rewards + gamma * q_targets_next * (1 - dones)
            loss = F.mse_loss(self.local(states).gather(1, actions), q_targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
            self.t_step = (self.t_step + 1) % 4
            if self.t_step == 0:
                for target_param, local_param in zip(self.target.parameters(), self.local.parameters(), strict=True):
                    target_param.data.copy_(self.tau * local_param.data + (1.0 - self.tau) * target_param.data)

    envs, buffer, agent = Episodes(1, 4), Replay(4), Agent()
    act, learn = wrap(agent.act), wrap(agent.learn)

    def step(_: int) -> Any:
        before = envs.obs.copy()
        action = act(before[0])
        obs, reward, done = envs.step(np.array([action]))
        buffer.add(before[0], action, reward[0], obs[0], done[0])
        learn(buffer.sample(8, column=True), 0.99)
        return int(action), np.mean(agent.losses), agent.t_step, state_of(agent.local, agent.target, agent.optimizer)

    return step


def double_dueling(wrap: Any) -> Any:
    """Double DQN with dueling heads; priorities go back to a buffer of arrays."""

    class Dueling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.value, self.advantage = mlp(4, 32, 32), nn.Linear(32, 1), nn.Linear(32, 3)

        def forward(self, x: Any) -> Any:
            x = F.relu(self.body(x))
            advantage = self.advantage(x)
            return self.value(x) + advantage - advantage.mean(1, keepdim=True)

    online = Dueling()
    target = copy.deepcopy(online)
    optimizer, priorities = optim.RMSprop(online.parameters(), lr=1e-3), np.ones(64, dtype=np.float32)
    memory = [torch.randn(64, 4), torch.randint(0, 3, (64,)), torch.randn(64), torch.randn(64, 4)]

    @wrap
    def update(states: Any, actions: Any, rewards: Any, next_states: Any, weights: Any) -> Any:
        q = online(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            best = online(next_states).argmax(1, keepdim=True)
            expected = rewards + 0.99 * target(next_states).gather(1, best).squeeze(1)
        td = expected - q
        loss = (weights * td.pow(2)).mean()
        optimizer.zero_grad()
        loss.backward()
        for param in online.parameters():
            param.grad.data.clamp_(-1, 1)
        optimizer.step()
        return td.abs().detach().cpu().numpy() + 1e-5, loss.item()

    def step(n: int) -> Any:
        probs = priorities**0.6 / (priorities**0.6).sum()
        rng = np.random.RandomState(n)
        idx = rng.choice(64, 16, p=probs / probs.sum())
        weights = (64 * probs[idx]) ** -(min(1.0, 0.4 + n * 0.003))
        new, loss = update(
            *[column[idx] for column in memory], torch.tensor(weights / weights.max(), dtype=torch.float32)
        )
        priorities[idx] = new
        if n % 20 == 0:
            target.load_state_dict(online.state_dict())
        return new, loss, state_of(online, target, optimizer)

    return step


def c51(wrap: Any) -> Any:
    """A categorical DQN: the projection of the distribution, and what acts."""
    n_atoms, v_min, v_max = 21, -10.0, 10.0
    atoms = torch.linspace(v_min, v_max, steps=n_atoms)
    q_network, target_network = mlp(4, 32, 2 * n_atoms), mlp(4, 32, 2 * n_atoms)
    optimizer = optim.Adam(q_network.parameters(), lr=2.5e-4, eps=0.01 / 16)
    envs = Episodes(2, 4)

    def get_action(network: Any, x: Any, action: Any = None) -> Any:
        pmfs = torch.softmax(network(x).view(len(x), 2, n_atoms), dim=2)
        q_values = (pmfs * atoms).sum(2)
        if action is None:
            action = torch.argmax(q_values, 1)
        return action, pmfs[torch.arange(len(x)), action]

    @wrap
    def act(obs: Any) -> Any:
        actions, _ = get_action(q_network, torch.as_tensor(obs, dtype=torch.float32))
        return actions.cpu().numpy()

    @wrap
    def train(observations: Any, actions: Any, next_observations: Any, rewards: Any, dones: Any) -> Any:
        with torch.no_grad():
            _, next_pmfs = get_action(target_network, next_observations)
            next_atoms = rewards + 0.99 * atoms * (1 - dones)
            delta_z = atoms[1] - atoms[0]
            tz = next_atoms.clamp(v_min, v_max)
            b = (tz - v_min) / delta_z
            low, up = b.floor().clamp(0, n_atoms - 1), b.ceil().clamp(0, n_atoms - 1)
            d_m_l = (up + (low == up).float() - b) * next_pmfs
            d_m_u = (b - low) * next_pmfs
            target_pmfs = torch.zeros_like(next_pmfs)
            for i in range(target_pmfs.size(0)):
                target_pmfs[i].index_add_(0, low[i].long(), d_m_l[i])
                target_pmfs[i].index_add_(0, up[i].long(), d_m_u[i])
        _, old_pmfs = get_action(q_network, observations, actions.flatten())
        loss = (-(target_pmfs * old_pmfs.clamp(min=1e-5, max=1 - 1e-5).log()).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def step(n: int) -> Any:
        actions = act(envs.obs)
        envs.step(actions)
        loss = train(torch.randn(8, 4), torch.randint(0, 2, (8, 1)), torch.randn(8, 4), torch.randn(8, 1),
                     torch.zeros(8, 1))  # fmt: skip
        if n % 20 == 0:
            target_network.load_state_dict(q_network.state_dict())
        return actions, loss, state_of(q_network, optimizer)

    return step


def reinforce(wrap: Any) -> Any:
    """REINFORCE as in torch's examples: one observation at a time, log-probabilities kept, an update an episode."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1, self.dropout, self.affine2 = nn.Linear(4, 32), nn.Dropout(p=0.6), nn.Linear(32, 2)
            self.saved_log_probs: list[Any] = []
            self.rewards: list[float] = []

        @wrap
        def forward(self, x: Any) -> Any:
            x = F.relu(self.dropout(self.affine1(x)))
            return F.softmax(self.affine2(x), dim=1)

    policy, eps = Policy(), np.finfo(np.float32).eps.item()
    optimizer, envs = optim.Adam(policy.parameters(), lr=1e-2), Episodes(1, 4)

    def select_action(state: Any) -> Any:
        m = Categorical(policy(torch.from_numpy(state).float().unsqueeze(0)))
        action = m.sample()
        policy.saved_log_probs.append(m.log_prob(action))
        return action.item()

    @wrap
    def finish(log_probs: Any, rewards: Any) -> Any:
        found, returns = 0.0, []
        for r in rewards[::-1]:
            found = r + 0.99 * found
            returns.insert(0, found)
        goal = torch.tensor(returns)
        goal = (goal - goal.mean()) / (goal.std() + eps)
        return torch.cat([-log_prob * one for log_prob, one in zip(log_probs, goal, strict=True)]).sum()

    def step(_: int) -> Any:
        taken = []
        for _ in range(5):
            taken.append(select_action(envs.obs[0]))
            _, reward, _ = envs.step(np.array(taken[-1:]))
            policy.rewards.append(float(reward[0]))
        optimizer.zero_grad()
        loss = finish(policy.saved_log_probs, policy.rewards)
        loss.backward()
        optimizer.step()
        del policy.rewards[:], policy.saved_log_probs[:]
        return taken, loss.item(), state_of(policy, optimizer)

    return step


def a2c(wrap: Any) -> Any:
    """A2C: an update on lists of arrays, which are turned into tensors inside."""
    agent, envs = ActorCritic(), Episodes(3, 4)
    optimizer = optim.RMSprop(agent.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)

    @wrap
    def update(obs: Any, actions: Any, rewards: Any, masks: Any, last: Any) -> Any:
        with torch.no_grad():
            following = agent.get_value(torch.as_tensor(last)).squeeze(-1)
        returns = []
        for reward, mask in zip(reversed(rewards), reversed(masks), strict=True):
            following = torch.as_tensor(reward) + 0.99 * following * torch.as_tensor(mask)
            returns.insert(0, following)
        _, log_prob, entropy, value = agent.get_action_and_value(
            torch.as_tensor(np.concatenate(obs)), torch.as_tensor(np.concatenate(actions))
        )
        advantage = torch.cat(returns) - value.squeeze(-1)
        loss = -(log_prob * advantage.detach()).mean() + 0.5 * advantage.pow(2).mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    @wrap
    def act(obs: Any) -> Any:
        with torch.no_grad():
            return agent.get_action_and_value(torch.as_tensor(obs))[0].numpy()

    def step(_: int) -> Any:
        obs, actions, rewards, masks = [], [], [], []
        for _ in range(3):
            obs.append(envs.obs.copy())
            actions.append(act(envs.obs))
            _, reward, done = envs.step(actions[-1])
            rewards.append(reward)
            masks.append(1 - done.astype(np.float32))
        return actions, update(obs, actions, rewards, masks, envs.obs.copy()), envs.log(), state_of(agent, optimizer)

    return step


def ppo_lstm(wrap: Any) -> Any:
    """PPO with a recurrent agent: a state that is masked where an episode ended."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.lstm = mlp(4, 16), nn.LSTM(16, 16)
            self.actor, self.critic = nn.Linear(16, 2), nn.Linear(16, 1)

        def get_states(self, x: Any, lstm_state: Any, done: Any) -> Any:
            hidden = self.network(x)
            batch_size = lstm_state[0].shape[1]
            hidden = hidden.reshape((-1, batch_size, self.lstm.input_size))
            done = done.reshape((-1, batch_size))
            new_hidden = []
            for h, d in zip(hidden, done, strict=True):
                masked = (1.0 - d).view(1, -1, 1) * lstm_state[0], (1.0 - d).view(1, -1, 1) * lstm_state[1]
                h, lstm_state = self.lstm(h.unsqueeze(0), masked)
                new_hidden += [h]
            return torch.flatten(torch.cat(new_hidden), 0, 1), lstm_state

        def get_action_and_value(self, x: Any, lstm_state: Any, done: Any, action: Any = None) -> Any:
            hidden, lstm_state = self.get_states(x, lstm_state, done)
            probs = Categorical(logits=self.actor(hidden))
            if action is None:
                action = probs.sample()
            return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), lstm_state

    agent, envs = Agent(), Episodes(2, 4)
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    st: dict[str, Any] = {"state": (torch.zeros(1, 2, 16), torch.zeros(1, 2, 16)), "done": torch.zeros(2)}

    @wrap
    def act(obs: Any, state: Any, done: Any) -> Any:
        with torch.no_grad():
            action, logprob, _, _, state = agent.get_action_and_value(obs, state, done)
        return action, logprob, state

    @wrap
    def update(obs: Any, actions: Any, logprobs: Any, returns: Any, state: Any, dones: Any) -> Any:
        _, newlogprob, entropy, newvalue, _ = agent.get_action_and_value(obs, state, dones, actions)
        ratio = (newlogprob - logprobs).exp()
        adv = returns - newvalue.view(-1).detach()
        loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.9, 1.1)).mean() - 0.01 * entropy.mean()
        loss = loss + 0.5 * (newvalue.view(-1) - returns).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    def step(_: int) -> Any:
        initial, rows = (st["state"][0].clone(), st["state"][1].clone()), []
        for _ in range(3):
            obs = torch.Tensor(envs.obs)
            action, logprob, st["state"] = act(obs, st["state"], st["done"])
            _, reward, done = envs.step(action.cpu().numpy())
            rows.append((obs, action, logprob, torch.tensor(reward), st["done"]))
            st["done"] = torch.Tensor(done)
        b = [torch.cat(column) for column in zip(*rows, strict=True)]
        return b[1], update(b[0], b[1], b[2], b[3], initial, b[4]), st["state"], state_of(agent, optimizer)

    return step


PROGRAMS = {
    "ppo": ppo,
    "ppo_continuous": ppo_continuous,
    "dqn": dqn,
    "dqn_class": dqn_class,
    "double_dueling": double_dueling,
    "c51": c51,
    "reinforce": reinforce,
    "a2c": a2c,
    "ppo_lstm": ppo_lstm,
}
