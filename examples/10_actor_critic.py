"""Reinforcement learning: an update of SAC with three losses and three optimizers, captured as a whole."""

from __future__ import annotations

import copy

import torch

from capture import capture, recordings
from examples.gain import gain
from examples.workloads import SoftActorCritic

torch.manual_seed(0)
torch.set_num_threads(1)
agent = SoftActorCritic(torch.device("cpu"))
twin = copy.deepcopy(agent)
update = capture(agent.update)


def batch() -> tuple[torch.Tensor, ...]:
    return torch.randn(16, 4), torch.randn(16, 2), torch.randn(16, 1), torch.randn(16, 4)


same = True
for seed in range(20):
    transitions = batch()
    torch.manual_seed(seed)  # for the noise of the actions: a replay draws what eager draws
    loss = update(*transitions)
    torch.manual_seed(seed)
    same &= torch.equal(loss, twin.update(*transitions))
print("same losses as eager:", same)
print("same weights as eager:", all(map(torch.equal, agent.actor.parameters(), twin.actor.parameters())))
print(recordings(update))
transitions = batch()
print(gain(lambda: twin.update(*transitions), lambda: update(*transitions), calls=20))
print("why: some 400 operators on tensors of a few kilobytes, whose launching is nearly all of the time")
