"""Plans speculation, by formula and by measurement: speed, draft length, memory, layers to skip.

The formulas come from an article on quantized drafts ("Quantized Draft Models for Speculative
Decoding") and from ML-SpecQD (Georganas et al. 2025). The article's printed speed-ups do not follow
from its own formulas; this package implements the formulas.
"""

from specjax.model.sizes import activation_bytes as activation_bytes
from specjax.model.sizes import cache_bytes as cache_bytes
from specjax.model.sizes import weight_bytes as weight_bytes
from specjax.planning.layer_search import LayerSet as LayerSet
from specjax.planning.layer_search import search_layers as search_layers
from specjax.planning.measurement import Measurement as Measurement
from specjax.planning.measurement import measure as measure
from specjax.planning.memory import Memory as Memory
from specjax.planning.memory import plan_memory as plan_memory
from specjax.planning.speed import Level as Level
from specjax.planning.speed import accepted_share as accepted_share
from specjax.planning.speed import best_draft_lengths as best_draft_lengths
from specjax.planning.speed import expected_rounds as expected_rounds
from specjax.planning.speed import expected_tokens as expected_tokens
from specjax.planning.speed import fastest_drafts as fastest_drafts
from specjax.planning.speed import ml_specqd_speedup as ml_specqd_speedup
from specjax.planning.speed import speedup as speedup
