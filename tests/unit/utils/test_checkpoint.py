from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffulex.utils.checkpoint import CheckpointError, iter_weights, read_checkpoint, weight_headers
from tests.support.checkpoints import write_random_sdar

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_sdar(tmp_path / "model", 40, mask_id=3, eos_ids=(5, 6))


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes the key."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def shard(folder: Path, num_shards: int = 3) -> dict[str, torch.Tensor]:
    """Replace model.safetensors by shards and an index; returns the weights."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        names = sorted(weights)[number::num_shards]
        save_file({name: weights[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weights


def refusal(folder: Path | str, *args: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder, *args)
    return str(caught.value)


class TestFacts:
    def test_sizes_ids_and_type_come_from_the_files(self, folder: Path) -> None:
        edit(folder / "config.json", bos_token_id=7, pad_token_id=8)
        facts = read_checkpoint(folder)
        assert (facts.vocab_size, facts.tokenizer_size, facts.max_position) == (40, 40, 4096)
        assert (facts.mask_token_id, facts.tokenizer_mask_id) == (3, 3)
        assert (facts.bos_token_id, facts.pad_token_id) == (7, 8)
        assert (facts.model_type, facts.architectures) == ("sdar", ("SDARForCausalLM",))
        assert (facts.torch_dtype, facts.trained_block_size) == ("float32", 4)
        assert facts.weight_files == (folder / "model.safetensors",)

    def test_reading_a_checkpoint_loads_no_torch(self, folder: Path) -> None:
        code = (
            "import sys; from diffulex.utils.checkpoint import read_checkpoint, weight_headers; "
            f"weight_headers(read_checkpoint({str(folder)!r})); "
            "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"

    def test_eos_ids_are_united_in_the_order_tokenizer_config_generation_config(self, folder: Path) -> None:
        edit(folder / "config.json", eos_token_id=[9, 6])
        edit(folder / "generation_config.json", eos_token_id=[6, 11, 5, 4000, True])
        assert read_checkpoint(folder).eos_token_ids == (5, 9, 6, 11)

    def test_a_single_eos_id_of_generation_config_counts(self, folder: Path) -> None:
        edit(folder / "generation_config.json", eos_token_id=12)
        assert read_checkpoint(folder).eos_token_ids == (5, 6, 12)

    def test_tokens_of_the_tokenizer_beat_ids_of_config_json_for_bos_and_pad(self, folder: Path) -> None:
        edit(folder / "config.json", bos_token_id=7, pad_token_id=8)
        edit(folder / "tokenizer_config.json", bos_token="w9", pad_token={"content": "w10"})
        facts = read_checkpoint(folder)
        assert (facts.bos_token_id, facts.pad_token_id) == (9, 10)

    def test_a_separate_tokenizer_folder_is_used(self, folder: Path, tmp_path: Path) -> None:
        other = write_random_sdar(tmp_path / "other", 30, mask_id=2, eos_ids=(8,))
        edit(folder / "config.json", mask_token_id=None, eos_token_id=9)
        facts = read_checkpoint(folder, other)
        assert (facts.tokenizer_path, facts.tokenizer_size) == (other, 30)
        assert (facts.mask_token_id, facts.eos_token_ids) == (2, (8, 9))

    def test_added_tokens_raise_the_tokenizer_size(self, folder: Path) -> None:
        edit(folder / "config.json", vocab_size=60)
        edit(folder / "added_tokens.json", extra=50)
        assert read_checkpoint(folder).tokenizer_size == 51

    @pytest.mark.parametrize("key", ["max_position_embeddings", "max_sequence_length"])
    def test_the_longest_position_has_two_spellings(self, folder: Path, key: str) -> None:
        edit(folder / "config.json", **{"max_position_embeddings": None, key: 77})
        assert read_checkpoint(folder).max_position == 77

    def test_text_config_is_read_where_the_top_level_says_nothing(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        text = {
            "vocab_size": config.pop("vocab_size"),
            "dtype": "torch.bfloat16",
            "max_position_embeddings": 9,
        }
        config.pop("torch_dtype"), config.pop("max_position_embeddings")
        (folder / "config.json").write_text(json.dumps({**config, "text_config": text}))
        facts = read_checkpoint(folder)
        assert (facts.vocab_size, facts.torch_dtype, facts.max_position) == (40, "bfloat16", 9)


class TestVocabularyFiles:
    """Vocabularies without tokenizer.json are read as well."""

    @pytest.mark.parametrize(
        ("file", "text"),
        [
            ("vocab.json", json.dumps({f"w{i}": i for i in range(20)})),
            ("vocab.txt", "\n".join(f"w{i}" for i in range(20))),
        ],
    )
    def test_plain_vocabularies_give_size_and_ids(self, folder: Path, file: str, text: str) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / file).write_text(text)
        edit(folder / "config.json", mask_token_id=None)
        edit(folder / "tokenizer_config.json", mask_token="w4", eos_token="w19")
        facts = read_checkpoint(folder)
        assert (facts.tokenizer_size, facts.mask_token_id, facts.eos_token_ids[0]) == (20, 4, 19)

    def test_a_unigram_vocabulary_counts_by_index(self, folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"] = {"type": "Unigram", "vocab": [[f"w{i}", -1.0] for i in range(33)]}
        content["added_tokens"] = []
        (folder / "tokenizer.json").write_text(json.dumps(content))
        edit(folder / "tokenizer_config.json", eos_token="w32")
        facts = read_checkpoint(folder)
        assert (facts.tokenizer_size, facts.eos_token_ids[0]) == (33, 32)

    def test_a_sentencepiece_model_alone_counts_as_the_whole_vocabulary(self, folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(b"")
        assert read_checkpoint(folder).tokenizer_size == 40


class TestMaskId:
    def test_config_json_comes_first(self, folder: Path) -> None:
        edit(folder / "config.json", mask_token_id=9)
        facts = read_checkpoint(folder)
        assert (facts.mask_token_id, facts.mask_source) == (9, "config.json: mask_token_id")
        assert facts.tokenizer_mask_id == 3

    def test_the_tokenizer_is_asked_when_config_json_has_none(self, folder: Path) -> None:
        edit(folder / "config.json", mask_token_id=None)
        facts = read_checkpoint(folder)
        assert (facts.mask_token_id, facts.mask_source) == (3, "tokenizer_config.json: mask_token")

    def test_two_spellings_of_the_mask_token_lead_to_one_id(self, folder: Path) -> None:
        edit(folder / "config.json", mask_token_id=None)
        edit(folder / "special_tokens_map.json", mask_token={"content": "<MASK>"})
        edit(folder / "added_tokens.json", **{"<MASK>": 3})
        facts = read_checkpoint(folder)
        assert (facts.mask_token_id, facts.mask_source) == (3, "special_tokens_map.json: mask_token")

    def test_added_tokens_decoder_knows_the_id_of_a_token(self, folder: Path) -> None:
        edit(folder / "config.json", mask_token_id=None)
        decoder = {"38": {"content": "[HOLE]"}}
        edit(folder / "tokenizer_config.json", mask_token="[HOLE]", added_tokens_decoder=decoder)
        assert read_checkpoint(folder).mask_token_id == 38

    def test_an_id_outside_the_vocabulary_is_passed_over(self, folder: Path) -> None:
        edit(folder / "config.json", mask_token_id=40)
        facts = read_checkpoint(folder)
        assert facts.mask_token_id == 3
        assert facts.places_tried[0] == "config.json: mask_token_id (40 is outside the vocabulary of 40)"

    @pytest.mark.parametrize("no_id", [True, "3", 3.0, [3]])
    def test_a_value_that_is_no_whole_number_is_passed_over(self, folder: Path, no_id: object) -> None:
        edit(folder / "config.json", mask_token_id=no_id)
        assert read_checkpoint(folder).mask_source == "tokenizer_config.json: mask_token"

    def test_nothing_found_names_every_place(self, folder: Path) -> None:
        edit(folder / "config.json", mask_token_id=None)
        edit(folder / "tokenizer_config.json", mask_token="<gone>")
        facts = read_checkpoint(folder)
        assert facts.mask_token_id is None
        assert facts.places_tried == (
            "config.json: mask_token_id (absent)",
            "special_tokens_map.json: mask_token (absent)",
            "tokenizer_config.json: mask_token ('<gone>' is not in the tokenizer's vocabulary)",
            "fallback of model_type sdar (151669 is outside the vocabulary of 40)",
        )

    def test_sdar_falls_back_to_its_published_id_and_block_when_the_vocabulary_holds_it(
        self, folder: Path
    ) -> None:
        edit(folder / "config.json", mask_token_id=None, block_size=None, vocab_size=151936)
        edit(folder / "tokenizer_config.json", mask_token=None)
        facts = read_checkpoint(folder)
        assert (facts.mask_token_id, facts.trained_block_size) == (151669, 4)
        assert facts.mask_source == "fallback of model_type sdar"

    def test_other_families_have_no_fallback(self, folder: Path) -> None:
        edit(
            folder / "config.json", mask_token_id=None, block_size=None, vocab_size=151936, model_type="llada"
        )
        edit(folder / "tokenizer_config.json", mask_token=None)
        facts = read_checkpoint(folder)
        assert (facts.mask_token_id, facts.trained_block_size) == (None, None)


class TestRefusals:
    def test_a_hub_id_is_recognised(self) -> None:
        message = refusal("JetLM/SDAR-1.7B-Chat")
        assert "hub id" in message
        assert "'JetLM/SDAR-1.7B-Chat'" in message

    @pytest.mark.parametrize("path", ["/no/such/folder", "./no/folder", "nowhere", "~/no-such-folder-here"])
    def test_a_missing_folder_is_no_hub_id(self, path: str) -> None:
        message = refusal(path)
        assert "does not exist" in message
        assert path in message

    def test_a_file_is_no_folder(self, folder: Path) -> None:
        assert "is a file" in refusal(folder / "config.json")

    def test_the_tokenizer_option_is_named(self, folder: Path) -> None:
        assert refusal(folder, "/no/tokenizer").startswith("tokenizer_path must be an existing folder")

    def test_no_config(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        assert "no config.json" in refusal(folder)

    def test_no_tokenizer(self, folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        message = refusal(folder)
        assert "holds no tokenizer" in message
        assert "tokenizer_path" in message

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        assert "holds no weights" in refusal(folder)

    def test_pickled_weights_are_not_read(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        assert "pickled weights" in refusal(folder)

    @pytest.mark.parametrize(("text", "part"), [("{", "line 1"), ("[1]", "list"), (b"\xff\xfe{}", "UTF-8")])
    def test_a_config_that_is_no_json_object(self, folder: Path, text: str | bytes, part: str) -> None:
        (folder / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
        message = refusal(folder)
        assert part in message
        assert "config.json" in message

    @pytest.mark.parametrize("value", [0, -1, "40", True, 1.5])
    def test_an_impossible_vocabulary_size(self, folder: Path, value: object) -> None:
        edit(folder / "config.json", vocab_size=value)
        assert refusal(folder).startswith(f"vocab_size in {folder / 'config.json'} must be a positive")

    def test_no_vocabulary_size(self, folder: Path) -> None:
        edit(folder / "config.json", vocab_size=None)
        assert "states no vocab_size" in refusal(folder)


class TestWeights:
    def test_single_file_tensors_come_with_their_names(self, folder: Path) -> None:
        expected = load_file(folder / "model.safetensors")
        found = dict(iter_weights(read_checkpoint(folder)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    def test_shards_together_hold_the_same_tensors(self, folder: Path) -> None:
        expected = shard(folder)
        facts = read_checkpoint(folder)
        assert [file.name for file in facts.weight_files] == [
            f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
        ]
        found = dict(iter_weights(facts))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    def test_shards_without_an_index_are_found(self, folder: Path) -> None:
        expected = shard(folder, 2)
        (folder / "model.safetensors.index.json").unlink()
        assert weight_headers(read_checkpoint(folder)).keys() == expected.keys()

    def test_headers_tell_shape_type_and_size(self, folder: Path) -> None:
        header = weight_headers(read_checkpoint(folder))["model.layers.0.self_attn.k_proj.weight"]
        assert (header.shape, header.dtype, header.num_bytes) == ((8, 16), "F32", 8 * 16 * 4)

    def test_missing_shards_are_named_all_at_once(self, folder: Path) -> None:
        shard(folder)
        (folder / "model-00001-of-00003.safetensors").unlink()
        (folder / "model-00003-of-00003.safetensors").unlink()
        message = refusal(folder)
        assert "2 of the 3 shards" in message
        assert "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in message

    @pytest.mark.parametrize("num_bytes", [0, 5, 200, -4])
    def test_a_truncated_shard_is_named(self, folder: Path, num_bytes: int) -> None:
        shard(folder)
        file = folder / "model-00002-of-00003.safetensors"
        file.write_bytes(file.read_bytes()[:num_bytes])
        facts = read_checkpoint(folder)
        with pytest.raises(
            CheckpointError, match=r"model-00002-of-00003\.safetensors is truncated or damaged"
        ):
            weight_headers(facts)
        with pytest.raises(
            CheckpointError, match=r"model-00002-of-00003\.safetensors is truncated or damaged"
        ):
            list(iter_weights(facts))

    def test_a_file_of_another_format_is_named(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(
            b"version https://git-lfs.github.com/spec/v1\nsize 12\n" * 9
        )
        with pytest.raises(CheckpointError, match="truncated or damaged"):
            weight_headers(read_checkpoint(folder))

    @pytest.mark.parametrize(
        "header",
        [b"[]", b'{"a": {}}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 0]}}', b"nonsense"],
    )
    def test_a_header_that_describes_no_tensors_is_named(self, folder: Path, header: bytes) -> None:
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
            weight_headers(read_checkpoint(folder))

    def test_tensors_that_only_the_index_knows_are_named(self, folder: Path) -> None:
        shard(folder)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"]["model.ghost"] = "model-00001-of-00003.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"model\.ghost \(model-00001-of-00003\.safetensors\)"):
            weight_headers(read_checkpoint(folder))

    def test_a_tensor_in_two_shards_is_named(self, folder: Path) -> None:
        shard(folder, 2)
        file = folder / "model-00002-of-00002.safetensors"
        both = load_file(folder / "model-00001-of-00002.safetensors")
        save_file({**load_file(file), "lm_head.weight": both["lm_head.weight"]}, file)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is in both"):
            weight_headers(read_checkpoint(folder))

    @pytest.mark.parametrize("weight_map", [None, {}, []])
    def test_an_index_without_a_usable_map_is_refused(self, folder: Path, weight_map: object) -> None:
        shard(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert "model.safetensors.index.json" in refusal(folder)

    def test_an_index_does_not_lead_out_of_its_folder(self, folder: Path) -> None:
        weights = shard(folder)
        save_file(weights, folder.parent / "outside.safetensors")
        weight_map = dict.fromkeys(weights, "../outside.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert "names files outside its folder: ../outside.safetensors" in refusal(folder)
