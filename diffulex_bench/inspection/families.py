"""Which model names of the settings table can read a checkpoint, told from config.json and tensor names.

A table, so that families are recognised whose networks are not built; the catalog's classes, which decide
when weights load, agree with it by test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = ["FAMILIES", "Family", "Recognition", "recognise"]


@dataclass(frozen=True, slots=True)
class Family:
    """Checkpoints of one layout, and the model names that read them.

    A checkpoint's tensor names hold every text of `holds` and none of `lacks`. `hints` are pieces of a
    folder's name that tell names apart where the files cannot.
    """

    names: tuple[str, ...]
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    holds: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    hints: tuple[tuple[str, str], ...] = ()

    def fits(self, tensor_names: Collection[str]) -> bool:
        """True when the tensor names are those of this layout."""

        def occurs(piece: str) -> bool:
            return any(piece in name for name in tensor_names)

        return all(map(occurs, self.holds)) and not any(map(occurs, self.lacks))


_QK_NORM, _QKV_BIAS, _EXPERTS = ".self_attn.q_norm.", ".self_attn.q_proj.bias", ".mlp.experts."
_GEMMA = ".self_conditioning."
_FUSED = ".attention.query_key_value."

FAMILIES: Final = (
    Family(
        ("dream", "diffucoder"),
        ("Dream",),
        ("DreamModel",),
        holds=(_QKV_BIAS,),
        lacks=(_QK_NORM, _EXPERTS),
        hints=(("diffucoder", "diffucoder"),),
    ),
    Family(
        ("dream_reasoner",), ("Dream",), ("DreamForCausalLM",), holds=(_QK_NORM,), lacks=(_EXPERTS, _GEMMA)
    ),
    Family(("sdar",), ("sdar",), ("SDARForCausalLM",), holds=(_QK_NORM,), lacks=(_EXPERTS, _GEMMA)),
    Family(
        ("sdar_moe",), ("sdar_moe",), ("SDARMoeForCausalLM",), holds=(_QK_NORM, _EXPERTS), lacks=(_GEMMA,)
    ),
    # The checkpoints call themselves "llama", as those of many models without diffusion do.
    Family(
        ("stable_diffcoder",),
        (),
        ("StableDiffcoderForCausalLM",),
        holds=(".self_attn.q_proj.weight",),
        lacks=(_QK_NORM, _QKV_BIAS, _EXPERTS),
    ),
    Family(
        ("fast_dllm_v2",),
        ("Fast_dLLM_Qwen",),
        ("Fast_dLLM_QwenForCausalLM",),
        holds=(_QKV_BIAS,),
        lacks=(_QK_NORM, _EXPERTS),
    ),
    Family(("llada",), ("llada",), ("LLaDAModelLM",), holds=("model.transformer.blocks.",)),
    Family(
        ("llada2", "llada2_moe", "llada2_mini", "llada2dot1_mini", "llada2_mini_dmax"),
        ("llada2_moe", "llada2_moe_veomni"),
        ("LLaDA2MoeModelLM",),
        holds=(_FUSED,),
        hints=(
            ("dmax", "llada2_mini_dmax"),
            ("llada2.1", "llada2dot1_mini"),
            ("llada2dot1", "llada2dot1_mini"),
            ("mini", "llada2_mini"),
        ),
    ),
    Family(
        ("diffusion_gemma",),
        ("diffusion_gemma",),
        ("DiffusionGemmaForBlockDiffusion",),
        holds=(_GEMMA, ".layer_scalar"),
    ),
)


@dataclass(frozen=True, slots=True)
class Recognition:
    """Model names that can read a checkpoint, the likeliest first; none when it is of no known family.

    `told_by` says what named the family, `chosen_by` what put the first of several names first, and `doubt`
    is a sentence where config.json and the tensor names disagree.
    """

    names: tuple[str, ...]
    told_by: str
    chosen_by: str | None = None
    doubt: str | None = None


def recognise(config: Mapping[str, Any], tensor_names: Collection[str], folder_name: str) -> Recognition:
    """The model names whose family the checkpoint is of.

    config.json decides; tensor names decide where it names nothing, and between families of one `model_type`.
    `tensor_names` may be empty, when no weight file can be read.
    """
    stated, told_by = _stated(config)
    if not stated:
        if told_by:  # it names something, but nothing that is known
            return Recognition((), told_by)
        stated = [family for family in FAMILIES if tensor_names and family.fits(tensor_names)]
        told_by = "tensor names; config.json names no family"
    if tensor_names:
        fitting = [family for family in stated if family.fits(tensor_names)]
    else:  # Dream and DreamReasoner share a model_type; only the latter states a block
        has_block = config.get("block_size") is not None
        fitting = [one for one in stated if (_QK_NORM in one.holds) == has_block or len(stated) == 1]
    doubt = None
    if not fitting and stated:
        alike = _names(family for family in FAMILIES if family.fits(tensor_names))
        doubt = (
            f"config.json says {told_by} but the tensor names are not those of {_names(stated)}"
            f"{f', they look like those of {alike}' if alike else ''}; check that the files belong together"
        )
        fitting = stated
    names = [name for family in fitting for name in family.names]
    hinted = _hinted(fitting, folder_name)
    if hinted is not None and len(names) > 1:
        names.sort(key=lambda name: name != hinted)
        return Recognition(tuple(names), told_by, "the folder's name", doubt)
    return Recognition(tuple(names), told_by, None, doubt)


def _stated(config: Mapping[str, Any]) -> tuple[list[Family], str]:
    """Families that config.json names, and what it says in words; empty words when it names nothing."""
    architectures = _texts(config.get("architectures"))
    code = config.get("auto_map")
    classes = [
        name.rpartition(".")[2] for name in _texts(list(code.values()) if isinstance(code, dict) else None)
    ]
    model_type = config.get("model_type")
    by_class = [
        family for family in FAMILIES if not set(family.architectures).isdisjoint([*architectures, *classes])
    ]
    by_type = [family for family in FAMILIES if model_type in family.model_types]
    words = [f"architectures {', '.join(architectures)}"] if architectures else []
    words += [f"model_type {model_type}"] if isinstance(model_type, str) else []
    return by_class or by_type, ", ".join(words)


def _names(families: Iterable[Family]) -> str:
    return " or ".join(name for family in families for name in family.names)


def _hinted(families: Sequence[Family], folder_name: str) -> str | None:
    lowered = folder_name.lower()
    return next((name for one in families for piece, name in one.hints if piece in lowered), None)


def _texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
