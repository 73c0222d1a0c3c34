"""Matrix kernels for NVIDIA GPUs of any generation."""

from pallas_kernels.triton_gpu.quantized_matmul import matmul as matmul
