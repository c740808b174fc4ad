import logging

import pytest
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model

from diffulex.settings.spec import ConfigError
from diffulex_bench import lm_eval_model
from diffulex_bench.config import BenchConfig
from diffulex_bench.errors import BenchError
from diffulex_bench.eval_settings import EvalSettings
from diffulex_bench.lm_eval_model import DiffulexLM
from diffulex_bench.records import sample_seed
from diffulex_bench.scoring import grade_number
from tests.support.bench import FakeConfig, FakeEngine, make_instance
from tests.support.checkpoints import write_stub


def make_lm(
    answer=lambda text: f"#### {len(text)}", *, engine=None, graders=None, listeners=(), **evaluation
):
    bench = BenchConfig({"model": "/m"}, {}, EvalSettings(**evaluation), dict.fromkeys(evaluation, "flag"))
    return DiffulexLM(engine=engine or FakeEngine(answer), bench=bench, graders=graders, listeners=listeners)


class Hook:
    def __init__(self):
        self.calls = []

    def add_partial(self, method, args, text):
        self.calls.append((method, args, text))


def test_class_is_the_registered_lm():
    assert issubclass(DiffulexLM, LM)
    assert get_model("diffulex") is DiffulexLM
    lm = make_lm()
    assert (lm.rank, lm.world_size) == (0, 1)


def test_answers_come_in_request_order_though_they_finish_in_another():
    lm = make_lm(lambda text: text.upper())
    requests = [make_instance(text, doc_id=i) for i, text in enumerate(["a", "bb", "ccc"])]
    assert lm.generate_until(requests) == ["A", "BB", "CCC"]
    assert [record.doc_id for record in lm.records] == [2, 1, 0]


def test_each_request_has_its_own_arguments():
    lm = make_lm()
    lm.generate_until(
        [
            make_instance("a", {"until": "X", "max_gen_toks": 3}),
            make_instance("b", {"until": [], "temperature": 1.5}),
        ]
    )
    by_prompt = dict(lm.engine.seen)
    assert (by_prompt["a"].stop, by_prompt["a"].max_tokens, by_prompt["a"].temperature) == (("X",), 3, 0.0)
    assert (by_prompt["b"].stop, by_prompt["b"].max_tokens, by_prompt["b"].temperature) == ((), 256, 1.5)


def test_arguments_reach_the_cache_unchanged_and_once_a_request():
    lm = make_lm()
    lm.cache_hook = Hook()
    request = make_instance("a", {"until": ["X"], "max_gen_toks": 3})
    lm.generate_until([request])
    assert lm.cache_hook.calls == [("generate_until", ("a", {"until": ["X"], "max_gen_toks": 3}), "#### 1")]


def test_repeats_of_a_document_have_seeds_and_numbers_of_their_own():
    lm = make_lm(eval_seed=7)
    request = make_instance("a", doc_id=4)
    lm.generate_until([request, request, make_instance("b", doc_id=5)])
    found = {(record.doc_id, record.repeat): record.seed for record in lm.records}
    assert found == {
        (4, 0): sample_seed(7, "toy", 4, 0),
        (4, 1): sample_seed(7, "toy", 4, 1),
        (5, 0): sample_seed(7, "toy", 5, 0),
    }


def test_seed_and_arguments_do_not_depend_on_what_else_is_in_the_call():
    requests = [make_instance(text, doc_id=i) for i, text in enumerate(["a", "bb", "ccc"])]
    together, alone = make_lm(), make_lm()
    together.generate_until(requests)
    for request in requests:
        alone.generate_until([request])
    assert dict(together.engine.seen) == dict(alone.engine.seen)


def test_tasks_of_one_call_run_one_after_the_other():
    class Listener:
        def __init__(self):
            self.started = []

        def on_start(self, task, num):
            self.started.append((task, num))

        def on_sample(self, record, trace):
            assert record.task == self.started[-1][0]

        def on_step(self, report):
            pass

    listener = Listener()
    lm = make_lm(listeners=[listener])
    requests = [
        make_instance("a", task="one"),
        make_instance("b", task="two"),
        make_instance("c", task="one", doc_id=1),
    ]
    assert lm.generate_until(requests) == ["#### 1"] * 3
    assert listener.started == [("one", 2), ("two", 1)]


