"""How is one model split over the ranks of a process group, by Transformers' own sharding plan?

Transformers decides what is split and how a rank reads its share (heads, feed-forward columns,
experts' columns, vocabulary); the indexer and the latent projections, which its plans leave out,
stay whole on every rank. This file checks that the sizes divide, hands the group over, and replaces
sharded parameters by plain local tensors, so that a forward pass pays for no bookkeeping. Starts no
processes and knows nothing about attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

from topkapi.errors import ConfigError, UnsupportedModelError

_DIVIDED = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")
# Bytes that a row of one expert's share must be a multiple of, or torch has no grouped product.
_GROUPED_ALIGNMENT = 16
_HOOK = "prepare_distribute_model"


def check_divisible(config: Any, num_ranks: int) -> None:
    """Raise `ConfigError` naming what `num_ranks` does not divide, `UnsupportedModelError` for a
    family whose Transformers config has no sharding plan.
    """
    if not getattr(config, "base_model_tp_plan", None):
        raise UnsupportedModelError(
            f"tensor_parallel_size: Transformers has no sharding plan for {config.model_type}"
        )
    sizes = {name: getattr(config, name, None) for name in _DIVIDED}
    uneven = [f"{name} = {size}" for name, size in sizes.items() if size and size % num_ranks]
    if uneven:
        raise ConfigError(
            f"tensor_parallel_size: {num_ranks} does not divide {', '.join(uneven)}; choose a size "
            "that divides all of them"
        )


@dataclass(frozen=True)
class ModelSplit:
    """How `load_model` gives this rank its share. `mesh` has one dimension, over all ranks."""

    mesh: DeviceMesh

    def loader(self, model_class: type[Any]) -> type[Any]:
        """`model_class` with a `from_pretrained` that splits over `mesh`.

        Transformers would otherwise make a mesh of its own for whatever accelerator it finds, and
        ask for the package accelerate. Raises `UnsupportedModelError` where it has no such hook.
        """
        if not hasattr(model_class, _HOOK):
            raise UnsupportedModelError(
                "tensor_parallel_size: this Transformers cannot split a model by a "
                "DistributedConfig; install transformers>=5.24"
            )
        meshes = _OneMesh(self.mesh)

        def prepare(
            cls: type[Any], distributed_config: DistributedConfig, device_map: Any = None
        ) -> tuple[DistributedConfig, Any, _OneMesh]:
            return distributed_config, device_map, meshes

        return type(model_class.__name__, (model_class,), {_HOOK: classmethod(prepare)})

    def load_options(self, config: Any, dtype: torch.dtype) -> Mapping[str, Any]:
        """Keyword arguments for that `from_pretrained`."""
        size = self.mesh.size()
        options: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=size)}
        share = (getattr(config, "moe_intermediate_size", None) or 0) // size * dtype.itemsize
        if share % _GROUPED_ALIGNMENT:
            options["experts_implementation"] = "eager"
        return options

    def finish(self, model: Any, model_class: type[Any]) -> None:
        """Give the loaded model its own class back, and its layers plain local parameters.

        The embedding keeps its sharded one: its hook looks ids up through it.
        """
        model.__class__ = model_class
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if isinstance(parameter, DTensor) and not isinstance(module, nn.Embedding):
                    local = nn.Parameter(parameter.to_local().detach(), requires_grad=False)
                    module._parameters[name] = local


@dataclass(frozen=True)
class _OneMesh:
    """Where Transformers looks meshes up by dimension; tensor parallelism is the only one here."""

    mesh: DeviceMesh

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        return self.mesh


def make_mesh(device: torch.device, num_ranks: int) -> DeviceMesh:
    """The mesh of all ranks of the default process group, which must exist. Collective."""
    return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("tp",))
