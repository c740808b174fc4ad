"""The decoding rules one request obeys, taken once from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diffulex.config import DecodingThresholds
from diffulex.settings.defaults import MODEL_DEFAULTS

if TYPE_CHECKING:
    from diffulex.config import Config


@dataclass(frozen=True, slots=True)
class DecodeRules:
    """Constants of the request state machine; see the settings of the same names.

    Attributes:
        eos_token_ids: ids that end an answer unless the request ignores them.
        shift_logits: the row of position i - 1 predicts position i.
        always_force: every open block fills at least one position a step, whatever its left neighbour holds.
    """

    block_size: int = 32
    buffer_size: int = 4
    max_model_len: int = 2048
    mask_token_id: int = 151666
    eos_token_ids: tuple[int, ...] = ()
    thresholds: DecodingThresholds = field(default_factory=DecodingThresholds)
    activate_in_prefill: bool = True
    overlap_store: bool = True
    early_eos_stop: bool = True
    skip_final_store: bool = True
    skip_dummy_blocks: bool = True
    auto_max_nfe: bool = False
    auto_max_nfe_warmup_steps: int = 8
    auto_max_nfe_tpf_floor: float = 1.0
    shift_logits: bool = False
    always_force: bool = False
    save_trace: bool = False
    seed: int = 0

    @classmethod
    def from_config(cls, config: Config) -> DecodeRules:
        """The rules that `config` and its model family ask for."""
        family = MODEL_DEFAULTS[config.model_name]
        return cls(
            block_size=config.block_size,
            buffer_size=config.buffer_size,
            max_model_len=config.max_model_len,
            mask_token_id=config.mask_token_id,
            eos_token_ids=config.eos_token_ids,
            thresholds=config.decoding_thresholds,
            activate_in_prefill=config.activate_in_prefill,
            overlap_store=config.overlap_store,
            early_eos_stop=config.early_eos_stop,
            skip_final_store=config.skip_final_store,
            skip_dummy_blocks=config.skip_dummy_blocks,
            auto_max_nfe=config.auto_max_nfe,
            auto_max_nfe_warmup_steps=config.auto_max_nfe_warmup_steps,
            auto_max_nfe_tpf_floor=config.auto_max_nfe_tpf_floor,
            shift_logits=family.shift_logits,
            always_force=family.force_rule == "always",
            save_trace=config.save_trace,
            seed=config.seed,
        )

    @property
    def window_slots(self) -> int:
        """Blocks that may be open or waiting to be stored at one time.

        A buffer of one block gets a second slot when storing may overlap with denoising: the next block then
        opens, only once the block before is complete, in the forward that stores that block.
        """
        return 2 if self.buffer_size == 1 and self.overlap_store else self.buffer_size

    @property
    def add_block_threshold(self) -> float:
        """Progress of the last open block from which the next one may open."""
        return 1.0 if self.buffer_size == 1 else self.thresholds.add_block_threshold
