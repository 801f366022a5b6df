"""Small modules in the style of well-known libraries, which read configs, tables and hooks.

Each function gives a module or function to capture, its arguments, and switches that such a library has.
"""

from __future__ import annotations

import collections
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tests.support.device import DEVICE


@frozen(eq=False)
class Body:
    """A program: what is captured, what it is called with, and what a user may switch."""

    target: Any
    arguments: tuple[Any, ...]
    switches: Mapping[str, Callable[[], object]]


def ramp(*shape: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, int(torch.tensor(shape).prod())).reshape(shape).to(DEVICE)


# -------------------------------------------------------------------------- attention with a config, as in transformers


class PretrainedConfig:
    attribute_map: ClassVar[dict[str, str]] = {"num_heads": "num_attention_heads"}

    def __init__(self, **named: Any) -> None:
        self.hidden_size, self.num_attention_heads, self.act = 8, 2, "gelu"
        self._attn_implementation, self.output_attentions = "eager", False
        self.__dict__.update(named)

    @override
    def __getattribute__(self, name: str) -> Any:
        if name != "attribute_map" and name in type(self).attribute_map:
            name = type(self).attribute_map[name]
        return super().__getattribute__(name)


def eager_attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * scaling, -1) @ v


def linear_attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    return (q @ (k.transpose(-1, -2) @ v)) * scaling


ATTENTION: dict[str, Callable[..., Tensor]] = {"eager": eager_attention, "linear": linear_attention}
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


