"""Kernels for NVIDIA GPUs of any generation (attention from Ampere on)."""

from pallas_kernels.triton_gpu.attention_kernel import attention as attention
from pallas_kernels.triton_gpu.attention_kernel import attention_refusal as attention_refusal
from pallas_kernels.triton_gpu.by_format import matmul as matmul
from pallas_kernels.triton_gpu.by_format import products as products
from pallas_kernels.triton_gpu.by_format import reading as reading
from pallas_kernels.triton_gpu.by_format import sums as sums
from pallas_kernels.triton_gpu.gate import swiglu as swiglu
from pallas_kernels.triton_gpu.new_entries import rotate_and_write as rotate_and_write
from pallas_kernels.triton_gpu.new_entries import rotate_and_write_sums as rotate_and_write_sums
from pallas_kernels.triton_gpu.norms import rms_norm as rms_norm
