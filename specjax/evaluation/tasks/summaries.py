"""CNN/DailyMail (Hermann et al. 2015) and XSum (Narayan et al. 2018): summaries, scored by ROUGE.

ROUGE (Lin 2004) counts what a summary and its reference have in common: words, pairs of words, and
their longest common subsequence. Its F-measures are Google's `rouge-score`, with stems of words.
"""

from __future__ import annotations

import functools
from typing import Any

from specjax.evaluation.tasks.base import Setup, identity
from specjax.evaluation.tasks.written import Question, Verdict, WrittenTask
from specjax.files.json_lines import Line

_SCORES = ("rouge1", "rouge2", "rougeL")


class SummaryTask(WrittenTask):
    """A task whose answers are summaries."""

    def check(self, setup: Setup) -> None:
        super().check(setup)
        _scorer()


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError(
            "summaries are scored by rouge-score: pip install 'specjax[rouge]'"
        ) from error
    return RougeScorer(_SCORES, use_stemmer=True)


def _judge(question: Question, answer: str) -> Verdict:
    found = _scorer().score(question.reference, answer)
    return Verdict(None, scores={name: found[name].fmeasure for name in _SCORES})


def _task(name: str, title: str, article: str, summary: str) -> SummaryTask:
    def read(line: Line) -> Question:
        prompt = f"Article: {line.text(article)}\nSummary:"
        return Question(identity(line, "id"), prompt, line.text(summary))

    return SummaryTask(
        name=name, title=title, file=f"prompts/{name}.jsonl", read=read, judge=_judge, metric=None,
        max_new_tokens=128, stops=("\n\n", "\nArticle:"), scores=_SCORES,
    )  # fmt: skip


CNN_DAILYMAIL = _task(
    "cnn_dailymail", "CNN/DailyMail: news in a few sentences", "article", "highlights"
)
XSUM = _task("xsum", "XSum: news in one sentence", "document", "summary")
