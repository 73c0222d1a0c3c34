"""How good a model is: whole task sets, perplexity, and what low precision costs."""

from specjax.evaluation.evaluate import Progress as Progress
from specjax.evaluation.evaluate import TaskResult as TaskResult
from specjax.evaluation.evaluate import evaluate as evaluate
from specjax.evaluation.fidelity import Fidelity as Fidelity
from specjax.evaluation.fidelity import fidelity as fidelity
from specjax.evaluation.perplexity import Perplexity as Perplexity
from specjax.evaluation.perplexity import perplexity as perplexity
from specjax.evaluation.tasks import TASKS as TASKS
