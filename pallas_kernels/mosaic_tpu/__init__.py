"""Matrix kernels for TPUs."""

from pallas_kernels.mosaic_tpu.int4_matmul import matmul as matmul
