"""The parameters that an Opacus optimizer trains, by their names in the model."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch.distributed.tensor import DTensor

from coalmine.argument_checks import short_repr

WRAPPERS = ("_module.", "_orig_mod.")  # GradSampleModule and torch.compile put these before a parameter's name


def named_layers(
    optimizer: DPOptimizer, model: "torch.nn.Module | Mapping[str, torch.Tensor]"
) -> list[tuple[str, int]]:
    """Name and size of each parameter that the optimizer trains, in the optimizer's order: `layers` for an `Audit`."""
    tensors = _named_tensors(model)
    names = {id(tensor): name for name, tensor in tensors.items()}
    places = {_place(tensor): name for name, tensor in tensors.items()}  # a state_dict has other objects, same memory
    layers = []
    for p in optimizer.params:
        name = names.get(id(p), places.get(_place(p)))
        if name is None:
            raise ValueError(
                f"the model must hold every parameter of the optimizer, but none of its tensors is the one of shape "
                f"{tuple(p.shape)}: pass the model that make_private returned"
            )
        layers.append((name, p.numel()))
    return layers


def trained_parameters(
    optimizer: DPOptimizer, model: "torch.nn.Module | Mapping[str, torch.Tensor]"
) -> "dict[str, torch.Tensor]":
    """The parameters that the optimizer trains, by their names: `parameters` for an `Audit.for_model`.

    Under DDP and FSDP2, an audit of your own needs these. Under FSDP2 each is this rank's shard.
    """
    names = plain_names(name for name, _ in named_layers(optimizer, model))
    return dict(zip(names, (local(p.detach()) for p in optimizer.params), strict=True))


def parameters_outside(optimizer: DPOptimizer, model: Any) -> list[str]:
    """Names of the parameters that require gradients and are not in the optimizer."""
    inside = {_place(p) for p in optimizer.params}
    return [name for name, p in _named_tensors(model).items() if p.requires_grad and _place(p) not in inside]


def join_names(names: Iterable[str], most: int = 5) -> str:
    """The first of the names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def plain_names(names: Iterable[str]) -> list[str]:
    """Names of parameters without the prefix that DDP puts before all of them."""
    listed = list(names)
    prefixed = all(name.startswith("module.") for name in listed)
    return [name.removeprefix("module.") for name in listed] if prefixed else listed


def local(tensor: Any) -> Any:
    """This rank's shard of a tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _named_tensors(model: Any) -> "dict[str, torch.Tensor]":
    """The model's parameters by their names, without the prefixes of GradSampleModule and torch.compile."""
    try:
        tensors = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else dict(model)
    except (TypeError, ValueError):
        tensors = {}
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise TypeError(f"model must be a torch module or map parameter names to tensors, got {short_repr(model)}")
    plain = {_plain_name(str(name)): tensor for name, tensor in tensors.items()}
    return plain if len(plain) == len(tensors) else tensors


def _plain_name(name: str) -> str:
    while prefix := next((prefix for prefix in WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def _place(tensor: Any) -> tuple[Any, ...]:
    shard = local(tensor)
    return shard.device, shard.data_ptr(), tuple(shard.shape)
