"""gpytorch and botorch: trained, predicted from, and asked where to look next."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from botorch.acquisition import qExpectedImprovement
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.models import SingleTaskGP
from botorch.sampling import SobolQMCNormalSampler


class _GP(gpytorch.models.ExactGP):
    def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))

    def forward(self, x: Any) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def _gp() -> Any:
    x = torch.linspace(0, 1, 12)
    return _GP(x, torch.sin(x * 6), gpytorch.likelihoods.GaussianLikelihood())


def predict(wrap: Any) -> Any:
    model = _gp().eval()
    model.likelihood.eval()

    @wrap
    def predicted(x: Any) -> Any:
        found = model.likelihood(model(x))
        return found.mean, found.variance

    def step(_: int) -> Any:
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            return predicted(torch.rand(5))

    return step, [lambda: model.kernel.initialize(outputscale=2.0)]


def train_then_predict(wrap: Any) -> Any:
    model = _gp()
    loss_of = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    forward = wrap(model)

    def step(_: int) -> Any:
        model.train()
        for _ in range(2):
            optimizer.zero_grad()
            loss = -loss_of(forward(model.train_inputs[0]), model.train_targets)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            return loss.detach(), forward(torch.rand(5)).mean

    return step


def variational(wrap: Any) -> Any:
    class Sparse(gpytorch.models.ApproximateGP):
        def __init__(self, points: Any) -> None:
            spread = gpytorch.variational.CholeskyVariationalDistribution(points.shape[0])
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, spread))
            self.mean, self.kernel = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    model, likelihood = Sparse(torch.linspace(0, 1, 4)[:, None]), gpytorch.likelihoods.GaussianLikelihood()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=32)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)
    loss_of = wrap(lambda x, y: -bound(model(x), y))

    def step(_: int) -> Any:
        x = torch.rand(8, 1)
        optimizer.zero_grad()
        loss = loss_of(x, torch.sin(x[:, 0] * 6))
        loss.backward()
        optimizer.step()
        return loss.detach(), list(model.parameters())

    return step


def _single_task() -> Any:
    x = torch.rand(8, 2, dtype=torch.float64)
    return SingleTaskGP(x, x.sum(1, keepdim=True).sin()).eval()


def improvement(wrap: Any) -> Any:
    model = _single_task()
    ask = wrap(LogExpectedImprovement(model, best_f=0.5))

    def step(_: int) -> Any:
        with torch.no_grad():
            return ask(torch.rand(4, 1, 2, dtype=torch.float64))

    return step


def improvement_ascent(wrap: Any) -> Any:
    model = _single_task()
    sampler = SobolQMCNormalSampler(torch.Size([16]), seed=0)
    ask = wrap(qExpectedImprovement(model, best_f=0.5, sampler=sampler))

    def step(_: int) -> Any:
        x = torch.rand(2, 2, 2, dtype=torch.float64, requires_grad=True)
        found = ask(x)
        (grad,) = torch.autograd.grad(found.sum(), x)
        return found.detach(), grad

    return step


PROGRAMS = {
    "predict": predict,
    "train_then_predict": train_then_predict,
    "variational": variational,
    "improvement": improvement,
    "improvement_ascent": improvement_ascent,
}
