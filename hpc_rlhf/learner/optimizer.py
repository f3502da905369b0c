"""Megatron's distributed Adam (ZeRO-1) with gradient clipping and a schedule by optimizer steps."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core import optimizer as mcore_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
)
from megatron.core.optimizer import (
    distrib_optimizer,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from torch.optim.adam import adam

from hpc_rlhf.config import OptimizerConfig
from hpc_rlhf.errors import UserError
from hpc_rlhf.learner.optimizer_shards import optimizer_shards


class FusedAdam(torch.optim.Optimizer):
    """torch's Adam(W) with the state layout of Apex's FusedAdam: one ``step`` per parameter group.

    Megatron's distributed optimizer reads and writes that layout. With plain ``torch.optim.AdamW``,
    its fallback without TransformerEngine and Apex, a checkpoint can be saved but not loaded again:
    ``state_dict()`` asserts on a fresh optimizer and ``step`` becomes one tensor shared by all
    parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            if not params:
                continue
            # One number a parameter, since adam() counts each of them up.
            steps = torch.full((len(params),), group["step"] - 1.0, device=params[0].device)
            adam(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                list(steps.unbind()),
                fused=True,  # without copies the size of the parameters
                amsgrad=False,
                has_complex=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )


def _provide_fused_adam() -> None:
    """Give Megatron our FusedAdam where neither TransformerEngine nor Apex brings theirs."""
    if mcore_optimizer.USING_PYTORCH_OPTIMIZER:
        mcore_optimizer.Adam = FusedAdam
        mcore_optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.Adam = FusedAdam
        distrib_optimizer.HAVE_APEX_OR_TE = True
        distrib_optimizer.USING_APEX_OPTIMIZER = True


class PolicyOptimizer:
    """Adam over the parameters of one model, sharded over its data-parallel ranks.

    Every method is collective over the learner. Master weights (copied from the model when this
    object is made) and moments are fp32 whatever the parameters are. Norms and biases are not
    decayed.
    """

    def __init__(
        self, model: DistributedDataParallel, config: OptimizerConfig, *, total_steps: int
    ) -> None:
        """Args:
        total_steps: optimizer steps of the whole run, where the LR schedule ends.

        Raises:
            UserError: ``min_lr`` is above ``lr``.
        """
        if config.min_lr > config.lr:
            raise UserError(
                f"learner.optimizer.min_lr={config.min_lr} is above learner.optimizer.lr="
                f"{config.lr}: the schedule ends at min_lr"
            )
        _provide_fused_adam()
        bf16 = model.config.params_dtype == torch.bfloat16
        megatron_config = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=True,
        )
        chained = get_megatron_optimizer(
            megatron_config,
            [model],
            config_overrides=get_standard_config_overrides(megatron_config),
            use_gloo_process_groups=False,
        )
        (self._optimizer,) = chained.chained_optimizers  # dense models have one
        # Moments exist from the start, so that a checkpoint of step 0 is a checkpoint like others.
        self._optimizer.init_state_fn(self._optimizer.optimizer, megatron_config)
        decay_steps = max(total_steps, config.warmup_steps + 1)
        self._scheduler = OptimizerParamScheduler(
            self._optimizer,
            # No step is wasted at a rate of 0: step k of w warm-up steps has lr * k / (w + 1).
            init_lr=config.lr / (config.warmup_steps + 1),
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=config.warmup_steps,
            lr_decay_steps=decay_steps,
            lr_decay_style=config.schedule.value,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=decay_steps,
            wd_incr_style="constant",
        )
        self._clip_grad = config.clip_grad

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return get_canonical_lr_for_logging(self._optimizer.param_groups) or 0.0

    @property
    def num_steps(self) -> int:
        """Steps taken."""
        return self._scheduler.num_steps

    def tensors(self) -> Iterator[torch.Tensor]:
        """This rank's master weights and moments."""
        for parameter, state in self._optimizer.optimizer.state.items():
            yield parameter
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def gradient_norm(self) -> float:
        """Global L2 norm of the reduced gradients, before clipping; the same on every rank."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def step(self, gradient_norm: float) -> None:
        """Clip, step, gather the parameters and advance the schedule.

        Args:
            gradient_norm: of :meth:`gradient_norm`, called just before.
        """
        parameters = self._optimizer.get_parameters()
        if self._clip_grad > 0.0 and parameters:
            clip_grad_by_total_norm_fp32(
                parameters, max_norm=self._clip_grad, total_norm=gradient_norm
            )
        self._optimizer.step_with_ready_grads()
        self._scheduler.step(1)

    def sharded_state_dict(
        self, model_state: dict[str, Any], *, is_loading: bool, metadata: dict[str, Any]
    ) -> dict[str, Any]:
        """State for dist_checkpointing: master weights, moments and the step count.

        Args:
            model_state: the model's own sharded state dict, of the very parameters (keep_vars).
        """
        if is_loading:
            adam = self._optimizer.sharded_state_dict(
                model_state, is_loading=True, metadata=metadata
            )
        else:
            adam = {
                **self._optimizer.state_dict(),
                "param_state": optimizer_shards(self._optimizer, model_state),
                "param_state_sharding_type": metadata["distrib_optim_sharding_type"],
            }
        return {"adam": adam, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`sharded_state_dict` described. The schedule is the configured one."""
        self._optimizer.load_state_dict(state["adam"])
        self._scheduler.num_steps = state["num_steps"]
        self._scheduler.step(0)
