"""Matrix and attention kernels for TPUs."""

from pallas_kernels.mosaic_tpu.attention_kernel import attention as attention
from pallas_kernels.mosaic_tpu.attention_kernel import attention_refusal as attention_refusal
from pallas_kernels.mosaic_tpu.by_format import matmul as matmul
