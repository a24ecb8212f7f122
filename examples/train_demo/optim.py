"""Which optimiser trains the demo model?

Muon for weight matrices, AdamW for embeddings, head, router, norms and the indexer's head weights.
Both keep fp32 state. Knows parameters by name only.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

ADAM_NAMES = ("embed_tokens", "lm_head", "mlp.gate.weight", "weights_proj")
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices to `update` [N, rows, columns], by Newton-Schulz."""
    a, b, c = NEWTON_SCHULZ
    dtype = torch.bfloat16 if update.is_cuda else torch.float32
    x = update.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalised; matrices of one shape are stepped as one batch."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape[-2:]].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_shape(group, shape, parameters)

    def _step_shape(
        self, group: dict[str, float], shape: torch.Size, parameters: list[nn.Parameter]
    ) -> None:
        updates = []
        for parameter in parameters:
            state = self.state[parameter]
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            momentum.lerp_(parameter.grad, 1 - group["momentum"])
            nesterov = torch.lerp(parameter.grad, momentum, group["momentum"])
            updates.append(nesterov.reshape(-1, *shape))
        step = orthogonalise(torch.cat(updates)) * max(1.0, shape[0] / shape[1]) ** 0.5
        for parameter, update in zip(
            parameters, step.split([len(u) for u in updates]), strict=True
        ):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.view(parameter.shape), alpha=-group["lr"])


def make_optimisers(
    net: nn.Module, *, muon_lr: float, adam_lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon and AdamW over all parameters; each group remembers its peak as `initial_lr`."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in net.named_parameters():
        is_matrix = parameter.ndim > 1 and not any(part in name for part in ADAM_NAMES)
        (matrices if is_matrix else others).append(parameter)
    muon = Muon(matrices, muon_lr, weight_decay)
    fused = others[0].is_cuda
    adam = torch.optim.AdamW(others, adam_lr, (0.9, 0.95), weight_decay=0.0, fused=fused)
    for optimiser in (muon, adam):
        for group in optimiser.param_groups:
            group["initial_lr"] = group["lr"]
    return [muon, adam]
