"""accelerate with its FSDP2 plugin, blocks by class."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType

from .model import build, loss_of


class Contestant:
    def __init__(self, size, world):
        # accelerate 1.15 ignores the plugin on a CPU machine and trains with DDP, without a word.
        # This tells its state that it is on another kind, so that its FSDP2 code runs.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False,
            state_dict_type="SHARDED_STATE_DICT",
        )
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        assert self.accelerator.is_fsdp2
        model = build(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, batches, max_norm):
        self.accelerator.gradient_accumulation_steps = len(batches)
        total = 0.0
        for x, y in batches:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model(x), y)
                self.accelerator.backward(loss)
                total += loss.detach() / len(batches)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return float(total), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
