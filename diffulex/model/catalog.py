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
AutoModel.register_lazy("sdar", "diffulex.model.sdar:SdarLM")
AutoModel.register_lazy("diffusion_gemma", "diffulex.model.diffusion_gemma:DiffusionGemmaLM")


def family_of(model_name: str, facts: CheckpointFacts) -> type[DiffusionLM]:
    """The class of `model_name`, once it is sure that the checkpoint is of that family.

    Raises:
        ValueError: no model has that name.
        CheckpointError: config.json says that the checkpoint is another family's.
    """
    family = AutoModel.get(model_name)
    states_nothing = facts.model_type is None and not facts.architectures
    matches = facts.model_type in family.model_types or family.architectures.intersection(facts.architectures)
    if states_nothing or matches:
        return family
    raise CheckpointError(
        f"{facts.path} is no {model_name} checkpoint: its config.json says model_type {facts.model_type!r} "
        f"and architectures {list(facts.architectures)}, {model_name} reads model_type "
        f"{' or '.join(sorted(family.model_types))}; set model_name to the checkpoint's family"
    )