def test_record_holds_grade_costs_and_exact_prompt():
    lm = make_lm(lambda _: "so\n#### $1,234.00", graders={"toy": grade_number})
    lm.generate_until([make_instance("q\n", doc={"question": "q", "answer": "#### 1234"})])
    record = lm.records[0]
    assert (record.prompt, record.output, record.target) == ("q\n", "so\n#### $1,234.00", "1234")
    assert (record.extracted, record.extraction_method) == ("$1,234.00", "hash_marker")
    assert record.scores == {"strict_match": 1.0, "flexible_match": 1.0}
    assert record.nfe["total"] == 5
    assert record.tpf == record.tokens_output / 5
    assert 0 <= record.arrival_time <= record.finish_time


def test_thoughts_that_the_prompt_opened_are_taken_off_and_do_not_trigger_stops():
    lm = make_lm(lambda _: "wait Q: hm</think>\n\nanswer Q: more")
    assert lm.generate_until([make_instance("ask<think>\n", {"until": ["Q:"]})]) == ["answer "]
    assert lm.engine.seen[0][1].stop == ()
    assert lm.records[0].thinking == "wait Q: hm"


def test_unknown_task_argument_is_told_once(caplog):
    lm = make_lm()
    requests = [make_instance("a", {"num_beams": 4}, doc_id=i) for i in range(3)]
    with caplog.at_level(logging.WARNING, "diffulex_bench"):
        lm.generate_until(requests)
    assert [line.getMessage() for line in caplog.records] == [
        "task toy asks for num_beams, which this engine does not have"
    ]


def test_chat_prompts_are_opened_or_continued():
    lm = make_lm()
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    assert lm.apply_chat_template(history[:1]) == "[user]hi[assistant]"
    assert lm.apply_chat_template(history, add_generation_prompt=False) == "[user]hi[assistant]Well,"
    assert lm.chat_template(True) == "{{ messages }}"
    assert lm.chat_template(False) == ""
    with pytest.raises(BenchError, match="named chat templates"):
        lm.chat_template("other")


def test_tokenizer_name_holds_the_whole_path():
    engine = FakeEngine(str, FakeConfig(tokenizer_path="/a/b"))
    assert make_lm(engine=engine).tokenizer_name == "a__b"
    assert make_lm().tokenizer_name == "models__toy"
    assert make_lm().get_model_info()["diffulex_engine"]["max_model_len"] == "2048"


@pytest.mark.parametrize("method", ["loglikelihood", "loglikelihood_rolling"])
def test_log_likelihoods_are_refused_in_one_sentence(method):
    with pytest.raises(NotImplementedError, match="does not answer log-likelihood requests"):
        getattr(make_lm(), method)([])


def test_model_args_string_builds_engine_and_settings(tmp_path, monkeypatch):
    model = write_stub(tmp_path / "model", 64, mask_id=0, eos_ids=(1,))
    built = []
    monkeypatch.setattr(lm_eval_model, "build_engine", lambda config: built.append(config) or FakeEngine(str))
    text = f"pretrained={model},model_name=sdar,max_nfe=5,block_size=16,page_size=16"
    lm = DiffulexLM.create_from_arg_string(text, {"batch_size": 4, "max_batch_size": None, "device": "cpu"})
    assert (built[0].block_size, built[0].max_num_reqs, built[0].device) == (16, 4, "cpu")
    assert lm.bench.explicit_eval == {"max_nfe"}


def test_model_args_need_a_folder_and_known_names(tmp_path):
    with pytest.raises(BenchError, match="pretrained=FOLDER"):
        DiffulexLM(model_name="sdar")
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        DiffulexLM(str(tmp_path), block_siz=16)
