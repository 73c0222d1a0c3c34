"""Matrix kernels for NVIDIA's Hopper GPUs."""

from pallas_kernels.mosaic_gpu.devices import is_hopper as is_hopper
from pallas_kernels.mosaic_gpu.quantized_matmul import matmul as matmul
from pallas_kernels.mosaic_gpu.quantized_matmul import products as products
from pallas_kernels.mosaic_gpu.quantized_matmul import reading as reading
from pallas_kernels.mosaic_gpu.quantized_matmul import sums as sums
from pallas_kernels.mosaic_gpu.quantized_matmul import supports as supports
