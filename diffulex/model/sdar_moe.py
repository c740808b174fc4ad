"""SDAR with experts: a Qwen3-MoE decoder whose attention sees whole blocks. Logits are not shifted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.model.config_reader import ConfigReader
from diffulex.model.moe_decoder import MoeDecoderConfig, MoeDiffusionLM, holds_stacked_experts
from diffulex.model.sdar import SdarLM
from diffulex.moe.block import MoeShape
from diffulex.moe.router import RouterSpec

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.utils.checkpoint import CheckpointFacts


class SdarMoeLM(MoeDiffusionLM, SdarLM):
    """JetLM/SDAR-30B-A3B-{Chat,Sci} and their block-size variants.

    Attention is that of the dense family. The router takes a softmax over all experts, then the best of them;
    their weights are made to sum to 1 only with `norm_topk_prob`.
    """

    model_types = frozenset({"sdar_moe"})
    architectures = frozenset({"SDARMoeForCausalLM"})

    @classmethod
    def read_config(cls, facts: CheckpointFacts, tensor_names: Collection[str]) -> MoeDecoderConfig:
        """The shape that config.json states."""
        shared = super().read_config(facts, tensor_names)
        reader = ConfigReader(facts)
        router = RouterSpec(
            num_experts=reader.count("num_experts"),
            num_chosen=reader.count("num_experts_per_tok"),
            scoring="softmax",
            normalise=reader.flag("norm_topk_prob", False),
        )
        step, dense = reader.count("decoder_sparse_step", 1), reader.indices("mlp_only_layers")
        sparse = (i for i in range(shared.num_layers) if i not in dense and (i + 1) % step == 0)
        moe = MoeShape(
            router=router,
            expert_size=reader.count("moe_intermediate_size"),
            sparse_layers=frozenset(sparse),
            is_stacked=holds_stacked_experts(tensor_names),
        )
        for problem in router.problems():
            reader.check(False, problem)
        reader.finish()
        return MoeDecoderConfig(**vars(shared), moe=moe)
