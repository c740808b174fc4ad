"""Names of model families and the classes behind them, imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from diffulex.model.decoder import DiffusionLM
from diffulex.utils.checkpoint import CheckpointError
from diffulex.utils.registry import Registry

if TYPE_CHECKING:
    from diffulex.utils.checkpoint import CheckpointFacts


class _ModelRegistry(Registry[DiffusionLM]):
    """Model families by model name."""


AutoModel: Final = _ModelRegistry("model", DiffusionLM)
AutoModel.register_lazy("dream", "diffulex.model.dream:DreamLM")
AutoModel.register_lazy("diffucoder", "diffulex.model.dream:DreamLM")
AutoModel.register_lazy("dream_reasoner", "diffulex.model.dream_reasoner:DreamReasonerLM")
AutoModel.register_lazy("llada", "diffulex.model.llada:LladaLM")
AutoModel.register_lazy("fast_dllm_v2", "diffulex.model.fast_dllm_v2:FastDllmV2LM")
AutoModel.register_lazy("stable_diffcoder", "diffulex.model.stable_diffcoder:StableDiffCoderLM")
AutoModel.register_lazy("sdar", "diffulex.model.sdar:SdarLM")
AutoModel.register_lazy("sdar_moe", "diffulex.model.sdar_moe:SdarMoeLM")
# One network, told apart by how it is decoded.
for _name in ("llada2", "llada2_moe", "llada2_mini", "llada2dot1_mini", "llada2_mini_dmax"):
    AutoModel.register_lazy(_name, "diffulex.model.llada2:Llada2LM")
AutoModel.register_lazy("diffusion_gemma", "diffulex.model.diffusion_gemma:DiffusionGemmaLM")


def family_of(model_name: str, facts: CheckpointFacts) -> type[DiffusionLM]:
    """The class of `model_name`, once it is sure that the checkpoint is of that family.

    Raises:
        ValueError: no model has that name.
        CheckpointError: config.json says that the checkpoint is another family's.
    """
    family = AutoModel.get(model_name)
    states_nothing = facts.model_type is None and not facts.architectures
    if states_nothing or family.recognises(facts):
        return family
    known = " or ".join(repr(name) for name in names_of(facts))
    raise CheckpointError(
        f"{facts.path} is no {model_name} checkpoint: its config.json says model_type {facts.model_type!r} "
        f"and architectures {list(facts.architectures)}; set model_name to "
        f"{known or 'the family of the checkpoint, if it is one of ' + ', '.join(AutoModel.names())}"
    )


def names_of(facts: CheckpointFacts) -> tuple[str, ...]:
    """The model names whose family the checkpoint says it is of; more than one where they share a network."""
    return tuple(name for name in AutoModel.names() if AutoModel.get(name).recognises(facts))
