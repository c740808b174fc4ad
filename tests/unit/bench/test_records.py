import hashlib
import json

import pytest

from diffulex.utils.output import BlockTrace, StepRecord
from diffulex_bench.errors import BenchError
from diffulex_bench.records import compact_trace, read_records, sample_seed, sha256_of
from tests.support.bench import make_record


def test_record_survives_its_file(tmp_path):
    record = make_record(doc_id=3, output='line one\u2028line two\n"é"', thinking="hm")
    path = tmp_path / "samples.jsonl"
    path.write_text(record.as_json() + "\n", encoding="utf-8")
    assert read_records(path) == [record]


def test_line_cut_off_by_a_crash_is_left_out_and_damage_elsewhere_is_an_error(tmp_path):
    path = tmp_path / "samples.jsonl"
    whole = make_record().as_json()
    path.write_text(f"{whole}\n{whole[:50]}", encoding="utf-8")
    assert len(read_records(path)) == 1
    path.write_text(f"{whole[:50]}\n{whole}\n", encoding="utf-8")
    with pytest.raises(BenchError, match="line 1"):
        read_records(path)


def test_seed_of_a_sample_depends_on_all_of_its_four_parts_and_nothing_else():
    base = sample_seed(0, "t", 1, 0)
    assert base == sample_seed(0, "t", 1, 0)
    others = {
        sample_seed(1, "t", 1, 0),
        sample_seed(0, "u", 1, 0),
        sample_seed(0, "t", 2, 0),
        sample_seed(0, "t", 1, 1),
    }
    assert len(others | {base}) == 5
    assert all(0 <= seed < 2**31 for seed in others)


def test_prompt_hash_is_sha256_of_the_exact_text():
    assert sha256_of("q\n") == hashlib.sha256(b"q\n").hexdigest()
    assert sha256_of("q\n") != sha256_of("q")


def test_trace_is_short_plain_data():
    step = StepRecord(
        4,
        "denoise",
        0.0123456789,
        16,
        32,
        ((17, 5, 0.98765),),
        16,
        (1, 2),
        (BlockTrace(1, "ACTIVE", 3, 0.5),),
    )
    assert json.loads(json.dumps(compact_trace([step]))) == [
        [4, "denoise", 0.012346, 16, 32, [[17, 5, 0.9877]]]
    ]
