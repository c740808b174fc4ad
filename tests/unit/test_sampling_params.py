from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from diffulex.sampling_params import SamplingParams
from diffulex.settings.spec import ConfigError, settings_of


def test_defaults_are_the_documented_ones() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "max_tokens": 256,
        "max_nfe": None,
        "max_repetition_run": None,
        "trim_repetition_run": False,
        "ignore_eos": False,
        "top_p": 1.0,
        "top_k": 0,
        "seed": None,
        "confidence": "prob",
        "stop": (),
        "stop_token_ids": (),
        "stop_after": None,
        "cache_salt": None,
    }


def test_temperature_and_max_tokens_may_be_positional() -> None:
    assert SamplingParams(0.0, 32) == SamplingParams(temperature=0.0, max_tokens=32)
    with pytest.raises(TypeError):
        SamplingParams(0.0, 32, 5)  # type: ignore[misc]


def test_stop_texts_and_ids_become_tuples_without_repeats() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3, 4, 3])  # type: ignore[arg-type]
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert hash(params) == hash(dataclasses.replace(params))


def test_whole_numbers_serve_as_temperature_and_share() -> None:
    params = SamplingParams(temperature=0, top_p=1)
    assert isinstance(params.temperature, float)
    assert isinstance(params.top_p, float)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be a finite number, got nan"),
        ({"temperature": "0"}, "temperature must be a finite number, got '0'"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": True}, "max_tokens must be a whole number, got True"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, got 1.5"),
        ({"max_nfe": 0}, "max_nfe must be at least 1, got 0"),
        ({"max_nfe": -3}, "max_nfe must be at least 1, got -3"),
        ({"max_repetition_run": 0}, "max_repetition_run must be at least 1, got 0"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, got 1.01"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0 and at most 9223372036854775807, got -1"),
        ({"seed": 2**63}, "seed must be at least 0 and at most 9223372036854775807, got 9223372036854775808"),
        (
            {"confidence": "margins"},
            "confidence must be one of prob, margin, neg_entropy, got 'margins'; did you",
        ),
        ({"stop": 5}, "stop must be a list of texts, got 5"),
        ({"stop": ["a", ""]}, "stop must hold texts of at least one character, got ''"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be at least 0, got -1"),
        ({"stop_token_ids": "5"}, "stop_token_ids must be a list of whole numbers, got '5'"),
        ({"stop_after": ""}, "stop_after must have at least one character, got ''"),
        ({"trim_repetition_run": True}, "trim_repetition_run=True has no effect without max_repetition_run"),
    ],
)
def test_a_value_that_cannot_be_used_raises_naming_the_field(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**given)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(sentence)


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(ValueError, match="2 settings cannot be used") as caught:
        SamplingParams(temperature=-1, max_nfe=0)
    assert "temperature must" in str(caught.value)
    assert "max_nfe must" in str(caught.value)


def test_every_field_is_a_setting_with_help() -> None:
    infos = settings_of(SamplingParams)
    assert set(infos) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert all(info.setting.help for info in infos.values())
