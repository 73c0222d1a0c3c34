"""Matrix kernels for TPUs."""

from pallas_kernels.mosaic_tpu.quantized_matmul import matmul as matmul
