"""Evaluates models: whole task sets, perplexity, and the cost of low precision."""

from specjax.evaluation.activation_fidelity import Fidelity as Fidelity
from specjax.evaluation.activation_fidelity import fidelity as fidelity
from specjax.evaluation.sliding_windows import Perplexity as Perplexity
from specjax.evaluation.sliding_windows import perplexity as perplexity
from specjax.evaluation.task_sets import TaskProgress as TaskProgress
from specjax.evaluation.task_sets import TaskResult as TaskResult
from specjax.evaluation.task_sets import evaluate as evaluate
from specjax.evaluation.tasks import TASKS as TASKS
