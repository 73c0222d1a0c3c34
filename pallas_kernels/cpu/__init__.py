"""Kernels for CPUs: a C++ library that XLA calls, with code for several instruction sets."""

from pallas_kernels.cpu.attention_call import attention as attention
from pallas_kernels.cpu.hadamard_call import hadamard as hadamard
from pallas_kernels.cpu.layers_call import layers as layers
from pallas_kernels.cpu.matmul_call import available as available
from pallas_kernels.cpu.matmul_call import matmul as matmul
from pallas_kernels.cpu.rows import rms_norm as rms_norm
from pallas_kernels.cpu.rows import rotate as rotate
from pallas_kernels.cpu.rows import swiglu as swiglu
