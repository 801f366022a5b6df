"""What the whole programs share: environments and buffers of NumPy, and all state that has to be equal."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ``ReLU`` between them."""
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(sizes):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Episodes:
    """Environments whose observations are drawn, and follow the action in one place."""

    def __init__(self, n: int, size: int) -> None:
        self.rng = np.random.RandomState(n)
        self.obs = self.rng.randn(n, size).astype(np.float32)
        self.returns, self.lengths = np.zeros(n), np.zeros(n, dtype=np.int64)
        self.finished: list[float] = []

    def step(self, action: Any) -> Any:
        """New observations, rewards, and which episodes ended."""
        n, size = self.obs.shape
        self.obs = (0.5 * self.obs + self.rng.randn(n, size) * 0.5).astype(np.float32)
        self.obs[:, 0] += np.asarray(action).astype(np.float32)
        reward = np.tanh(self.obs.sum(1)).astype(np.float32)
        done = self.rng.rand(n) < 0.1
        self.returns += reward
        self.lengths += 1
        for i in np.flatnonzero(done):
            self.finished.append(float(self.returns[i]) / int(self.lengths[i]))
            self.returns[i], self.lengths[i] = 0, 0
        return self.obs, reward, done

    def log(self) -> Any:
        """How many episodes ended, and the sum of what the last five gave."""
        return len(self.finished), sum(self.finished[-5:])


class Replay:
    """A ring of arrays; batches come as tensors."""

    def __init__(self, size: int, capacity: int = 64) -> None:
        self.rng = np.random.RandomState(7)
        self.arrays: list[Any] = [
            np.zeros((capacity, size), np.float32), np.zeros((capacity, 1), np.int64), np.zeros(capacity, np.float32),
            np.zeros((capacity, size), np.float32), np.zeros(capacity, np.float32),
        ]  # fmt: skip
        self.at, self.capacity, self.full = 0, capacity, False

    def add(self, *values: Any) -> None:
        """Store one transition in the place of the oldest."""
        for array, value in zip(self.arrays, values, strict=True):
            array[self.at] = value
        self.at = (self.at + 1) % self.capacity
        self.full = self.full or self.at == 0

    def sample(self, n: int, *, column: bool = False) -> Any:
        """A random batch of transitions. ``column``: numbers come as columns."""
        at = self.rng.randint(0, self.capacity if self.full else max(self.at, 1), n)
        found = [torch.from_numpy(array[at]) for array in self.arrays]
        return [one.view(n, -1) if column else one for one in found]


def state_of(*owners: Any) -> Any:
    """All tensors and numbers of modules and optimizers, and of the generator."""
    found = [owner.state_dict() if hasattr(owner, "state_dict") else owner for owner in owners]
    return found, torch.get_rng_state()
