from __future__ import annotations

import dataclasses
import logging
import pickle
import re
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from diffulex import config as config_module
from diffulex.config import Config, ConfigError, DecodingThresholds
from diffulex.utils.device import DeviceFacts
from tests.support.configs import make_config

if TYPE_CHECKING:
    from pathlib import Path


def refused(folder: Path, **keywords: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        make_config(folder, **keywords)
    return caught.value.problems


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "device_facts", lambda: DeviceFacts(True, 2, True, ("A", "B")))
    monkeypatch.setattr(config_module, "has_vllm", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "device_facts", lambda: DeviceFacts(False, 0, False))
    monkeypatch.setattr(config_module, "has_vllm", lambda: False)


class TestRoundTrip:
    KEYWORDS: ClassVar[dict[str, Any]] = {
        "block_size": 8,
        "page_size": 16,
        "buffer_size": 2,
        "decoding_thresholds": {"accept_threshold": 0.7},
        "max_model_len": 10_000,
        "max_num_batched_tokens": 20_000,
        "profiler_config": {"activities": ["cpu"], "schedule": {"active": 1}},
        "device": "cpu",
    }

    def test_replacing_nothing_gives_an_equal_configuration(self, checkpoint: Path) -> None:
        for keywords in ({}, self.KEYWORDS):
            config = make_config(checkpoint, **keywords)
            copy = dataclasses.replace(config)
            assert copy == config
            assert copy.explicit == config.explicit
            assert copy.origins == config.origins

    def test_the_resolved_values_make_an_equal_configuration(self, checkpoint: Path) -> None:
        for keywords in ({}, self.KEYWORDS):
            config = make_config(checkpoint, **keywords)
            assert Config(**config.as_dict()) == config

    def test_a_replaced_value_counts_as_written_and_others_stay_as_they_were(self, checkpoint: Path) -> None:
        config = make_config(checkpoint, buffer_size=2)
        changed = dataclasses.replace(config, block_size=16)
        assert changed.block_size == 16
        assert changed != config
        assert changed.explicit == {"model", "model_name", "buffer_size", "block_size"}
        assert changed.origins["decoding_strategy"] == "model default (sdar)"

    def test_a_pickled_configuration_keeps_values_and_origins(self, checkpoint: Path) -> None:
        config = make_config(checkpoint, block_size=8)
        copy = pickle.loads(pickle.dumps(config))
        assert copy == config
        assert copy.explicit == config.explicit
        assert copy.checkpoint.path == checkpoint

    def test_a_configuration_cannot_be_changed(self, checkpoint: Path) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            make_config(checkpoint).block_size = 8  # type: ignore[misc]

    def test_values_found_by_the_engine_are_carried_over_and_are_not_the_users(
        self, checkpoint: Path
    ) -> None:
        started = make_config(checkpoint).resolved(num_pages=40)
        assert (started.num_pages, started.origins["num_pages"]) == (40, "measured at start")
        assert "num_pages" not in started.explicit
        copy = dataclasses.replace(started)
        assert copy == started
        assert "num_pages" not in copy.explicit
        assert dataclasses.replace(started, num_pages=7).explicit >= {"num_pages"}
        assert Config(**started.as_dict()) == started


class TestExplicitness:
    def test_a_written_default_counts_as_written(self, checkpoint: Path) -> None:
        config = make_config(checkpoint, block_size=32)
        assert "block_size" in config.explicit
        assert config.origins["block_size"] == "keyword argument"
        assert "page_size" not in config.explicit
        assert config.origins["page_size"] == "default"

    def test_the_model_may_be_the_first_positional_argument(self, checkpoint: Path) -> None:
        config = Config(str(checkpoint), model_name="sdar")
        assert config.explicit == {"model", "model_name"}
        assert config == make_config(checkpoint)

    def test_origins_given_by_a_source_are_kept(self, checkpoint: Path) -> None:
        values = {"model": str(checkpoint), "model_name": "sdar", "block_size": 8}
        origins = {
            "model": "flag --model-path",
            "model_name": "yaml a.yaml:3",
            "block_size": "--set engine.block_size=8",
        }
        config = Config.from_sources(values, origins)
        assert {name: config.origins[name] for name in origins} == origins
        assert config.explicit == set(origins)

    def test_a_faulty_value_from_a_source_is_reported_with_its_place(self, checkpoint: Path) -> None:
        values = {"model": str(checkpoint), "model_name": "sdar", "block_size": 5}
        with pytest.raises(ConfigError, match=r"block_size must be one of .* got 5 \[yaml a\.yaml:7\]"):
            Config.from_sources(values, {"block_size": "yaml a.yaml:7"})

    def test_unknown_names_of_a_source_are_refused_with_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match="unknown setting 'blok_size'; did you mean 'block_size'"):
            Config.from_sources({"blok_size": 8}, {})

    def test_every_setting_is_explained_with_value_origin_and_help(self, checkpoint: Path) -> None:
        rows = {row.name: row for row in make_config(checkpoint, accept_threshold=0.8).explain()}
        assert rows["accept_threshold"][1:3] == (0.8, "keyword argument")
        assert rows["multi_block_prefix_full"].origin == "forced by strategy multi_bd"
        assert rows["attn_impl"].value == "naive"
        assert rows["attn_impl"].origin.startswith("default triton_grouped lowered")
        assert rows["mask_token_id"].origin.startswith("checkpoint (")
        assert all(row.help for row in rows.values())
        assert set(rows) == set(config_module.ENGINE_SETTINGS) - {"decoding_thresholds"}