class Attention(nn.Module):
    def __init__(self, config: PretrainedConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.scaling = (config.hidden_size // config.num_heads) ** -0.5
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    @override
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        shape = (*x.shape[:-1], self.config.num_heads, -1)
        q, k, v = (one.view(shape).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        attend = ATTENTION.get(self.config._attn_implementation, eager_attention)
        out = attend(self, q, k, v, scaling=self.scaling).transpose(1, 2).flatten(2)
        return ACTIVATIONS[self.config.act](out) if self.layer % 2 == 0 else out  # type: ignore[operator]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.layers = nn.ModuleList(Attention(self.config, i) for i in range(2))
        self.gradient_checkpointing = False

    @override
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        for layer in self.layers[: getattr(self.config, "num_hidden_layers", 2)]:
            if self.gradient_checkpointing and self.training:
                raise AssertionError
            x = x + layer(x, **kwargs)
        return x


def transformer() -> Body:
    net = Transformer().to(DEVICE)
    switches = {
        "implementation": lambda: setattr(net.config, "_attn_implementation", "linear"),
        "activation": lambda: setattr(net.config, "act", "relu"),
        "layers": lambda: setattr(net.config, "num_hidden_layers", 1),
        "registry": lambda: ATTENTION.__setitem__("eager", linear_attention),
        "map": lambda: PretrainedConfig.attribute_map.pop("num_heads"),
    }
    return Body(net, (ramp(1, 3, 8),), switches)


# ------------------------------------------------------------------------------------------------- adapters, as in PEFT


class LoraLayer(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B, self.scaling = nn.ModuleDict(), nn.ModuleDict(), dict[str, float]()
        self._active_adapter: list[str] = ["default"]
        self._disable_adapters, self.merged_adapters = False, list[str]()
        for name in ("default", "other"):
            self.lora_A[name], self.lora_B[name] = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
            self.scaling[name] = 2.0

    @property
    def active_adapters(self) -> list[str]:
        return self._active_adapter

    @property
    def disable_adapters(self) -> bool:
        return self._disable_adapters

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)

    @override
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        if self.disable_adapters or self.merged:
            return result
        for name in self.active_adapters:
            if name not in self.lora_A.keys():  # noqa: SIM118 - as PEFT writes it
                continue
            result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result


def lora() -> Body:
    layers = [LoraLayer(nn.Linear(8, 8)).to(DEVICE) for _ in range(2)]
    net = nn.Sequential(*layers)

    def in_each(act: Callable[[LoraLayer], object]) -> Callable[[], object]:
        return lambda: [act(layer) for layer in layers]

    switches = {
        "active": in_each(lambda layer: setattr(layer, "_active_adapter", ["other"])),
        "both": in_each(lambda layer: layer._active_adapter.append("other")),
        "off": in_each(lambda layer: setattr(layer, "_disable_adapters", True)),
        "merged": in_each(lambda layer: layer.merged_adapters.append("default")),
        "scaling": in_each(lambda layer: layer.scaling.update(default=0.5)),
        "deleted": in_each(lambda layer: layer.lora_A.__delitem__("default")),
    }
    return Body(net, (ramp(3, 8),), switches)


# ----------------------------------------------------------------------------- a block with processors, as in diffusers


class FrozenDict(collections.OrderedDict[str, Any]):
    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        for key, value in self.items():
            setattr(self, key, value)
        self.__frozen = True


class Processor:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, attention: UNetAttention, x: Tensor, **kwargs: Any) -> Tensor:
        return torch.softmax(attention.to_q(x), -1) * self.scale * kwargs.get("scale", 1.0)  # type: ignore[no-any-return]


class UNetAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(8, 8)
        self.processor: Any = Processor()

    def set_processor(self, processor: Any) -> None:
        self.processor = processor

    @override
    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        known = set(inspect.signature(self.processor.__call__).parameters.keys())
        kept = {key: value for key, value in kwargs.items() if key in known or "kwargs" in known}
        return self.processor(self, x, **kept)


class UNetBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._internal_dict = FrozenDict(scaling=2.0, time="silu")
        self.attention, self.nonlinearity = UNetAttention(), nn.SiLU()

    @property
    def config(self) -> Any:
        return self._internal_dict

    @override
    def __getattr__(self, name: str) -> Any:
        if "_internal_dict" in self.__dict__ and name in self.__dict__["_internal_dict"]:
            return self._internal_dict[name]
        return super().__getattr__(name)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.nonlinearity(x) if self.config.time == "silu" else x
        return x + self.attention(x, scale=self.config["scaling"]) * self.scaling  # type: ignore[no-any-return]


def unet() -> Body:
    net = UNetBlock().to(DEVICE)
    switches = {
        "processor": lambda: net.attention.set_processor(Processor(3.0)),
        "scale": lambda: setattr(net.attention.processor, "scale", 0.5),
        "config": lambda: setattr(net, "_internal_dict", FrozenDict(scaling=4.0, time="none")),
        "activation": lambda: setattr(net, "nonlinearity", nn.ReLU()),
        "call": lambda: setattr(Processor, "__call__", lambda self, attention, x, **kwargs: x * 7.0),
    }
    return Body(net, (ramp(3, 8),), switches)


# --------------------------------------------------------------------------------- a module with hooks, as in Lightning


class Lightning(nn.Module):
    def __init__(self, **hparams: Any) -> None:
        super().__init__()
        self._hparams = dict(hparams)
        self.layer, self._trainer = nn.Linear(8, 8), types.SimpleNamespace(global_step=3, callbacks=[], precision="32")

    @property
    def hparams(self) -> Any:
        return types.SimpleNamespace(**self._hparams)

    @property
    def trainer(self) -> Any:
        return self._trainer

    def training_step(self, batch: Tensor) -> Tensor:
        loss = F.mse_loss(self.layer(batch), batch) * self.hparams.weight
        for callback in self.trainer.callbacks:
            loss = callback(loss)
        return loss * (2.0 if self.trainer.precision == "16" else 1.0)  # type: ignore[no-any-return]

    @override
    def forward(self, batch: Tensor) -> Tensor:
        name = "training_step" if not hasattr(self, "validating") else "validation_step"
        return getattr(self, name)(batch)  # type: ignore[no-any-return]


def lightning() -> Body:
    net = Lightning(weight=2.0).to(DEVICE)
    switches = {
        "hparams": lambda: net._hparams.update(weight=5.0),
        "callbacks": lambda: net.trainer.callbacks.append(lambda loss: loss + 1.0),
        "precision": lambda: setattr(net.trainer, "precision", "16"),
        "mode": lambda: net.__dict__.update(validating=1, validation_step=lambda batch: batch.sum()),
        "trainer": lambda: setattr(net, "_trainer", types.SimpleNamespace(callbacks=[], precision="16")),
    }
    return Body(net, (ramp(3, 8),), switches)


# ------------------------------------------------------------------------------------------ lazy values, as in gpytorch


def cached(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any) -> Any:
        memo = self.__dict__.setdefault("_memoize_cache", {})
        key = (method.__name__, args)
        if key not in memo:
            memo[key] = method(self, *args)
        return memo[key]

    return wrapper


class Settings:
    _state = 1e-3

    @classmethod
    def value(cls) -> float:
        return cls._state


class cholesky_jitter(Settings):
    pass


class Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.raw_lengthscale = nn.Parameter(torch.ones(()))
        self._constraints: collections.OrderedDict[str, nn.Module] = collections.OrderedDict()
        self._constraints["raw_lengthscale"] = nn.Softplus()
        self._names = ["rbf", "scale"]

    @property
    def lengthscale(self) -> Any:
        return self._constraints["raw_lengthscale"](self.raw_lengthscale)

    @cached
    def names(self, count: int) -> tuple[str, ...]:
        return tuple(self._names[:count])

    @override
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.exp(-torch.cdist(x, x) / self.lengthscale)
        for name in self.names(2):
            found = found * (2.0 if name == "scale" else 1.0)
        return found + cholesky_jitter.value() * torch.eye(x.shape[0], device=x.device)


def gaussian() -> Body:
    net = Kernel().to(DEVICE).requires_grad_(False)
    net.names(2)
    switches = {
        "jitter": lambda: setattr(cholesky_jitter, "_state", 1e-1),
        "settings": lambda: setattr(Settings, "_state", 1e-2),
        "constraint": lambda: net._constraints.update(raw_lengthscale=nn.Identity()),
        "memo": lambda: net.__dict__.update(_memoize_cache={}, _names=["rbf", "rbf"]),
    }
    return Body(net, (ramp(3, 2),), switches)


# ------------------------------------------------------------------------------------ lists of instructions, as in e3nn


class Instruction(NamedTuple):
    i_in: int
    i_out: int
    weight: float


class TensorProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.instructions = [Instruction(0, 1, 2.0), Instruction(1, 0, 0.5), Instruction(1, 1, 1.0)]
        self.slices, self.normalization = [slice(0, 2), slice(2, 4)], "component"

    @override
    def forward(self, x: Tensor) -> Tensor:
        parts = [torch.zeros_like(x[:, one]) for one in self.slices]
        for ins in self.instructions:
            path = x[:, self.slices[ins.i_in]] * ins.weight
            parts[ins.i_out] = parts[ins.i_out] + (path if self.normalization == "component" else path / 2)
        return torch.cat(parts, -1)


def products() -> Body:
    net = TensorProduct()
    switches = {
        "weight": lambda: net.instructions.__setitem__(0, Instruction(0, 1, 3.0)),
        "fewer": lambda: net.instructions.pop(),
        "slices": lambda: net.slices.reverse(),
        "normalization": lambda: setattr(net, "normalization", "norm"),
    }
    return Body(net, (ramp(3, 4),), switches)
