"""Matrix kernels for NVIDIA GPUs."""

from pallas_kernels.triton_gpu.int4_matmul import matmul as matmul
