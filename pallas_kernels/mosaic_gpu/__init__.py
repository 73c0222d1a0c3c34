from pallas_kernels.reference import matmul as matmul
