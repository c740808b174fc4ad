"""Checkpoint folders, configurations and drafts for tests of the settings; nothing here loads torch."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from diffulex.config import DEFAULTS, ENGINE_SETTINGS, Config
from diffulex.settings.draft import CLASS_DEFAULT, KEYWORD, Draft, Hardware

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE = 12
MASK_ID = 9
EOS_ID = 10
MAX_POSITION = 512

NO_HARDWARE = Hardware(has_cuda=False, device_count=0, has_vllm=False)
TWO_GPUS = Hardware(has_cuda=True, device_count=2, has_vllm=True)


def make_checkpoint(folder: Path, *, mask_token: str | None = "<|MASK|>", **config: Any) -> Path:
    """A folder that `read_checkpoint` accepts; keys of config.json given as None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    stated = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "vocab_size": VOCAB_SIZE + 4,
        "max_position_embeddings": MAX_POSITION,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mask_token_id": MASK_ID,
        "torch_dtype": "bfloat16",
        **config,
    }
    kept = {key: value for key, value in stated.items() if value is not None}
    words = {f"w{number}": number for number in range(VOCAB_SIZE)}
    words = {"<|MASK|>": MASK_ID, "<|end|>": EOS_ID} | {
        word: number for word, number in words.items() if number not in (MASK_ID, EOS_ID)
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    roles = {"eos_token": "<|end|>"} | ({} if mask_token is None else {"mask_token": mask_token})
    for name, content in {"config": kept, "tokenizer": tokenizer, "tokenizer_config": roles}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")
    return folder


def make_config(folder: Path, **keywords: Any) -> Config:
    """A configuration of the family that runs in this version."""
    return Config(**{"model": str(folder), "model_name": "sdar", **keywords})


def make_draft(hardware: Hardware = NO_HARDWARE, **given: Any) -> Draft:
    """A draft as `Config` makes it from keywords."""
    origins = {name: KEYWORD if name in given else CLASS_DEFAULT for name in ENGINE_SETTINGS}
    return Draft({**DEFAULTS, **given}, set(given), origins, DEFAULTS, lambda: hardware)
