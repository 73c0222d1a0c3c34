"""How good a quantized model is: perplexity, and how alike two activation precisions are."""

from specjax.evaluation.fidelity import Fidelity as Fidelity
from specjax.evaluation.fidelity import fidelity as fidelity
from specjax.evaluation.perplexity import Perplexity as Perplexity
from specjax.evaluation.perplexity import perplexity as perplexity
