"""LLaDA2: grouped-query attention with partial rotation, sigmoid-routed experts, blocks seen whole.

LLaDA2.0, 2.1 and DMax are one network and differ in how they decode. Logits are not shifted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.model.config_reader import ConfigReader
from diffulex.model.decoder import DecoderConfig, DecoderNames
from diffulex.model.moe_decoder import MoeDecoderConfig, MoeDiffusionLM, holds_stacked_experts
from diffulex.moe.block import MoeShape
from diffulex.moe.router import RouterSpec

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.utils.checkpoint import CheckpointFacts


class Llada2LM(MoeDiffusionLM):
    """LLaDA2.0-{mini,flash}, their -CAP variants, LLaDA2.1-{mini,flash} and DMax-16B and its variants.

    Queries and keys are normalised per head before the rotation, whatever `use_qk_norm` says. The first
    layers are dense; the others add routed experts and one MLP that all tokens go through. A bias for each
    expert is stored with the router.
    """

    model_types = frozenset({"llada2_moe", "llada2_moe_veomni"})
    architectures = frozenset({"LLaDA2MoeModelLM"})
    names = DecoderNames(
        embedding="model.word_embeddings",
        qkv="attention.query_key_value",
        output="attention.dense",
        q_norm="attention.query_layernorm",
        k_norm="attention.key_layernorm",
    )

    @classmethod
    def read_config(cls, facts: CheckpointFacts, tensor_names: Collection[str]) -> MoeDecoderConfig:
        """The shape that config.json states.

        Sizes, groups and the rotary base must be stated: the defaults of the published configuration class
        are those of no checkpoint.
        """
        shared = super().read_config(facts, tensor_names)
        reader = ConfigReader(facts)
        reader.expect("score_function", "sigmoid")
        reader.expect("using_split_qkv_in_self_attention", False)
        moe = _read_moe(reader, shared, tensor_names)
        stated = {
            **vars(shared),
            "qk_norm": True,
            "qkv_bias": reader.flag("use_qkv_bias", False),
            "output_bias": reader.flag("use_bias", False),
            "rotary_dim": int(shared.head_dim * reader.number("partial_rotary_factor", 0.5)),
            "norm_rounds_before_weight": True,
        }
        width = stated["rotary_dim"]
        reader.check(
            width % 2 == 0 and 0 < width <= shared.head_dim,
            f"head_dim * partial_rotary_factor must be even and in (0, {shared.head_dim}], it is {width}",
        )
        reader.finish()
        return MoeDecoderConfig(**stated, moe=moe)


def _read_moe(reader: ConfigReader, shared: DecoderConfig, tensor_names: Collection[str]) -> MoeShape:
    """The expert layers. `norm_topk_prob` is not read: the original code normalises unless one is chosen."""
    num_chosen = reader.count("num_experts_per_tok")
    has_bias = any(name.endswith(".gate.expert_bias") for name in tensor_names)
    router = RouterSpec(
        num_experts=reader.count("num_experts"),
        num_chosen=num_chosen,
        scoring="sigmoid",
        normalise=num_chosen > 1,
        num_groups=reader.count("n_group"),
        num_kept_groups=reader.count("topk_group"),
        scaling=reader.number("routed_scaling_factor", 2.5),
        # A bias that is in the file is used, and one that config.json promises must be there.
        has_bias=has_bias or reader.flag("moe_router_enable_expert_bias", True),
        in_float32=True,
    )
    for problem in router.problems():
        reader.check(False, problem)
    expert_size = reader.count("moe_intermediate_size")
    shared_size = reader.count("moe_shared_expert_intermediate_size", expert_size)
    return MoeShape(
        router=router,
        expert_size=expert_size,
        shared_size=shared_size * reader.count_or_none("num_shared_experts", 0),
        sparse_layers=frozenset(range(reader.count_or_none("first_k_dense_replace", 0), shared.num_layers)),
        is_stacked=holds_stacked_experts(tensor_names),
    )
