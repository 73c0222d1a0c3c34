"""The task sets that `specjax evaluate` knows, described in docs/evaluation.md."""

from typing import Any

from specjax.evaluation.tasks.arithmetic import GSM8K
from specjax.evaluation.tasks.base import Task as Task
from specjax.evaluation.tasks.choices import GPQA, PIQA, WINOGRANDE
from specjax.evaluation.tasks.competition import MATH
from specjax.evaluation.tasks.programs import HUMANEVAL, MBPP
from specjax.evaluation.tasks.scored import ChoiceTask as ChoiceTask
from specjax.evaluation.tasks.scored import TextTask as TextTask
from specjax.evaluation.tasks.summaries import CNN_DAILYMAIL, XSUM
from specjax.evaluation.tasks.unjudged import (
    CLASS_EVAL,
    HAGRID,
    MT_BENCH,
    SPEC_BENCH,
    VICUNA_BENCH,
)
from specjax.evaluation.tasks.written import WrittenTask as WrittenTask

WIKITEXT2 = TextTask(
    "wikitext2", "WikiText-2: perplexity of encyclopedia articles", "texts/wikitext2_valid.txt"
)

TASKS: dict[str, Task[Any]] = {
    task.name: task
    for task in (
        GSM8K, MATH, HUMANEVAL, MBPP, PIQA, WINOGRANDE, GPQA, CNN_DAILYMAIL, XSUM, WIKITEXT2,
        MT_BENCH, VICUNA_BENCH, SPEC_BENCH, HAGRID, CLASS_EVAL,
    )
}  # fmt: skip
