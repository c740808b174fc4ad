"""The ``eval`` section of the settings table: which task, which sampling limits, which output."""

from __future__ import annotations

from dataclasses import dataclass, fields

from diffulex.settings.spec import ConfigError, check_value, setting, settings_of


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Settings of one evaluation.

    Raises:
        ConfigError: a ValueError that lists every value that cannot be used.
    """

    dataset_name: str = setting(
        "gsm8k_diffulex", help="Name of an lm-eval task; several are separated by commas."
    )
    dataset_split: str = setting(
        "test",
        help="Split of the task's data; unless written, the task's own. A single local file is one split.",
    )
    dataset_limit: int | None = setting(None, help="Documents per task, null for all.", low=1)
    dataset_data_files: str | None = setting(
        None,
        help="Local data file in place of the task's source: absolute, relative to the YAML that names it, "
        "or relative to the working folder.",
    )
    include_path: str | None = setting(
        None,
        help="Folder of task YAMLs that win over the bundled ones; an empty text leaves the bundled out.",
    )
    num_fewshot: int | None = setting(
        None, help="Worked examples before a question; null as the task says.", low=0
    )
    apply_chat_template: bool = setting(False, help="Wrap prompts in the tokenizer's chat template.")
    system_instruction: str | None = setting(None, help="System message put in front of every prompt.")
    fewshot_as_multiturn: bool = setting(True, help="With a chat template, examples are turns of their own.")
    add_bos_token: bool | None = setting(
        None, help="One BOS in front of every prompt (true), none (false), or as the tokenizer does (null)."
    )
    overlong_prompt: str = setting(
        "error",
        help="A prompt that exceeds the window is recorded as failed (error) or keeps its end (left).",
        choices=("error", "left"),
    )
    temperature: float = setting(0.0, help="0 takes the most probable token; higher values draw.", low=0)
    max_tokens: int = setting(256, help="Most tokens of an answer.", low=1)
    max_nfe: int | None = setting(None, help="Most forward passes of an answer; null for no limit.", low=1)
    max_repetition_run: int | None = setting(
        None, help="An answer ends when one token stands this many times in a row; null for no limit.", low=1
    )
    ignore_eos: bool = setting(False, help="Go on after an end-of-sequence token.")
    top_p: float = setting(
        1.0, help="Draw from the tokens that together reach this probability.", above=0, high=1
    )
    top_k: int = setting(0, help="Draw from this many most probable tokens; 0 means all.", low=0)
    confidence: str = setting(
        "prob",
        help="What ranks candidates: probability, its margin to the second, or negative entropy.",
        choices=("prob", "margin", "neg_entropy"),
    )
    eval_seed: int = setting(
        0,
        help="Base of every sample's own seed, with task, document and repeat; also draws the examples.",
        low=0,
        high=2**32 - 1,
    )
    output_dir: str = setting("benchmark_results", help="Folder that run folders are made in.")
    use_run_subdirectory: bool = setting(True, help="Give every run its own folder below output_dir.")
    save_results: bool = setting(True, help="Write results and samples; without, only the log.")
    show_progress: bool = setting(True, help="Show how far the run is.")
    confirm_run_unsafe_code: bool = setting(False, help="Allow tasks that run code the model wrote.")

    def __post_init__(self) -> None:
        problems = []
        for name, info in settings_of(EvalSettings).items():
            plain, wrong = check_value(info, getattr(self, name))
            if wrong is not None:
                problems.append(wrong)
            object.__setattr__(self, name, plain)
        if not problems and not self.task_names:
            problems.append(f"dataset_name must name a task, got {self.dataset_name!r}")
        if problems:
            raise ConfigError(problems)

    @property
    def task_names(self) -> tuple[str, ...]:
        """The task names, without repeats."""
        return tuple(dict.fromkeys(name for part in self.dataset_name.split(",") if (name := part.strip())))

    def as_dict(self) -> dict[str, object]:
        """All values by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