class TestKeywords:
    def test_unknown_keywords_are_ignored_with_one_warning_and_recorded(
        self, checkpoint: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = Config.from_keywords(
            model=str(checkpoint), model_name="sdar", accept_treshold=0.5, temperature=0.3, zzz=1
        )
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        about = [text for text in warnings if "accept_treshold" in text]
        assert about == [
            "ignored unknown keyword arguments: accept_treshold; did you mean 'accept_threshold'?, "
            "temperature (a field of SamplingParams), zzz"
        ]
        assert config.ignored_keywords == ("accept_treshold", "temperature", "zzz")
        assert config.accept_threshold == 0.9
        assert dataclasses.replace(config, buffer_size=1).ignored_keywords == config.ignored_keywords

    @pytest.mark.parametrize(
        ("old", "name", "value"),
        [
            ("diffusion_block_size", "block_size", 8),
            ("max_num_seqs", "max_num_reqs", 3),
            ("mask_token", "mask_token_id", 4),
        ],
    )
    def test_old_names_work_with_one_deprecation_line(
        self, checkpoint: Path, caplog: pytest.LogCaptureFixture, old: str, name: str, value: int
    ) -> None:
        config = Config.from_keywords(model=str(checkpoint), model_name="sdar", **{old: value})
        assert getattr(config, name) == value
        lines = [record.getMessage() for record in caplog.records if "deprecated" in record.getMessage()]
        assert lines == [f"{old} is deprecated; write {name}"]

    def test_an_old_name_that_contradicts_the_present_one_is_refused(self, checkpoint: Path) -> None:
        with pytest.raises(ConfigError, match=r"block_size \(16\) and diffusion_block_size \(8\) disagree"):
            Config.from_keywords(
                model=str(checkpoint), model_name="sdar", block_size=16, diffusion_block_size=8
            )

    def test_model_path_is_a_second_name_without_deprecation(
        self, checkpoint: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = Config.from_keywords(model_path=str(checkpoint), model_name="sdar")
        assert config.model == str(checkpoint)
        assert "deprecated" not in caplog.text

    @pytest.mark.parametrize("old", ["multi_block_diffusion", "block_diffusion", "fast_dllm"])
    def test_old_strategy_names_become_multi_bd_with_one_deprecation_line(
        self, checkpoint: Path, caplog: pytest.LogCaptureFixture, old: str
    ) -> None:
        config = make_config(checkpoint, decoding_strategy=old)
        assert config.decoding_strategy == "multi_bd"
        assert caplog.text.count("deprecated") == 1

    def test_a_path_object_is_a_path(self, checkpoint: Path) -> None:
        assert Config(model=checkpoint, model_name="sdar").model == str(checkpoint)  # type: ignore[arg-type]


class TestThresholds:
    def test_flat_names_fold_into_the_object(self, checkpoint: Path) -> None:
        config = make_config(checkpoint, accept_threshold=0.75)
        assert config.decoding_thresholds == DecodingThresholds(accept_threshold=0.75)

    def test_a_mapping_fills_missing_keys_with_defaults(self, checkpoint: Path) -> None:
        config = make_config(checkpoint, decoding_thresholds={"semi_complete_threshold": 0.5})
        assert config.decoding_thresholds == DecodingThresholds(semi_complete_threshold=0.5)
        assert config.semi_complete_threshold == 0.5

    def test_an_object_is_taken_whole(self, checkpoint: Path) -> None:
        thresholds = DecodingThresholds(add_block_threshold=0.3, accept_threshold=0.6)
        config = make_config(checkpoint, decoding_thresholds=thresholds)
        assert config.decoding_thresholds == thresholds
        assert config.add_block_threshold == 0.3

    @pytest.mark.parametrize(
        "thresholds", [{"accept_threshold": 0.6}, DecodingThresholds(accept_threshold=0.6)]
    )
    def test_a_flat_name_that_contradicts_the_object_is_refused(
        self, checkpoint: Path, thresholds: Any
    ) -> None:
        assert refused(checkpoint, decoding_thresholds=thresholds, accept_threshold=0.9) == (
            "accept_threshold (0.9) and decoding_thresholds.accept_threshold (0.6) disagree; "
            "keep accept_threshold",
        )
        config = make_config(checkpoint, decoding_thresholds=thresholds, accept_threshold=0.6)
        assert config.accept_threshold == 0.6

    def test_a_stability_threshold_works_with_the_naive_sampler(
        self, checkpoint: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = make_config(checkpoint, buffer_size=2, token_stability_threshold=0.5)
        assert config.decoding_thresholds.token_stability_threshold == 0.5
        assert "token_stability_threshold" not in caplog.text

    def test_none_means_defaults(self, checkpoint: Path) -> None:
        assert make_config(checkpoint, decoding_thresholds=None).decoding_thresholds == DecodingThresholds()

    def test_a_replaced_object_wins_over_values_carried_along(self, checkpoint: Path) -> None:
        config = make_config(checkpoint, accept_threshold=0.6)
        changed = dataclasses.replace(config, decoding_thresholds=DecodingThresholds(accept_threshold=0.8))
        assert changed.accept_threshold == 0.8
        again = dataclasses.replace(changed, accept_threshold=0.7)
        assert again.decoding_thresholds.accept_threshold == 0.7
        assert dataclasses.replace(again) == again

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            (
                {"accept_treshold": 0.5},
                "decoding_thresholds: unknown setting 'accept_treshold'; did you mean",
            ),
            ({"accept_threshold": 1.5}, "accept_threshold must be at least 0 and at most 1, got 1.5"),
            ({"accept_threshold": "high"}, "accept_threshold must be a finite number, got 'high'"),
            (0.5, "decoding_thresholds must be a mapping or DecodingThresholds, got 0.5"),
            ({"remask_threshold": 0.5}, "remask_threshold=0.5 has no effect without enable_remasking=True"),
        ],
    )
    def test_faulty_thresholds_are_refused(self, checkpoint: Path, given: Any, text: str) -> None:
        (problem,) = refused(checkpoint, decoding_thresholds=given)
        assert problem.startswith(text)


class TestWishes:
    LOWERED: ClassVar[dict[str, object]] = {
        "tensor_parallel_size": 1,
        "attn_impl": "naive",
        "moe_gemm_impl": "naive",
        "enable_vllm_layers": False,
        "enable_torch_compile": False,
        "enable_full_static_runner": False,
        "distributed_backend": "gloo",
    }

    @pytest.mark.usefixtures("no_gpu")
    def test_defaults_that_need_hardware_are_lowered_with_one_line(
        self, checkpoint: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, logger="diffulex")
        config = make_config(checkpoint, block_size=4)
        assert {name: getattr(config, name) for name in self.LOWERED} == self.LOWERED
        assert not config.explicit & set(self.LOWERED)
        (line,) = [record for record in caplog.records if "defaults lowered" in record.getMessage()]
        assert line.levelno == logging.INFO
        for name in self.LOWERED:
            assert f"{name} " in line.getMessage()
        assert (
            "needs a CUDA device and this machine has none: distributed_backend nccl -> gloo"
            in line.getMessage()
        )

    @pytest.mark.usefixtures("no_gpu")
    @pytest.mark.parametrize(
        ("name", "value", "missing"),
        [
            ("attn_impl", "triton_grouped", "needs a CUDA device and this machine has none"),
            ("attn_impl", "triton", "needs a CUDA device and this machine has none"),
            ("enable_vllm_layers", True, "needs the package vllm, which is not installed"),
            ("enable_torch_compile", True, "needs a CUDA device and this machine has none"),
            ("enable_full_static_runner", True, "needs a CUDA device and this machine has none"),
            ("distributed_backend", "nccl", "needs a CUDA device and this machine has none"),
            ("enable_prefill_cudagraph", True, "needs a CUDA device and this machine has none"),
        ],
    )
    def test_the_same_value_written_is_refused_and_says_what_is_missing(
        self, checkpoint: Path, name: str, value: object, missing: str
    ) -> None:
        (problem,) = refused(checkpoint, **{name: value})
        assert problem.startswith(f"{name}={value!r} {missing}")
        assert re.search(rf"; use {name}=\S+( or leave it unset)?$", problem)

    @pytest.mark.usefixtures("no_gpu")
    def test_the_plain_values_may_be_written(self, checkpoint: Path) -> None:
        config = make_config(checkpoint, **self.LOWERED, enable_vectorized_sampler=True)
        assert config.explicit >= set(self.LOWERED)
        assert dataclasses.replace(config, **{}) == config

    @pytest.mark.usefixtures("two_gpus")
    def test_a_machine_with_cuda_says_what_this_version_lacks(self, checkpoint: Path) -> None:
        (problem,) = refused(checkpoint, attn_impl="triton")
        assert (
            problem == "attn_impl='triton' is not available yet in this version; "
            "use attn_impl='naive' or leave it unset"
        )

    @pytest.mark.usefixtures("two_gpus")
    def test_device_and_dtype_follow_the_machine(self, checkpoint: Path) -> None:
        config = make_config(checkpoint)
        assert (config.device, config.dtype, config.distributed_backend) == ("cuda", "bfloat16", "nccl")
        assert config.tensor_parallel_size == 1
        on_cpu = make_config(checkpoint, device="cpu")
        assert (on_cpu.device, on_cpu.dtype, on_cpu.distributed_backend) == ("cpu", "float32", "gloo")
        assert on_cpu.origins["distributed_backend"].endswith("device is 'cpu'")

    @pytest.mark.usefixtures("no_gpu")
    def test_a_machine_without_cuda_runs_float32_on_the_cpu(self, checkpoint: Path) -> None:
        config = make_config(checkpoint)
        assert (config.device, config.dtype) == ("cpu", "float32")
        assert make_config(checkpoint, dtype="bfloat16").dtype == "bfloat16"
        assert refused(checkpoint, device="cuda") == (
            "device='cuda' needs a CUDA device and this machine has none; use 'cpu' or leave it unset",
        )

    def test_broken_settings_are_found_without_asking_the_machine(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def asked() -> DeviceFacts:
            raise AssertionError("the machine was asked")

        monkeypatch.setattr(config_module, "device_facts", asked)
        assert len(refused(checkpoint, block_size=5)) == 1
        assert make_config(checkpoint, device="cpu").device == "cpu"


class TestFamilies:
    def test_an_unset_strategy_is_the_familys_own(self, checkpoint: Path) -> None:
        assert make_config(checkpoint).decoding_strategy == "multi_bd"

    def test_a_family_and_strategy_of_later_versions_are_refused_in_one_sentence(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("diffulex.settings.availability.AVAILABLE_MODELS", ("sdar",))
        problems = refused(checkpoint, model_name="llada", decoding_strategy="d2f", tensor_parallel_size=1)
        assert problems == (
            "model_name='llada' with decoding_strategy='d2f' is not available yet in this version; "
            "use model_name='sdar' with decoding_strategy='multi_bd'",
        )

    def test_a_strategy_of_later_versions_is_refused_with_those_that_the_family_runs(
        self, checkpoint: Path
    ) -> None:
        assert refused(checkpoint, model_name="llada", decoding_strategy="d2f") == (
            "decoding_strategy='d2f' with model_name='llada' is not available yet in this version; "
            "write decoding_strategy='multi_bd'",
        )

    @pytest.mark.parametrize(
        ("given", "family"),
        [({}, "'dream' (the default)"), ({"model_name": "diffucoder"}, "'diffucoder'")],
    )
    def test_the_familys_own_strategy_is_refused_with_the_one_to_write(
        self, checkpoint: Path, given: dict[str, str], family: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            Config(model=str(checkpoint), **given)
        assert caught.value.problems == (
            f"decoding_strategy='d2f', the default of model_name={family}, is not available yet in this "
            "version; write decoding_strategy='multi_bd'",
        )

    @pytest.mark.parametrize(
        "model_name",
        ["dream", "diffucoder", "dream_reasoner", "llada", "fast_dllm_v2", "stable_diffcoder"],
    )
    def test_the_dense_families_run_multi_bd_when_it_is_written(
        self, checkpoint: Path, model_name: str
    ) -> None:
        config = make_config(checkpoint, model_name=model_name, decoding_strategy="multi_bd")
        assert (config.decoding_strategy, config.multi_block_prefix_full) == ("multi_bd", False)
        assert config.enable_prefix_caching

    @pytest.mark.parametrize("model_name", ["sdar_moe", "llada2", "llada2_moe", "llada2_mini"])
    @pytest.mark.parametrize("backend", ["standard", "naive"])
    def test_families_with_experts_run_with_both_dispatchers_of_one_process(
        self, checkpoint: Path, model_name: str, backend: str
    ) -> None:
        config = make_config(checkpoint, model_name=model_name, moe_dispatcher_backend=backend)
        assert (config.decoding_strategy, config.sampling_mode) == ("multi_bd", "naive")
        assert (config.moe_gemm_impl, config.moe_dispatcher_backend) == ("naive", backend)

    def test_a_dispatcher_between_processes_is_refused_in_one_sentence(self, checkpoint: Path) -> None:
        assert refused(checkpoint, model_name="sdar_moe", moe_dispatcher_backend="deepep") == (
            "moe_dispatcher_backend='deepep' is not available yet in this version; "
            "use moe_dispatcher_backend='standard' or moe_dispatcher_backend='naive'",
        )

    @pytest.mark.parametrize("model_name", ["llada2dot1_mini", "llada2_mini_dmax"])
    def test_families_that_edit_are_refused_by_the_sampling_mode_they_need(
        self, checkpoint: Path, model_name: str
    ) -> None:
        (problem,) = refused(checkpoint, model_name=model_name)
        assert problem.startswith(
            f"model_name='{model_name}' decodes with sampling_mode='edit', which is not available yet in "
            "this version; use model_name='dream' or "
        )

    def test_an_edit_sampler_is_refused_where_the_family_has_a_plain_one(self, checkpoint: Path) -> None:
        assert refused(checkpoint, model_name="llada2_mini", sampling_mode="edit") == (
            "sampling_mode='edit' is not available yet in this version; use sampling_mode='naive'",
        )

    def test_an_unknown_strategy_lists_the_known_ones(self, checkpoint: Path) -> None:
        (problem,) = refused(checkpoint, decoding_strategy="multi-bd")
        assert problem.startswith("decoding_strategy must be one of ")
        assert problem.endswith("got 'multi-bd'; did you mean 'multi_bd'?")
        for name in ("d2f", "dmax", "diffusion_gemma", "fast_dllm_v2"):
            assert name in problem

    def test_a_registered_strategy_of_a_program_runs(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("diffulex.settings.resolve.registered_strategies", lambda: ("my_strategy",))
        config = make_config(checkpoint, decoding_strategy="my_strategy", d2f_block_origin="grid")
        assert config.decoding_strategy == "my_strategy"
        assert config.multi_block_prefix_full is True
        assert Config(**config.as_dict()) == config

    def test_a_forced_value_overrides_a_written_one_with_a_warning(
        self, checkpoint: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = make_config(checkpoint, multi_block_prefix_full=True)
        assert config.multi_block_prefix_full is False
        assert (
            "multi_block_prefix_full=True is overridden: decoding_strategy='multi_bd' forces False"
            in caplog.text
        )


class TestProfilerConfig:
    def test_its_faults_are_faults_of_the_configuration(self, checkpoint: Path) -> None:
        problems = refused(checkpoint, profiler_config={"shedule": {}, "max_iterations": -1})
        assert problems == (
            "profiler_config: unknown setting 'shedule'; did you mean 'schedule'?",
            "profiler_config: max_iterations must be at least 0, got -1",
        )

    @pytest.mark.usefixtures("no_gpu")
    def test_cuda_cannot_be_recorded_on_the_cpu(self, checkpoint: Path) -> None:
        (problem,) = refused(checkpoint, profiler_config={"activities": ["cpu", "cuda"]})
        assert problem.startswith("profiler_config: activity 'cuda' needs device='cuda'")


def test_nothing_is_logged_about_settings_that_are_refused(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="diffulex")
    refused(checkpoint, block_size=5)
    assert not caplog.records


def test_a_configuration_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="model must be the folder of a checkpoint"):
        Config(model_name="sdar")
