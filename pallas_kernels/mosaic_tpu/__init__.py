"""Matrix and attention kernels for TPUs."""

from pallas_kernels.mosaic_tpu.attention import attention as attention
from pallas_kernels.mosaic_tpu.attention import attention_refusal as attention_refusal
from pallas_kernels.mosaic_tpu.products import matmul as matmul
